"""Runs over HTTP: have one followed, read, list, stop.

Promises: what was answered 2xx is durable; a URL that may not be called is refused before anything is recorded; the
          headers given with it are encrypted before they are stored, and never shown.
"""

import msgspec
import structlog

from common.errors import StoreUnavailable
from common.ids import RunId
from common.process.egress import Allowlist, EgressRefused
from common.process.secrets import Secrets
from common.store import leases
from common.store.leases import Look, SourceStatus
from common.store.redis import Redis
from common.store.runs import NewRun, NewSource, Run, Runs, Source
from gateway import paging, problems
from gateway.auth import Auth
from gateway.http import Answer
from gateway.problems import Refusal
from gateway.request import Header, Request
from towline.wire import json
from towline.wire import runs as wire
from towline.wire.api import timestamp

logger = structlog.get_logger(__name__)

HEADERS_BYTES_MAX = 16 * 1024

# What makes the request what it is, belongs to the connection, or is how the relay resumes.
_OWN_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "last-event-id",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


_status_decoder = msgspec.json.Decoder(dict[str, SourceStatus])


class RunRoutes:
    """The handlers of everything about runs but their events."""

    def __init__(self, *, auth: Auth, redis: Redis, runs: Runs, egress: Allowlist, secrets: Secrets) -> None:
        self._auth = auth
        self._redis = redis
        self._runs = runs
        self._egress = egress
        self._secrets = secrets

    async def follow(self, request: Request) -> Answer:
        """`PUT /v1/runs/{run}`."""
        await self._auth.require_unbound(request, "runs")
        run = RunId(request.id("run"))
        body = await request.read(wire.RunFollow)
        record, found = await self._runs.follow(self._new_run(run, body))
        if found == "other":
            raise Refusal(
                problems.RUN_DIFFERS,
                f"the run is followed with another definition, since {timestamp(record.created_ms)}",
            )
        if found == "ended":
            raise Refusal(problems.RUN_ENDED, f"the run ended as {record.state!r}; choose another id")
        if found == "created":
            logger.info("run_accepted", run=run, sources=len(record.sources))
            return Answer(201, await self._body(record), (_location(run),))
        return Answer(200, await self._body(record))

    async def read_run(self, request: Request) -> Answer:
        """`GET /v1/runs/{run}`."""
        await self._auth.require_unbound(request, "runs")
        record = await self._runs.read(RunId(request.id("run")))
        if record is None:
            raise problems.not_found("run")
        return Answer(200, await self._body(record))

    async def list_runs(self, request: Request) -> Answer:
        """`GET /v1/runs`."""
        await self._auth.require_unbound(request, "runs")
        state = request.query("state")
        if state is not None and state not in wire.RUN_STATES:
            names = ", ".join(wire.RUN_STATES)
            raise Refusal(problems.INVALID_REQUEST, f"the query parameter state is not one of {names}")
        size = paging.limit(request)
        before = paging.before_run(request)
        records = await self._runs.list_page(state=state, before=before, limit=size + 1)
        looks = await self._look(records[:size])
        return Answer(200, json.dumps(paging.page_of_runs(records, size, lambda record: view(record, looks))))

    async def stop_run(self, request: Request) -> Answer:
        """`DELETE /v1/runs/{run}`."""
        await self._auth.require_unbound(request, "runs")
        record = await self._runs.request_stop(RunId(request.id("run")))
        if record is None:
            raise problems.not_found("run")
        if record.terminal:
            return Answer(200, await self._body(record))
        return Answer(202, await self._body(record), (_location(record.run),))

    def _new_run(self, run: RunId, body: wire.RunFollow) -> NewRun:
        names = [source.source for source in body.sources]
        if len(set(names)) < len(names):
            raise Refusal(problems.INVALID_REQUEST, "the body: two sources have the same name", place="$.sources")
        sources = [self._new_source(source, f"$.sources[{i}]") for i, source in enumerate(body.sources)]
        return NewRun(run, sources, body.progress_types, body.terminal_types, body.stall_after_s, body.max_duration_s)

    def _new_source(self, source: wire.SourceFollow, place: str) -> NewSource:
        try:
            self._egress.check_url(source.url)
        except EgressRefused as error:
            raise Refusal(problems.EGRESS_REFUSED, f"{error}", place=f"{place}.url") from None
        return NewSource(
            source.source,
            source.url,
            self._encrypted(source.headers, f"{place}.headers") if source.headers else None,
            source.resume,
            source.idle_timeout_s,
        )

    def _encrypted(self, headers: dict[str, str], place: str) -> bytes:
        for name in headers:
            if name.lower() in _OWN_HEADERS:
                raise Refusal(problems.INVALID_REQUEST, f"the body: the header {name} is the relay's own", place=place)
        if sum(len(name) + len(value) for name, value in headers.items()) > HEADERS_BYTES_MAX:
            detail = f"the body: the headers are larger than {HEADERS_BYTES_MAX} bytes"
            raise Refusal(problems.INVALID_REQUEST, detail, place=place)
        if not self._secrets.is_usable:
            raise Refusal(
                problems.NOT_CONFIGURED,
                "headers cannot be kept: this installation has no TOWLINE_SECRET_KEYS",
                place=place,
            )
        return self._secrets.encrypt(headers)

    async def _body(self, record: Run) -> bytes:
        return json.dumps(view(record, await self._look([record])))

    async def _look(self, records: list[Run]) -> dict[RunId, Look] | None:
        """What Redis knows of those that are followed; None: it does not answer, and that refuses nothing."""
        try:
            return await leases.look(self._redis, [record.run for record in records if not record.terminal])
        except StoreUnavailable as error:
            logger.warning("runs_unseen", runs=len(records), error=str(error))
            return None


