"""Event streams over HTTP: one run, several runs on one connection, the same as pages, and the tokens for browsers.

Promises: a reader gets what follows its last id, or is told what is missing; history and live events come from the same
          position, so that nothing is lost or doubled between them; whoever has seen the end is told to stay away.
"""

import asyncio
import random
import time
from collections.abc import Mapping

import structlog
from msgspec import UNSET

from common.errors import StoreUnavailable
from common.ids import RunId
from common.process.backoff import Backoff
from common.store.eventlog import ZERO, EventId, EventLog, Gap, LogEvent, Position
from common.store.runs import Run, Runs
from gateway import problems
from gateway.auth import Auth
from gateway.fanout import Fanout
from gateway.feeds import Client, Encoder
from gateway.frames import (
    KEEPALIVE,
    Alone,
    Batch,
    Together,
    gap_data,
    last_batch,
    parse_composite_id,
    stream_event,
)
from gateway.http import Answer, Stream, Write
from gateway.problems import Refusal
from gateway.request import Request
from gateway.stream_tokens import StreamTokens
from towline.wire import events, ids, json
from towline.wire.api import timestamp
from towline.wire.runs import (
    EVENTS_PAGE_DEFAULT,
    EVENTS_PAGE_MAX,
    STREAM_RUNS_MAX,
    End,
    EventsPage,
    StreamToken,
    StreamTokenCreate,
)

logger = structlog.get_logger(__name__)

SSE = b"text/event-stream; charset=utf-8"
# Proxies must neither keep what passes nor wait for more of it.
SSE_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
# When a gateway dies all its readers come back by this: no second of the span is to bring a sixth of them.
RETRY_MS = (1000, 7000)


class StreamRoutes:
    """The handlers of everything that is streamed."""

    def __init__(self, *, auth: Auth, runs: Runs, log: EventLog, fanout: Fanout, tokens: StreamTokens) -> None:
        self._auth = auth
        self._runs = runs
        self._log = log
        self._fanout = fanout
        self._tokens = tokens

    async def events(self, request: Request) -> Answer | Stream:
        """`GET /v1/runs/{run}/events`."""
        run = RunId(request.id("run"))
        await self._auth.require_for_streams(request, [run])
        record = await self._record(run)
        text = _last_event_id(request)
        cursor = None if text is None else _single(text)
        if _wants_json(request):
            return await self._page(request, record, cursor)
        if _has_seen_end(record, cursor):
            return Answer(204)
        return self._stream(request, {run: record}, {run: cursor}, Alone(run))

    async def many_events(self, request: Request) -> Answer | Stream:
        """`GET /v1/events`."""
        runs = _runs(request)
        await self._auth.require_for_streams(request, runs)
        records = await self._runs.read_many(runs)
        if len(records) < len(runs):
            raise problems.not_found("run")
        text = _last_event_id(request)
        cursors = dict.fromkeys(runs) if text is None else parse_composite_id(text, runs)
        if cursors is None:
            raise _impossible_id()
        if all(_has_seen_end(records[run], cursors[run]) for run in runs):
            return Answer(204)
        return self._stream(request, records, cursors, Together(cursors))

    async def mint_token(self, request: Request) -> Answer:
        """`POST /v1/stream-tokens`."""
        await self._auth.require_for_runs(request)
        body = await request.read(StreamTokenCreate)
        if not self._tokens.is_configured:
            raise Refusal(problems.NOT_CONFIGURED, "this installation makes no stream tokens: TOWLINE_TOKEN_KEYS")
        runs = sorted(set(body.runs))
        expires_ms = time.time_ns() // 1_000_000 + int(body.ttl_s * 1000)
        token = StreamToken(self._tokens.mint(runs, expires_ms), runs, timestamp(expires_ms))
        return Answer(201, json.dumps(token), ((b"cache-control", b"no-store"),))

    async def _record(self, run: RunId) -> Run:
        record = await self._runs.read(run)
        if record is None:
            raise problems.not_found("run")
        return record

    # ---- pages

    async def _page(self, request: Request, record: Run, cursor: EventId | None) -> Answer:
        if _starts_live(request):
            raise Refusal(problems.INVALID_REQUEST, "the query parameter from=live has no meaning for pages")
        size = _page_size(request)
        position = _position(record, cursor)
        page = await self._log.read_after(record.run, position, count=size)
        batch = Batch(record.run, page.items)
        at = page.position.at
        if record.terminal and not page.items and not page.more:
            batch = last_batch(record, page.position)
        # A gap stands before the items; what follows a later one is for the next page, which begins with it.
        gap: Gap | None = None
        shown: list[LogEvent] = []
        is_whole = True
        for item in batch.items:
            if isinstance(item, LogEvent):
                shown.append(item)
            elif not shown and gap is None:
                gap = item
            else:
                is_whole = False
                break
        if shown and (not is_whole or at < shown[-1].id):
            at = shown[-1].id
        body = EventsPage(
            [stream_event(item) for item in shown],
            None if at == ZERO else str(at),
            gap_data(record.run, gap) if gap else UNSET,
            End(record.run, batch.end) if batch.end and is_whole else UNSET,
        )
        return Answer(200, json.dumps(body))

    # ---- streams

    def _stream(
        self,
        request: Request,
        records: Mapping[RunId, Run],
        cursors: Mapping[RunId, EventId | None],
        encoder: Encoder,
    ) -> Stream:
        live = _starts_live(request)

        async def write(send: Write) -> bool:
            async with self._fanout.client(encoder) as client:
                watch = asyncio.create_task(_watch(request, client), name="sse-hang-up")
                try:
                    response = _Response(client, send)
                    await response.write(events.opening(self._fanout.keepalive_s, random.randint(*RETRY_MS)))  # noqa: S311
                    for run, record in records.items():
                        if client.ending:
                            break
                        await self._join(response, record, cursors[run], live=live and cursors[run] is None)
                    while chunk := await client.next_chunk():
                        await response.write(chunk)
                finally:
                    watch.cancel()
            return client.ending in ("ended", "drain") and not client.was_cut

        return Stream(SSE_HEADERS, SSE, write)

    async def _join(self, response: "_Response", record: Run, cursor: EventId | None, *, live: bool) -> None:
        """Write what is there of a run, then have the rest come by itself. Redis may be away: then wait for it."""
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        position: Position | None = None
        while True:
            try:
                if position is None:
                    tail = await self._log.tail(record.run) if live else None
                    position = _position(record, cursor) if tail is None else Position.live(tail)
                position = await self._catch_up(response, record, position)
            except StoreUnavailable as error:
                logger.debug("history_unread", run=record.run, problem=str(error))
                await response.write(KEEPALIVE)
                await asyncio.sleep(backoff.next_s())
                continue
            if position is None or response.client.ending:
                return

    async def _catch_up(self, response: "_Response", record: Run, position: Position) -> Position | None:
        """One step through the history; None: nothing more is to be read here. Raises: StoreUnavailable."""
        run = record.run
        others = self._fanout.position_of(run)
        page = await self._log.read_after(run, position)
        if position == Position.start(None) and any(isinstance(item, LogEvent) for item in page.items):
            known = await self._runs.read(run)
            if known is not None and known.first_seq is not None:
                return Position.start(known.first_seq)
        batch = Batch(run, page.items)
        if batch.items:
            await self._give(response, batch)
            return None if batch.end else page.position
        if page.more:
            return page.position
        if record.terminal:
            await self._give(response, last_batch(record, page.position))
            return None
        if self._fanout.join(response.client, run, page.position):
            return None
        if others is None or others.at <= page.position.at:
            return page.position  # more has come since
        # Others had read further than there is now: the stream was lost. Where it begins anew, all will be told.
        await self._fanout.mend(run)
        now = self._fanout.position_of(run) or page.position
        if page.position.at < now.at:
            await self._give(response, Batch(run, [Gap(page.position.last, None)]))
        return now

    async def _give(self, response: "_Response", batch: Batch) -> None:
        self._fanout.count_gaps(batch.gaps)
        await response.give(batch)


