"""Event streams over HTTP: of one run or thread, of several runs on one connection, and the same as pages.

Promises: a reader gets what follows its last id, or is told what is missing; history and live events come from the same
          position, so that nothing is lost or doubled between them; whoever has seen the end is told to stay away.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import structlog
from msgspec import UNSET

from common.errors import StoreUnavailable
from common.ids import RunId, ThreadId, is_uuid
from common.process.backoff import Backoff
from common.store.eventlog import ZERO, EventId, EventLog, Gap, LogEvent, Position
from common.store.threads import Threads
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
from gateway.topics import EXTENT_OF_THREAD, Extent, Topic, Topics, of_run, of_thread
from towline.wire import events, ids, json
from towline.wire.runs import (
    EVENTS_PAGE_DEFAULT,
    EVENTS_PAGE_MAX,
    STREAM_RUNS_MAX,
    End,
    EventsPage,
)
from towline.wire.threads import ThreadEventsPage

logger = structlog.get_logger(__name__)

SSE = b"text/event-stream; charset=utf-8"
# Proxies must neither keep what passes nor wait for more of it.
SSE_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
# When a gateway dies all its readers come back by this: no second of the span is to bring a sixth of them.
RETRY_MS = (1000, 7000)


class StreamRoutes:
    """The handlers of everything that is streamed."""

    def __init__(self, *, auth: Auth, topics: Topics, threads: Threads, log: EventLog, fanout: Fanout) -> None:
        self._auth = auth
        self._topics = topics
        self._threads = threads
        self._log = log
        self._fanout = fanout

    async def events(self, request: Request) -> Answer | Stream:
        """`GET /v1/runs/{run}/events`."""
        topic = of_run(RunId(request.id("run")))
        await self._auth.require_for_streams(request, [topic])
        extents = await self._extents([topic])
        return await self._answer(request, topic, extents[topic])

    async def thread_events(self, request: Request) -> Answer | Stream:
        """`GET /v1/threads/{thread}/events`."""
        thread = ThreadId(request.params["thread"])
        topic = of_thread(thread)
        key = await self._auth.require_for_streams(request, [topic])
        record = await self._threads.read(thread) if is_uuid(thread) else None
        if record is None or (key is not None and not key.reaches(record.user)):
            raise problems.not_found("thread")
        return await self._answer(request, topic, EXTENT_OF_THREAD)

    async def many_events(self, request: Request) -> Answer | Stream:
        """`GET /v1/events`."""
        topics = [of_run(run) for run in _runs(request)]
        await self._auth.require_for_streams(request, topics)
        extents = await self._extents(topics)
        text = _last_event_id(request)
        cursors = dict.fromkeys(topics) if text is None else parse_composite_id(text, topics)
        if cursors is None:
            raise _impossible_id()
        if all(_has_seen_end(extents[topic], cursors[topic]) for topic in topics):
            return Answer(204)
        return self._stream(request, extents, cursors, Together(cursors))

    async def _extents(self, runs: list[Topic]) -> dict[Topic, Extent]:
        extents = await self._topics.read_many(runs)
        if len(extents) < len(runs):
            raise problems.not_found("run")
        return extents

    async def _answer(self, request: Request, topic: Topic, extent: Extent) -> Answer | Stream:
        text = _last_event_id(request)
        cursor = None if text is None else _single(text)
        if _wants_json(request):
            return await self._page(request, topic, extent, cursor)
        if _has_seen_end(extent, cursor):
            return Answer(204)
        return self._stream(request, {topic: extent}, {topic: cursor}, Alone(topic))

    # ---- pages

    async def _page(self, request: Request, topic: Topic, extent: Extent, cursor: EventId | None) -> Answer:
        if _starts_live(request):
            raise Refusal(problems.INVALID_REQUEST, "the query parameter from=live has no meaning for pages")
        size = _page_size(request)
        position = _position(extent, cursor)
        page = await self._log.read_after(topic, position, count=size)
        batch = Batch(topic, page.items)
        at = page.position.at
        if extent.ended and not page.items and not page.more:
            batch = last_batch(extent.ended, page.position)
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
        items = [stream_event(item) for item in shown]
        last_event_id = None if at == ZERO else str(at)
        missing: Any = gap_data(topic, gap) if gap else UNSET
        if topic.noun == "thread":
            return Answer(200, json.dumps(ThreadEventsPage(items, last_event_id, missing)))
        end = End(topic.id, batch.end) if batch.end and is_whole else UNSET
        return Answer(200, json.dumps(EventsPage(items, last_event_id, missing, end)))

    # ---- streams

    def _stream(
        self,
        request: Request,
        extents: Mapping[Topic, Extent],
        cursors: Mapping[Topic, EventId | None],
        encoder: Encoder,
    ) -> Stream:
        live = _starts_live(request)

        async def write(send: Write) -> bool:
            async with self._fanout.client(encoder) as client:
                watch = asyncio.create_task(_watch(request, client), name="sse-hang-up")
                try:
                    response = _Response(client, send)
                    await response.write(events.opening(self._fanout.keepalive_s, random.randint(*RETRY_MS)))  # noqa: S311
                    for topic, extent in extents.items():
                        if client.ending:
                            break
                        cursor = cursors[topic]
                        await self._join(response, topic, extent, cursor, live=live and cursor is None)
                    while chunk := await client.next_chunk():
                        await response.write(chunk)
                finally:
                    watch.cancel()
            return client.ending in ("ended", "drain") and not client.was_cut

        return Stream(SSE_HEADERS, SSE, write)

    async def _join(
        self, response: "_Response", topic: Topic, extent: Extent, cursor: EventId | None, *, live: bool
    ) -> None:
        """Write what is there of a topic, then have the rest come by itself. Redis may be away: then wait for it."""
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        position: Position | None = None
        while True:
            try:
                if position is None:
                    position = await self._begin(response, topic, extent) if live else _position(extent, cursor)
                position = await self._catch_up(response, topic, extent, position)
            except StoreUnavailable as error:
                logger.debug("history_unread", topic=topic, error=str(error))
                await response.write(KEEPALIVE)
                await asyncio.sleep(backoff.next_s())
                continue
            if position is None or response.client.ending:
                return

    async def _begin(self, response: "_Response", topic: Topic, extent: Extent) -> Position:
        """Leave out the history; the reader is told where, or what came while it was broken off would be missing."""
        tail = await self._log.tail(topic)
        if tail is None:
            if extent.first_seq is None:
                return Position.start(None)  # nobody knows what its first event will be
            tail = EventId(1, extent.first_seq)  # before all that will come
        response.client.stand(topic, tail)
        return Position.live(tail)

    async def _catch_up(
        self, response: "_Response", topic: Topic, extent: Extent, position: Position
    ) -> Position | None:
        """One step through the history; None: nothing more is to be read here. Raises: StoreUnavailable."""
        others = self._fanout.position_of(topic)
        page = await self._log.read_after(topic, position)
        if position == Position.start(None) and any(isinstance(item, LogEvent) for item in page.items):
            known = (await self._topics.read_many([topic])).get(topic)
            if known is not None and known.first_seq is not None:
                return Position.start(known.first_seq)
        batch = Batch(topic, page.items)
        if batch.items:
            await self._give(response, batch)
            return None if batch.end else page.position
        if page.more:
            return page.position
        if extent.ended:
            await self._give(response, last_batch(extent.ended, page.position))
            return None
        if self._fanout.join(response.client, topic, page.position):
            return None
        if others is None or others.at <= page.position.at:
            return page.position  # more has come since
        # Others had read further than there is now: the stream was lost. Where it begins anew, all will be told.
        await self._fanout.mend(topic)
        now = self._fanout.position_of(topic) or page.position
        if page.position.at < now.at:
            await self._give(response, Batch(topic, [Gap(page.position.last, None)]))
        return now

    async def _give(self, response: "_Response", batch: Batch) -> None:
        self._fanout.count_gaps(batch.gaps)
        await response.give(batch)


class _Response:
    """The writing end of one client."""

    def __init__(self, client: Client, send: Write) -> None:
        self.client = client
        self._send = send

    def write(self, chunk: bytes) -> Awaitable[None]:
        """Send some bytes; await it, for it waits while the connection is full."""
        self.client.sent_at = time.monotonic()
        return self._send(chunk)

    async def give(self, batch: Batch) -> None:
        """Send a batch now, after what was queued before it: history is read no faster than it is taken."""
        self.client.take(batch)
        while not self.client.is_idle:
            await self.write(await self.client.next_chunk())


async def _watch(request: Request, client: Client) -> None:
    await request.disconnected()
    client.cut("gone")


def _position(extent: Extent, cursor: EventId | None) -> Position:
    return Position.start(extent.first_seq) if cursor is None else Position.after(cursor)


def _has_seen_end(extent: Extent, cursor: EventId | None) -> bool:
    return extent.last_seq is not None and cursor is not None and cursor.seq >= extent.last_seq


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