def _location(run: RunId) -> Header:
    return b"location", f"/v1/runs/{run}".encode()


def view(record: Run, looks: dict[RunId, Look] | None) -> wire.Run:
    """A run as callers see it: its record, and what its relay says of it now."""
    look = None if looks is None else looks.get(record.run)
    statuses: dict[str, SourceStatus] = {}
    if look is not None and look.status:
        try:
            statuses = _status_decoder.decode(look.status)
        except msgspec.DecodeError:  # of a newer relay
            logger.warning("status_unread", run=record.run)
    return wire.Run(
        run=record.run,
        state=record.state,
        reason=record.reason,
        owner=None if look is None else look.owner,
        created_at=timestamp(record.created_ms),
        ended_at=None if record.ended_ms is None else timestamp(record.ended_ms),
        progress_types=list(record.progress_types),
        terminal_types=list(record.terminal_types),
        stall_after_s=record.stall_after_s,
        max_duration_s=record.max_duration_s,
        sources=[_view_of_source(record, source, statuses.get(source.source), look) for source in record.sources],
    )


def _view_of_source(record: Run, source: Source, status: SourceStatus | None, look: Look | None) -> wire.RunSource:
    has_ended = record.terminal or source.state is not None
    verdict: wire.Verdict = "unknown"
    if has_ended:
        verdict = "ended"
    elif status is not None and (status.live_ms is not None or status.verdict != "active"):
        verdict = status.verdict  # "active" before any sign of life is only the time it is given
    elif look is not None and record.age_ms > record.stall_after_s * 1000:
        verdict = "orphaned"  # for as long as Redis remembers no relay has had a sign of life
    connected: bool | None = None
    if has_ended:
        connected = False
    elif look is not None:
        # What the last owner said is no news once there is none.
        connected = look.owner is not None and status is not None and status.connected
    return wire.RunSource(
        source=source.source,
        url=source.url,
        resume=source.resume,
        idle_timeout_s=source.idle_timeout_s,
        connected=connected,
        live_at=None if status is None or status.live_ms is None else timestamp(status.live_ms),
        progress_at=None if status is None or status.progress_ms is None else timestamp(status.progress_ms),
        verdict=verdict,
        failure=None if has_ended or status is None else status.failure or None,
        state=source.state,
        reason=source.reason,
        detail=source.detail,
    )
