"""Tool calls of turns: jobs with a scope that callers cannot write to (rule 34), so all promises of jobs are theirs.

Promises: one job for each step of a turn, whoever asks for it and however often; a machine that is not there, a full
          queue, an outcome that nobody knows are outcomes like others, in words that a model can act on. What is
          answered is final: the record says the same for ever, or there is none.
Used by:  `steps` (run), `handling` (cancel).
"""

import asyncio
from typing import NamedTuple

import structlog

from common.errors import StoreUnavailable
from common.ids import JobId, TurnId, UserId, new_id
from common.store import keys
from common.store.cancels import end_queued
from common.store.jobs import Jobs, Seen
from common.store.presence import state_of
from common.store.records import Accepted, NewJob, Record, error_outcome, fingerprint
from common.store.redis import Redis
from common.store.replies import Cut, Ended, Waiters
from common.store.requests import Requests
from common.store.turns import Turn
from towline.wire import json
from towline.wire.api import PresenceState
from worker.agents import AgentFailed
from worker.insist import insist
from worker.metrics import WorkerMetrics

logger = structlog.get_logger(__name__)

# From the tool's start on the machine: the default of jobs.
TIMEOUT_S = 120.0
# From the call on, waiting behind other jobs included: the model is to hear of it while the turn has time left.
DEADLINE_S = 180.0
# While it is not known whether a machine is connected (a Redis that was just restarted), it is asked for this often.
ASK_AGAIN_S = 1.0
# Each wait for a job's end is this long; then the record is read, and waited for again.
WAIT_S = 60.0
# Open jobs of one turn; a model that asks for more at once than that is none.
OPEN_MAX = 200

OFFLINE = error_outcome("machine-offline", "the user's machine is not connected, so the tool did not run")
WENT_OFFLINE = error_outcome(
    "machine-offline", "the user's machine went away before the tool was started; it did not run"
)
QUEUE_FULL = error_outcome("queue-full", "too many calls wait for the user's machine, so the tool did not run")


class Outcome(NamedTuple):
    """How a tool call ended. `state`: a job's terminal one; `text`: JSON with `result` or `error`, as of a job."""

    state: str
    text: str


def refused(text: str) -> Outcome:
    """No job was made of the call."""
    return Outcome("failed", text)


def words_of(outcome: Outcome) -> str:
    """What a model is told (PURE)."""
    body = json.loads(outcome.text)
    if "result" in body:
        return json.dumps(body["result"]).decode()
    reason = f"{body['error']['message']} ({body['error']['code']})"
    match outcome.state:
        case "unknown":
            return (
                f"The call was cut off: the tool may or may not have run. {reason}. Do not assume either, and do not"
                " repeat the call before you have found out."
            )
        case "expired" | "cancelled":
            return f"The tool did not run: {reason}"
        case _:
            return f"The tool failed: {reason}"


def refusal_of(seen: Seen, state: PresenceState) -> Outcome | None:
    """Why a call that has no record yet is not made a job (PURE); None: it is, or nobody knows yet (`unknown`)."""
    if state == "offline":
        return refused(OFFLINE)
    if not seen.has_room:
        return refused(QUEUE_FULL)
    return None


def job_of(turn: Turn, user: UserId, step: str, name: str, args: bytes, *, time_s: float) -> NewJob:
    """The job of a step; whether its tool is hinted is found out at the door."""
    return NewJob(
        job=JobId(new_id()),
        user=user,
        scope=_scope(turn),
        key=f"{turn.turn}:{step}",
        name=name,
        args=args.decode(),
        fingerprint=fingerprint(name, args),
        timeout_s=max(1.0, min(TIMEOUT_S, time_s)),
        deadline_s=max(1.0, min(DEADLINE_S, time_s)),
        hinted=False,
        on_machine_change="unknown",
        traceparent=turn.traceparent,
    )


