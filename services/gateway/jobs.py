"""Jobs over HTTP: submit, wait, read, list, cancel.

Promises: what was answered 2xx is durable; a key that has a record is answered from it whatever else is refused; after
          a record exists nothing refuses it any more; nobody is told "not yet" without a last look into the record.
          A caller that waits holds no arguments: no answer shows them, and as many as may wait would fill the memory.
"""

from collections.abc import Callable

import msgspec
import structlog
from msgspec import UNSET

from common.errors import StoreUnavailable
from common.ids import JobId, is_uuid
from common.store import keys
from common.store.cancels import end_queued
from common.store.jobs import Jobs, Seen
from common.store.presence import state_of
from common.store.records import Record
from common.store.redis import Redis
from common.store.replies import Cut, Ended, Waiter, Waiters
from common.store.requests import Requests
from common.store.tokens import Tokens
from gateway import paging, problems
from gateway.auth import Auth
from gateway.http import Answer
from gateway.machines import tools_of
from gateway.metrics import GatewayMetrics
from gateway.problems import Refusal
from gateway.request import ClientGone, Header, Request
from gateway.submission import Submission, preferred_wait_s, read_submission, refusal_of
from towline.wire import json
from towline.wire.api import JOB_STATES, Job, timestamp

logger = structlog.get_logger(__name__)


class JobRoutes:
    """The handlers of everything about jobs. `is_full`: whether no further caller of this process may wait."""

    def __init__(
        self,
        *,
        auth: Auth,
        redis: Redis,
        jobs: Jobs,
        requests: Requests,
        tokens: Tokens,
        waiters: Waiters,
        is_full: Callable[[], bool],
        timing: keys.Timing,
        metrics: GatewayMetrics,
        is_strict: bool,
    ) -> None:
        self._auth = auth
        self._redis = redis
        self._jobs = jobs
        self._requests = requests
        self._tokens = tokens
        self._waiters = waiters
        self._is_full = is_full
        self._timing = timing
        self._metrics = metrics
        self._is_strict = is_strict

    async def submit(self, request: Request) -> Answer:
        """`POST /v1/users/{user}/jobs`."""
        user = await self._auth.require_for_user(request, "jobs")
        asked = await read_submission(request, user)
        refusal, hinted, online = await self._ask(asked)
        if refusal:
            record, inserted = await self._requests.find(asked.scope, asked.key), False
            if record is None:
                raise refusal
        else:
            record, inserted = await self._requests.accept(asked.new_job(hinted=hinted))
        if not inserted:
            asked = asked.without_args()
            return await self._answer_known(request, asked, record, online=online)
        logger.info("job_accepted", user=user, job=record.job, tool=record.name, traceparent=asked.traceparent)
        if not (wait_s := asked.wait_s):
            await self._enqueue(record, asked, waits=False)
            return _answer(record, wait_s=wait_s)
        waiter = self._waiters.add(record.job, user, online=online)
        try:
            if not await self._enqueue(record, asked, waits=True):
                record = await self._read_again(record)
            asked = asked.without_args()
            return await self._answer_when_ended(request, record, waiter, wait_s)
        finally:
            self._waiters.remove(waiter)

    async def _ask(self, asked: Submission) -> tuple[Refusal | None, bool, bool]:
        """Ask the door's questions: why not to let it in, whether the tool is hinted, whether a lapse would be news."""
        # Whoever did not ask to queue is told of a machine that has gone, also when it was gone already.
        expects_machine = not asked.queues
        try:
            seen = await self._jobs.ask(asked.user, asked.body.name)
        except StoreUnavailable as error:
            logger.warning("door_blind", error=str(error))
            return problems.store_unavailable(), False, expects_machine
        answering_for_s = self._redis.answering_for_s()
        state = state_of(seen, answering_for_s, self._timing)
        online = state in ("online", "reconnecting")
        hint = seen.hint
        if online and not hint:
            hint = await self._announced_hint(asked, seen)
        refusal = refusal_of(
            asked,
            seen,
            state,
            knows_tool=bool(hint),
            is_full=self._is_full(),
            answering_for_s=answering_for_s,
            timing=self._timing,
        )
        return refusal, online and hint == "h", online or expects_machine

    async def _announced_hint(self, asked: Submission, seen: Seen) -> str:
        """The hint of a tool that Redis does not list, by the durable catalogue of the machine that is connected.

        After a Redis loss presence is back one heartbeat before the catalogue is; nobody is told `unknown-tool` for it.
        """
        catalogue = await self._tokens.catalogue(asked.user)
        if catalogue is None or catalogue.machine != seen.presence.get("machine"):
            return ""
        hints = {tool.name: tool.hints for tool in tools_of(catalogue)}
        if asked.body.name not in hints:
            return ""
        return "h" if hints[asked.body.name].repeatable else "u"

    async def _enqueue(self, record: Record, asked: Submission, *, waits: bool) -> bool:
        """Put the job before its machine; False when it has ended already. A failure is no refusal: it is accepted."""
        try:
            gateway = self._waiters.gateway if waits else None
            return await self._jobs.enqueue(record, asked.args.decode(), gateway)
        except StoreUnavailable as error:
            logger.warning("job_left_to_sweeper", job=record.job, error=str(error))
            return True

    async def _answer_known(self, request: Request, asked: Submission, record: Record, *, online: bool) -> Answer:
        """Replay the key's record, or join it while it runs."""
        matches = record.fingerprint == asked.fingerprint
        if not matches and self._is_strict:
            detail = f"the key belongs to job {record.job}, which has another `name` or other `args`"
            raise Refusal(problems.KEY_REUSED, detail)
        if record.terminal or not asked.wait_s or self._is_full():
            # No place to wait is no reason to refuse what is recorded.
            return _answer(record, wait_s=None if asked.wait_s is None else 0, replayed=True, matches=matches)
        waiter = self._waiters.add(record.job, record.user, online=online)
        try:
            record = await self._join(record)
            return await self._answer_when_ended(request, record, waiter, asked.wait_s, replayed=True, matches=matches)
        finally:
            self._waiters.remove(waiter)

    async def _join(self, record: Record) -> Record:
        """Register for the reply, then read the record (rule 15)."""
        try:
            await self._jobs.register_waiter([record.job], self._waiters.gateway)
        except StoreUnavailable as error:
            logger.warning("waiter_unregistered", job=record.job, error=str(error))  # the rereads will find it
        return await self._read_again(record)

    async def _answer_when_ended(
        self,
        request: Request,
        record: Record,
        waiter: Waiter,
        wait_s: int,
        *,
        replayed: bool = False,
        matches: bool = True,
    ) -> Answer:
        told = record if record.terminal else await waiter.wait(wait_s, request.disconnected)
        if told is Cut.GONE:
            raise ClientGone
        if isinstance(told, Record):
            record = told
        elif isinstance(told, Ended):
            record = told.applied_to(record)
        else:
            record = await self._read_again(record)
        return _answer(record, wait_s=wait_s, replayed=replayed, matches=matches, machine_gone=told is Cut.OFFLINE)

    async def _read_again(self, record: Record) -> Record:
        """The record as it is now; as it was when Postgres does not answer (it exists, so nothing is refused)."""
        try:
            return (await self._requests.read([record.job])).get(record.job, record)
        except StoreUnavailable as error:
            logger.warning("record_unread", job=record.job, error=str(error))
            return record

    async def read(self, request: Request) -> Answer:
        """`GET /v1/jobs/{job}`."""
        record = await self._reachable(request)
        wait_s = preferred_wait_s(request)
        if record.terminal or not wait_s or self._is_full():
            return _answer(record, wait_s=None if wait_s is None else 0)
        # What is queued may be meant for later; what was begun has a machine whose lapse is news.
        waiter = self._waiters.add(record.job, record.user, online=record.state == "processing")
        try:
            return await self._answer_when_ended(request, await self._join(record), waiter, wait_s)
        finally:
            self._waiters.remove(waiter)

    async def list_jobs(self, request: Request) -> Answer:
        """`GET /v1/users/{user}/jobs`."""
        user = await self._auth.require_for_user(request, "jobs")
        state = request.query("state")
        if state is not None and state not in JOB_STATES:
            raise Refusal(problems.INVALID_REQUEST, f"the query parameter state is not one of {', '.join(JOB_STATES)}")
        key = request.query("idempotency_key")
        if key == "":
            raise Refusal(problems.INVALID_REQUEST, "the query parameter idempotency_key is empty")
        size = paging.limit(request)
        before = paging.before(request)
        records = await self._requests.list_of_user(
            user, state=state, key=key, before=None if before is None else JobId(before), limit=size + 1
        )
        return Answer(200, json.dumps(paging.page(records, size, view, lambda record: record.job)))

    async def cancel(self, request: Request) -> Answer:
        """`DELETE /v1/jobs/{job}`."""
        record = await self._reachable(request)
        if not record.terminal:
            cancelled = await end_queued(record, self._requests, self._jobs)
            if cancelled is not None:
                self._metrics.jobs_total["cancelled"].inc()
                return _answer(cancelled)
            record = await self._read_again(record)
        if not record.terminal:
            await self._jobs.ask_to_stop(record.job, record.user)
        return _answer(record)

    async def _reachable(self, request: Request) -> Record:
        key = await self._auth.require(request, "jobs")
        job = JobId(request.params["job"])
        record = (await self._requests.read([job])).get(job) if is_uuid(job) else None
        if record is None or not key.reaches(record.user):
            raise problems.not_found("job")
        return record