class _Response:
    """The writing end of one client."""

    def __init__(self, client: Client, send: Write) -> None:
        self.client = client
        self._send = send

    async def write(self, chunk: bytes) -> None:
        """Send some bytes; waits while the connection is full."""
        await self._send(chunk)
        self.client.sent_at = time.monotonic()

    async def give(self, batch: Batch) -> None:
        """Send a batch now, after what was queued before it: history is read no faster than it is taken."""
        self.client.take(batch)
        while not self.client.is_idle:
            await self.write(await self.client.next_chunk())


async def _watch(request: Request, client: Client) -> None:
    await request.disconnected()
    client.cut("gone")


def _position(record: Run, cursor: EventId | None) -> Position:
    return Position.start(record.first_seq) if cursor is None else Position.after(cursor)


def _has_seen_end(record: Run, cursor: EventId | None) -> bool:
    return record.terminal and cursor is not None and cursor.seq >= (record.last_seq or 0)


def _wants_json(request: Request) -> bool:
    accepted = ",".join(request.values(b"accept"))
    return "application/json" in accepted and "text/event-stream" not in accepted


def _starts_live(request: Request) -> bool:
    start = request.query("from")
    if start not in (None, "live"):
        raise Refusal(problems.INVALID_REQUEST, "the query parameter from is not `live`")
    return start is not None


def _last_event_id(request: Request) -> str | None:
    """Where to resume; the header counts before the query, which an EventSource repeats as it was at first."""
    given = request.values(b"last-event-id")
    if len(given) > 1:
        raise Refusal(problems.INVALID_REQUEST, "the header Last-Event-ID is given more than once")
    return given[0] if given else request.query("last_event_id")


def _single(text: str) -> EventId:
    found = EventId.parse(text)
    if found is None or found == (0, 0):
        raise _impossible_id()
    return found


def _impossible_id() -> Refusal:
    return Refusal(
        problems.INVALID_REQUEST,
        "the last event id (header Last-Event-ID or query parameter last_event_id) is none that these streams gave out",
    )


def _runs(request: Request) -> list[RunId]:
    names = sorted(set((request.query("runs") or "").split(",")))
    if not all(ids.is_id(name) for name in names) or len(names) > STREAM_RUNS_MAX:
        raise Refusal(
            problems.INVALID_REQUEST,
            f"the query parameter runs is not 1 to {STREAM_RUNS_MAX} run ids with commas between",
        )
    return [RunId(name) for name in names]


def _page_size(request: Request) -> int:
    text = request.query("limit")
    if text is None:
        return EVENTS_PAGE_DEFAULT
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= EVENTS_PAGE_MAX):
        raise Refusal(
            problems.INVALID_REQUEST, f"the query parameter limit is not a number from 1 to {EVENTS_PAGE_MAX}"
        )
    return int(text)