class ToolCalls:
    """The calls of all turns of this worker."""

    def __init__(
        self,
        *,
        redis: Redis,
        jobs: Jobs,
        requests: Requests,
        waiters: Waiters,
        timing: keys.Timing,
        metrics: WorkerMetrics,
    ) -> None:
        self._redis = redis
        self._jobs = jobs
        self._requests = requests
        self._waiters = waiters
        self._timing = timing
        self._metrics = metrics
        self._accepting: dict[asyncio.Task[Accepted], TurnId] = {}

    async def run(self, turn: Turn, user: UserId, step: str, name: str, args: bytes, *, time_s: float) -> Outcome:
        """Have a tool run on the user's machine, or find out what became of that; returns its final outcome.

        Stores that are away are waited for. Cancelling this leaves the job as it is (`cancel`).

        Args:
            args: canonical JSON.
            time_s: the rest of the turn, which bounds the job.

        Raises:
            AgentFailed: the step stands for another call (rule 34).
        """
        new = job_of(turn, user, step, name, args, time_s=time_s)
        while True:
            seen = await insist("ask", lambda: self._jobs.ask(user, name))
            state = state_of(seen, self._redis.answering_for_s(), self._timing)
            refusal = refusal_of(seen, state)
            if refusal is None and state != "unknown":
                break
            # An earlier attempt may have had it accepted: then nothing refuses it any more (rule 9).
            if (found := await self._find(new)) is not None:
                return found
            if refusal is not None:
                return refusal
            await asyncio.sleep(ASK_AGAIN_S)
        asked = new._replace(hinted=seen.hint == "h")
        accepted = await self._accept(turn, asked)
        record = _matching(accepted.record, new)
        if accepted.inserted:
            logger.info("tool_called", turn=turn.turn, step=step, user=user, job=record.job, tool=name)
        return await self._outcome(record, new.args if accepted.inserted else None)

    async def _accept(self, turn: Turn, asked: NewJob) -> Accepted:
        """Have a job accepted. What was sent to Postgres is not taken back by leaving here: `cancel` waits for it."""
        accepting = asyncio.create_task(insist("accept", lambda: self._requests.accept(asked)), name="accept")
        self._accepting[accepting] = turn.turn
        accepting.add_done_callback(self._accepting.pop)
        return await asyncio.shield(accepting)

    async def find(self, turn: Turn, user: UserId, step: str, name: str, args: bytes) -> Outcome | None:
        """The final outcome of a call that an earlier attempt has made; None: there was none. Raises: AgentFailed."""
        return await self._find(job_of(turn, user, step, name, args, time_s=DEADLINE_S))

    async def _find(self, new: NewJob) -> Outcome | None:
        known = await insist("find", lambda: self._requests.find(new.scope, new.key))
        return None if known is None else await self._outcome(_matching(known, new), None)

    async def _outcome(self, record: Record, new_args: str | None) -> Outcome:
        """Wait for a job to end. `new_args`: of one that is not before its machine yet."""
        online = True
        while not record.terminal:
            # Register first, read the record second (rule 15); enqueuing a new job registers too.
            waiter = self._waiters.add(record.job, record.user, online=online)
            try:
                if new_args is None or not await self._enqueue(record, new_args):
                    record = await self._join(record)
                new_args = None
                told = record if record.terminal else await waiter.wait(WAIT_S)
            finally:
                self._waiters.remove(waiter)
            if isinstance(told, Record):
                record = told
            elif isinstance(told, Ended):
                record = told.applied_to(record)
            elif told is Cut.OFFLINE:
                if await self._cancel_queued(record):
                    return Outcome("cancelled", WENT_OFFLINE)
                # It was begun. The machine may come back with its outcome; at the deadline the record says `unknown`.
                online = False
        assert record.outcome is not None
        return Outcome(record.state, record.outcome)

    async def _enqueue(self, record: Record, args: str) -> bool:
        try:
            return await self._jobs.enqueue(record, args, self._waiters.gateway)
        except StoreUnavailable as error:
            logger.warning("job_left_to_sweeper", job=record.job, error=str(error))
            return True

    async def _join(self, record: Record) -> Record:
        try:
            await self._jobs.register_waiter([record.job], self._waiters.gateway)
        except StoreUnavailable as error:
            logger.warning("waiter_unregistered", job=record.job, error=str(error))  # the rereads will find it
        records = await insist("read", lambda: self._requests.read([record.job]))
        return records.get(record.job, record)

    async def cancel(self, turn: Turn) -> None:
        """Cancel what the turn has open on its user's machine: an earlier attempt may have begun it.

        A job that is being accepted is waited for, or it would be there unseen, and run. Else a store that does not
        answer is not: those jobs end at their deadlines.
        """
        if turn.user is None:
            return
        if late := {task for task, of in self._accepting.items() if of == turn.turn}:
            await asyncio.wait(late)
        try:
            for state in ("queued", "processing"):
                records = await self._requests.list_of_user(
                    turn.user, scope=_scope(turn), state=state, key=None, before=None, limit=OPEN_MAX
                )
                for record in records:
                    if not await self._cancel_queued(record):
                        await self._jobs.ask_to_stop(record.job, record.user)
        except StoreUnavailable as error:
            logger.warning("tool_left_running", turn=turn.turn, error=str(error))

    async def _cancel_queued(self, record: Record) -> bool:
        """End a job that was not begun; False: it was."""
        cancelled = await insist("cancel", lambda: end_queued(record, self._requests, self._jobs))
        if cancelled is not None:
            self._metrics.jobs_total["cancelled"].inc()
        return cancelled is not None


def _scope(turn: Turn) -> str:
    return f"turn:{turn.turn}"


def _matching(record: Record, new: NewJob) -> Record:
    if record.fingerprint != new.fingerprint:
        raise AgentFailed(
            "step-mismatch", f"the step {new.key} was a call of {record.name!r} with other arguments before"
        )
    return record