def view(record: Record, *, replayed: bool = False, matches: bool = True, machine_gone: bool = False) -> Job:
    """A record as callers see it; the outcome is the record's own bytes."""
    return Job(
        job=record.job,
        user=record.user,
        name=record.name,
        state=record.state,  # type: ignore[arg-type]  # one of them, by the table's own check
        attempts=record.attempts,
        accepted_at=timestamp(record.accepted_ms),
        deadline_at=timestamp(record.deadline_ms),
        replayed=replayed,
        ended_at=UNSET if record.ended_ms is None else timestamp(record.ended_ms),
        outcome=UNSET if record.outcome is None else msgspec.Raw(record.outcome.encode()),
        payload_matches=UNSET if matches else False,
        machine="offline" if machine_gone and not record.terminal else UNSET,
    )


def _answer(
    record: Record,
    *,
    wait_s: int | None = None,
    replayed: bool = False,
    matches: bool = True,
    machine_gone: bool = False,
) -> Answer:
    """200 once terminal, whatever the outcome; else 202 and where to read on. `wait_s`: the wait that was applied."""
    headers: list[Header] = []
    if not record.terminal:
        headers.append((b"location", f"/v1/jobs/{record.job}".encode()))
    if wait_s is not None:
        headers.append((b"preference-applied", b"wait=%d" % wait_s))
    if replayed:
        headers.append((b"idempotent-replayed", b"true"))
    body = json.dumps(view(record, replayed=replayed, matches=matches, machine_gone=machine_gone))
    return Answer(200 if record.terminal else 202, body, tuple(headers))
