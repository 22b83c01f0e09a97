"""The one reader of a gateway process: events of every topic that it serves, and the replies to its waiters.

Owns:     the process's replies stream, the feeds and the clients of all event streams, and their end.
Promises: one blocking XREAD, however many clients of however many topics; each event encoded once; a slow client is
          closed alone. Nobody is left with signs of life only: what Redis lost is said to be missing, and a run whose
          end only Postgres knows is ended (rules 26, 29).
Used by:  `stream` (open, join, close), `turn_waiters` (join, leave), `store.replies` (take is given every note), `app`
          (run, drain, close).
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import structlog

from common.errors import StoreUnavailable
from common.ids import GatewayId
from common.process.backoff import Backoff
from common.store import keys
from common.store.control import Entry, Note, replies_inbox, tell_gateway
from common.store.eventlog import EventLog, Position, follow
from common.store.redis import Redis
from common.store.runs import Run
from gateway.feeds import Client, Encoder, Feed, Reader
from gateway.frames import KEEPALIVE, last_batch
from gateway.metrics import GatewayMetrics
from gateway.topics import Extent, Topic, Topics, stream_of
from towline.wire import sse

logger = structlog.get_logger(__name__)

# How long a loss in Redis, or an end that only Postgres knows, may go unnoticed; each look is one round trip and one
# statement, however many topics are served.
LOOK_EVERY_S = 5.0
# How exactly the keep-alive is kept.
KEEPALIVE_TICK_S = 1.0
# A connection that has taken nothing for two keep-alives, and longer than a command to Redis may take, is stuck.
STUCK_AFTER_S = 8.0
# Where a stream is ended to send its reader elsewhere, it comes back this soon: the ends themselves are spread.
MOVED_RETRY_MS = (200, 1500)
# What the last readers have to take their goodbye.
GOODBYE_S = 0.5


class Fanout:
    """All event streams of one process.

    Args:
        take_notes: is given what comes on the replies stream; must not wait.
        lost_notes: is called when that could not be read, so that something may be missing; must not wait.
        keepalive_s: how often a quiet stream shows a sign of life.
        buffer_bytes: how far a client may fall behind.
    """

    def __init__(
        self,
        redis: Redis,
        log: EventLog,
        topics: Topics,
        *,
        gateway: GatewayId,
        take_notes: Callable[[Sequence[Note]], None],
        lost_notes: Callable[[], None],
        metrics: GatewayMetrics,
        keepalive_s: float,
        buffer_bytes: int,
    ) -> None:
        self.keepalive_s = keepalive_s
        self._redis = redis
        self._log = log
        self._topics = topics
        self._gateway = gateway
        self._take_notes = take_notes
        self._lost_notes = lost_notes
        self._metrics = metrics
        self._buffer_bytes = buffer_bytes
        self._inbox = replies_inbox(redis, gateway)
        self._feeds: dict[Topic, Feed] = {}
        self._clients: set[Client] = set()
        self._set_changed = asyncio.Event()
        self._look_due = asyncio.Event()
        self._born: bytes | None = None
        self._is_leaving = False
        self._nobody_left = asyncio.Event()
        self._nobody_left.set()

    # ---- what streams call

    @contextlib.asynccontextmanager
    async def client(self, encoder: Encoder) -> AsyncIterator[Client]:
        """One open response; leaving the context forgets it. A write that gets nowhere is broken off inside."""
        reason = "failed"
        try:
            async with asyncio.timeout(None) as cut:
                client = Client(encoder, cut, buffer_bytes=self._buffer_bytes)
                self._admit(client)
                try:
                    yield client
                    reason = client.ending or "failed"
                except asyncio.CancelledError:
                    reason = client.ending or "drain"
                    raise
                finally:
                    self._forget(client)
                    self._metrics.sse_closed[reason].inc()
        except TimeoutError:
            if not cut.expired():
                raise  # somebody else's

    def position_of(self, topic: Topic) -> Position | None:
        """Up to where a topic has been read for those who are served it; None: nobody is."""
        feed = self._feeds.get(topic)
        return None if feed is None else feed.position

    def join(self, reader: Reader, topic: Topic, position: Position) -> bool:
        """Let someone read on from a position; False: others are further, there is more history to read first."""
        feed = self._feeds.get(topic)
        if feed is None or feed.has_ended:  # one that is leaving takes nobody along; the next look ends this one, too
            feed = self._feeds[topic] = Feed(topic, position)
            self._set_changed.set()
        return feed.join(reader, position)

    def leave(self, reader: Reader, topics: Iterable[Topic]) -> None:
        """Give nothing more of these topics to someone who may have joined them."""
        for topic in topics:
            feed = self._feeds.get(topic)
            if feed is not None:
                feed.leave(reader)
                if not feed.readers:
                    del self._feeds[topic]

    async def mend(self, topic: Topic) -> None:
        """Compare where a served topic is read with what is there: for who finds nothing where others have read.

        Raises: StoreUnavailable.
        """
        if feed := self._feeds.get(topic):
            await self._read_again(feed)

    def count_gaps(self, gaps: int) -> None:
        """Count what one client was told of."""
        self._metrics.sse_gaps.inc(gaps)

    # ---- what the process calls

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_reads(), name="fanout-reads")
            group.create_task(self._run_wakes(), name="fanout-wakes")
            group.create_task(self._run_looks(), name="fanout-looks")
            group.create_task(self._run_keepalives(), name="fanout-keepalives")

    async def drain(self, window_s: float) -> None:
        """End every stream within a window, and at once whoever comes from now on; their readers go elsewhere."""
        self._is_leaving = True
        loop = asyncio.get_running_loop()
        for client in list(self._clients):
            loop.call_later(random.uniform(0, window_s), _send_away, client)  # noqa: S311 (spreads load)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(window_s + GOODBYE_S):
                await self._nobody_left.wait()
        for client in list(self._clients):
            client.cut("drain")  # it does not read, not even this

    async def close(self) -> None:
        """Delete the replies stream, which no other process will read. Raises: StoreUnavailable."""
        await self._inbox.remove()

    # ---- loops

    async def _run_reads(self) -> None:
        """Read whatever comes, and give it to whoever wants it; waits for nothing else."""
        backoff = Backoff(first_s=0.05, cap_s=2.0)
        while True:
            served = {stream_of(topic): feed for topic, feed in self._feeds.items() if feed.held is None}
            asked = {key: feed.position for key, feed in served.items()}
            try:
                notes, found = await self._inbox.read_beside({key: str(at.at) for key, at in asked.items()})
            except StoreUnavailable as error:
                logger.warning("streams_unread", topics=len(served), error=str(error))
                self._lost_notes()
                self._look_due.set()
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            try:
                self._take_notes(notes)
            except Exception:
                # One reply that cannot be read must not end the process; the rereads find what it was to say.
                logger.exception("replies_undelivered", replies=len(notes))
            for key, entries in found.items():
                feed = served[key]
                # Moved meanwhile, as everyone left or a loss was found: read again from where it is now.
                if self._feeds.get(feed.topic) is feed and feed.position is asked[key]:
                    self._give(feed, entries)

    def _give(self, feed: Feed, entries: Sequence[Entry]) -> None:
        if feed.position == Position.start(None):
            feed.held = entries
            self._look_due.set()
        else:
            self._deliver(feed, entries)

    def _deliver(self, feed: Feed, entries: Sequence[Entry]) -> None:
        readers = len(feed.readers)
        try:
            batch = feed.advance(follow(feed.position, entries))
        except Exception:
            # What cannot be read is lost to these clients only: they come back, and are told by their own history.
            logger.exception("events_undelivered", topic=feed.topic, entries=len(entries))
            for reader in list(feed.readers):
                reader.cut("failed")
        else:
            self._metrics.sse_gaps.inc(batch.gaps * readers)

    async def _run_wakes(self) -> None:
        """Make the reader look at a changed set: it is blocked, perhaps for seconds."""
        while True:
            await self._set_changed.wait()
            self._set_changed.clear()
            try:
                await tell_gateway(self._redis, self._gateway, {"wake": ""})
            except StoreUnavailable as error:
                logger.warning("reader_not_woken", error=str(error))  # it comes back by itself

    async def _run_looks(self) -> None:
        """Look slowly, or when there is reason to, at what the reader cannot see."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._look_due.wait()
            self._look_due.clear()
            try:
                await self._look_into_redis()
                await self._look_into_records()
            except StoreUnavailable as error:
                logger.warning("looks_failed", topics=len(self._feeds), error=str(error))
            except Exception:
                # One topic that cannot be looked at must not end the process.
                logger.exception("looks_failed", topics=len(self._feeds))
            else:
                continue
            # What is held waits for it; a pause, for a reader that fails all the time asks for a look each time.
            self._look_due.set()
            await asyncio.sleep(1)

    async def _run_keepalives(self) -> None:
        """Send a comment wherever nothing was sent for a while, and close what takes none, history included."""
        tick_s = min(KEEPALIVE_TICK_S, self.keepalive_s / 4)
        stuck_after_s = max(2 * self.keepalive_s, STUCK_AFTER_S)
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            for client in list(self._clients):
                quiet_s = now - client.sent_at
                if quiet_s > stuck_after_s:
                    client.cut("slow")
                elif quiet_s > self.keepalive_s - tick_s and client.is_idle:
                    client.put(KEEPALIVE)

    # ---- clients

    def _admit(self, client: Client) -> None:
        client.sent_at = time.monotonic()
        self._clients.add(client)
        self._nobody_left.clear()
        self._metrics.sse_clients.inc()
        if self._is_leaving:
            client.end("drain")

    def _forget(self, client: Client) -> None:
        self._clients.discard(client)
        if not self._clients:
            self._nobody_left.set()
        self._metrics.sse_clients.dec()
        self.leave(client, [topic for topic, feed in self._feeds.items() if client in feed.readers])

    # ---- looks

    async def _look_into_redis(self) -> None:
        """Find streams that fell behind what was read of them: flushed, or failed over."""
        await self._inbox.keep_alive()
        (born,) = await self._redis.send_many([("GET", keys.BORN)])
        if isinstance(born, bytes) and born != self._born:
            if self._born is not None:
                logger.info("redis_reborn")
                self._inbox.rewind()
            self._born = born
        tails = await self._log.tails(list(self._feeds))
        for topic, tail in tails.items():
            feed = self._feeds.get(topic)
            if feed is not None and tail < feed.position.at:
                await self._read_again(feed)

    async def _look_into_records(self) -> None:
        """Find runs that have ended, and the first numbers of those that have just begun."""
        for topic, extent in (await self._topics.read_many(list(self._feeds))).items():
            feed = self._feeds.get(topic)
            if feed is not None and feed.held is not None:
                self._begin(feed, extent)
            if feed is not None and extent.ended is not None:
                await self._end(feed, extent.ended)

    def _begin(self, feed: Feed, extent: Extent) -> None:
        """Give what was held, knowing the run's first number by now.

        Its owner records that before its first event: if it is still unknown, nothing but its mark was seen.
        """
        held, feed.held = feed.held or (), None
        if extent.first_seq is not None:
            feed.position = Position.start(extent.first_seq)
        self._deliver(feed, held)
        self._set_changed.set()

    async def _end(self, feed: Feed, record: Run) -> None:
        """End a run from its record, once all that is left in its stream was given."""
        while not feed.has_ended and await self._read_again(feed):
            pass
        if not feed.has_ended:
            batch = last_batch(record, feed.position)
            self._metrics.sse_gaps.inc(batch.gaps * len(feed.readers))
            feed.finish(batch)

    async def _read_again(self, feed: Feed) -> bool:
        """Read from a feed's position as for a new client; returns whether that brought anything."""
        position = feed.position
        page = await self._log.read_after(feed.topic, position)
        if self._feeds.get(feed.topic) is not feed:
            return False  # everyone has left
        if feed.position is not position:
            return True  # the reader was faster
        if page.position == position and not page.items:
            return False
        readers = len(feed.readers)
        self._metrics.sse_gaps.inc(feed.advance(page).gaps * readers)
        self._set_changed.set()
        return True


def _send_away(client: Client) -> None:
    client.put(sse.retry(random.randint(*MOVED_RETRY_MS)))  # noqa: S311 (spreads load)
    client.end("drain")
