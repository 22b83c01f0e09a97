"""The log of a thread on a real server: one numbering for all who append, fences, repetitions, and what readers see."""

import asyncio
from collections.abc import Awaitable

import pytest
import redis.asyncio
from support import eventually

from common.errors import StoreUnavailable
from common.ids import ThreadId, new_id
from common.store import keys
from common.store.eventlog import EventId, EventLog, Gap, LogEvent, NewEvent, Position
from common.store.redis import Redis, open_redis
from common.store.threadlog import START, AttemptFenced, Fence, ThreadLog
from harness.faults import TcpProxy

TS = 1_790_000_000_000


@pytest.fixture
def thread() -> ThreadId:
    return ThreadId(new_id())


@pytest.fixture
def log(redis_store: Redis) -> ThreadLog:
    return ThreadLog(redis_store)


class Watcher:
    """A client that reads from one gateway or another."""

    def __init__(self, store: Redis, thread: ThreadId, position: Position = START) -> None:
        self._log = EventLog(store, keys.thread_events)
        self._thread = thread
        self.position = position

    async def items(self) -> list[LogEvent | Gap]:
        """Read to the tail."""
        items: list[LogEvent | Gap] = []
        more = True
        while more:
            page = await self._log.read_after(self._thread, self.position)
            items += page.items
            self.position, more = page.position, page.more
        return items

    async def data(self) -> list[str]:
        """The same; data only, gaps as `gap`."""
        return ["gap" if isinstance(item, Gap) else item.data.decode() for item in await self.items()]


@pytest.fixture
def watcher(redis_store: Redis, thread: ThreadId) -> Watcher:
    """One that was there from the beginning."""
    return Watcher(redis_store, thread)


def said(*data: str, kind: str = "message.delta") -> list[NewEvent]:
    return [NewEvent("turn-1", "", kind, text, TS) for text in data]


async def lose(client: redis.asyncio.Redis, thread: ThreadId) -> None:
    """Redis was flushed, for what concerns this thread."""
    await client.delete(keys.thread_events(thread), keys.thread_state(thread), keys.thread_writers(thread))


# ---- appending


async def test_a_thread_is_numbered_from_one_whoever_appends(
    log: ThreadLog, thread: ThreadId, watcher: Watcher, redis_client: redis.asyncio.Redis
) -> None:
    """Gateways and workers, every field and every byte; it lives for a day after the last event."""
    odd = 'data: "\u2028 \x00 ünicode\r\n'
    await log.say(thread, "entry:1", [NewEvent("turn-1", "entry-1", "message", odd, TS, mended=True)], is_first=True)
    await log.writer(thread, "w", Fence(1, 1)).append(said("a", "b"))
    await log.say(thread, "entry:2", said("c", kind="message"))
    first, *rest = await watcher.items()
    assert isinstance(first, LogEvent)
    assert first == (first.id, "turn-1", "entry-1", "message", odd.encode(), TS, True)
    assert [(item.data, item.id.seq, item.mended) for item in rest if isinstance(item, LogEvent)] == [
        (b"a", 2, False),
        (b"b", 3, False),
        (b"c", 4, False),
    ]
    assert {item.id.epoch for item in rest if isinstance(item, LogEvent)} == {first.id.epoch}
    for name in (keys.thread_events, keys.thread_state, keys.thread_writers):
        assert keys.THREAD_EVENTS_TTL_S - 60 < await redis_client.ttl(name(thread)) <= keys.THREAD_EVENTS_TTL_S


async def test_many_at_once_make_one_order(log: ThreadLog, thread: ThreadId, redis_url: str, watcher: Watcher) -> None:
    """Of two processes, with nothing between them: no hole, nobody's own order changed."""
    async with open_redis(redis_url) as elsewhere:
        await log.say(thread, "first", said("first"), is_first=True)
        logs = [log, ThreadLog(elsewhere)]

        async def speak(n: int) -> None:
            writer = logs[n % 2].writer(thread, f"w{n}", Fence(1, 1))
            for k in range(10):
                await writer.append(said(f"{n}.{k}"))

        await asyncio.gather(*(speak(n) for n in range(8)))
    data = await watcher.data()
    assert (len(data), "gap" in data) == (81, False)
    for n in range(8):
        assert [text for text in data if text.startswith(f"{n}.")] == [f"{n}.{k}" for k in range(10)]


async def test_what_is_said_again_is_there_once(log: ThreadLog, thread: ThreadId, watcher: Watcher) -> None:
    """By whomever: an entry by the gateway and by the worker that begins, an end by the worker and by the net."""
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    await log.say(thread, "entry:2", said("waits"))
    await log.say(thread, "entry:1", said("hello"))
    await asyncio.gather(*(log.say(thread, "end:1", said("answer", "completed")) for _ in range(10)))
    assert await watcher.data() == ["hello", "waits", "answer", "completed"]


async def test_an_append_whose_answer_is_lost_is_repeated_with_the_next_one(
    thread: ThreadId, redis_url: str, watcher: Watcher
) -> None:
    """Before anything new, and nothing of it twice."""
    proxy = TcpProxy(redis_url)
    await proxy.start()
    try:
        async with open_redis(proxy.url) as lossy:
            writer = ThreadLog(lossy).writer(thread, "w", Fence(1, 1))
            await writer.append(said("a"))
            cut = proxy.cut_after(b"needle")
            with pytest.raises(StoreUnavailable):
                await writer.append(said("needle", "b"))
            assert cut.happened.is_set()
            assert (await watcher.data())[-2:] == ["needle", "b"]  # it had arrived
            await writer.append(said("c"))
            await writer.append([])
    finally:
        await proxy.stop()
    assert await watcher.data() == ["c"]


async def test_a_cancelled_append_is_kept_for_the_next_one(
    thread: ThreadId, redis_url: str, redis_client: redis.asyncio.Redis, watcher: Watcher
) -> None:
    """Whether Redis had it or not."""
    proxy = TcpProxy(redis_url)
    await proxy.start()
    try:
        async with open_redis(proxy.url) as far:
            writer = ThreadLog(far).writer(thread, "w", Fence(1, 1))
            await writer.append(said("a"))
            proxy.stall("to_client")
            append = asyncio.create_task(writer.append(said("b")))
            await eventually(lambda: redis_client.xlen(keys.thread_events(thread)))
            append.cancel()
            await asyncio.gather(append, return_exceptions=True)
            await proxy.heal()
            await eventually(lambda: _appended(writer.append(said("c"))))
    finally:
        await proxy.stop()
    assert (await watcher.data())[1:] == ["a", "b", "c"]


async def _appended(append: Awaitable[None]) -> bool:
    try:
        await append
    except StoreUnavailable:
        return False
    return True


# ---- fences


async def test_an_attempt_that_was_overtaken_is_refused(log: ThreadLog, thread: ThreadId, watcher: Watcher) -> None:
    """By a newer attempt or a later turn, for good; what has no fence is not."""
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    first = log.writer(thread, "a", Fence(9, 1))
    await first.append(said("one"))
    second = log.writer(thread, "b", Fence(9, 2))
    await second.append(said("two"))
    with pytest.raises(AttemptFenced):
        await first.append(said("stale"))
    with pytest.raises(AttemptFenced):
        await first.append([])
    later = log.writer(thread, "c", Fence(10, 1))  # as numbers: 10 is later than 9
    await later.append(said("three"))
    with pytest.raises(AttemptFenced):
        await second.append(said("stale"))
    await log.say(thread, "end:1", said("end"))
    assert await watcher.data() == ["hello", "one", "two", "three", "end"]


async def test_gateways_do_not_fence_out_the_turn_at_work(log: ThreadLog, thread: ThreadId, watcher: Watcher) -> None:
    """Rule 33: entries are posted while it speaks."""
    writer = log.writer(thread, "w", Fence(1, 1))
    for n in range(3):
        await writer.append(said(f"delta {n}"))
        await log.say(thread, f"entry:{n}", said(f"entry {n}"))
    await writer.append(said("delta 3"))
    assert [text for text in await watcher.data() if text.startswith("delta")] == [f"delta {n}" for n in range(4)]


# ---- losses, and what readers see


async def test_a_stream_born_in_mid_thread_says_that_something_is_missing(
    log: ThreadLog, thread: ThreadId, watcher: Watcher
) -> None:
    """Nobody told it that this is the beginning: a day has passed, or Redis was flushed."""
    await log.say(thread, "entry:7", said("hello"))
    assert await watcher.data() == ["gap", "hello"]


async def test_a_flush_is_a_gap_for_every_reader(
    log: ThreadLog, thread: ThreadId, redis_store: Redis, redis_client: redis.asyncio.Redis
) -> None:
    """For who was there, at any event; for who comes; and the turn at work speaks on."""
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    writer = log.writer(thread, "w", Fence(1, 2))
    await writer.append(said("a", "b"))
    seen = [item for item in await Watcher(redis_store, thread).items() if isinstance(item, LogEvent)]
    assert len(seen) == 3
    await lose(redis_client, thread)
    await writer.append(said("c"))
    await writer.append(said("d"))
    for position in [START, *(Position.after(item.id) for item in seen)]:
        assert await Watcher(redis_store, thread, position).data() == ["gap", "c", "d"]
    with pytest.raises(AttemptFenced):
        await log.writer(thread, "v", Fence(1, 1)).append(said("stale"))  # the fence is there again


async def test_nothing_of_an_earlier_stream_counts_in_the_one_after_it(
    log: ThreadLog, thread: ThreadId, redis_client: redis.asyncio.Redis, watcher: Watcher
) -> None:
    """The stream's day was over a moment before that of what stands beside it: said again is said anew."""
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    await log.writer(thread, "w", Fence(3, 1)).append(said("a"))
    await redis_client.delete(keys.thread_events(thread))
    await log.say(thread, "entry:1", said("hello"))
    assert await watcher.data() == ["gap", "hello"]
    assert await redis_client.zrange(keys.thread_writers(thread), 0, -1) == ["entry:1"]
    assert set(await redis_client.hkeys(keys.thread_state(thread))) == {"entry:1", ".bytes"}


async def test_a_tail_that_an_older_replica_lost_is_a_gap(
    log: ThreadLog, thread: ThreadId, redis_store: Redis, redis_client: redis.asyncio.Redis
) -> None:
    """What follows has numbers that others had before: it gets a new epoch, and no reader takes it for the same."""
    names = [keys.thread_events(thread), keys.thread_state(thread), keys.thread_writers(thread)]
    writer = log.writer(thread, "w", Fence(1, 1))
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    await writer.append(said("a"))
    replica = {name: await redis_client.dump(name) for name in names}
    await writer.append(said("lost 1", "lost 2"))
    watcher = Watcher(redis_store, thread)
    assert await watcher.data() == ["hello", "a", "lost 1", "lost 2"]
    for name, dump in replica.items():
        await redis_client.restore(name, 0, dump, replace=True)
    await writer.append(said("b", "c"))
    assert await watcher.data() == ["gap", "b", "c"]
    assert await Watcher(redis_store, thread).data() == ["hello", "a", "gap", "b", "c"]
    await log.say(thread, "end:1", said("end"))
    assert await watcher.data() == ["end"]


async def test_a_clock_that_was_set_back_makes_no_older_epoch(
    log: ThreadLog, thread: ThreadId, redis_client: redis.asyncio.Redis, watcher: Watcher
) -> None:
    """A stream whose epoch lies in the future goes on above it."""
    future = 2**52
    await redis_client.xadd(keys.thread_events(thread), {"marker": "w"}, id=f"{future}-{future}")
    writer = log.writer(thread, "w", Fence(1, 1))
    await writer.append(said("a"))
    await redis_client.xdel(keys.thread_events(thread), f"{future}-{future + 1}")
    await writer.append(said("b"))
    items = await watcher.items()
    assert [item.id for item in items if isinstance(item, LogEvent)] == [EventId(future + 1, future + 2)]
    assert isinstance(items[0], Gap)


async def test_a_stream_is_bounded_in_events(
    log: ThreadLog,
    thread: ThreadId,
    redis_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
    watcher: Watcher,
) -> None:
    """Who was there at the beginning sees that the beginning is gone."""
    monkeypatch.setattr(keys, "EVENTS_MAX", 100)
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    writer = log.writer(thread, "w", Fence(1, 1))
    for n in range(10):
        await writer.append(said(*(f"{n}.{k}" for k in range(50))))
    assert 100 <= await redis_client.xlen(keys.thread_events(thread)) <= 300
    data = await watcher.data()
    assert (data[0], data[-1], data.count("gap")) == ("gap", "9.49", 1)


async def test_a_stream_is_bounded_in_bytes(
    log: ThreadLog, thread: ThreadId, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it was split into batches; what is there is the newest."""
    monkeypatch.setattr(keys, "EVENTS_BYTES_MAX", 16_000)
    monkeypatch.setattr(keys, "EVENTS_BYTES_STEP", 1_000)
    writer = log.writer(thread, "w", Fence(1, 1))
    for n in range(20):
        await writer.append(said(*(f"{n}.{k}".ljust(200, "x") for k in range(n % 7 + 1))))
    entries = await redis_client.xrange(keys.thread_events(thread))
    assert 8_000 < sum(len(fields["data"]) for _, fields in entries) <= 16_000
    assert entries[-1][1]["data"].startswith("19.5")


async def test_only_the_newest_writers_are_remembered(
    log: ThreadLog,
    thread: ThreadId,
    redis_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
    watcher: Watcher,
) -> None:
    """So a thread that goes on for years stays small; one that still speaks is among the newest."""
    monkeypatch.setattr(keys, "THREAD_WRITERS_MAX", 5)
    await log.say(thread, "entry:0", said("0"), is_first=True)
    writer = log.writer(thread, "w", Fence(1, 1))
    for n in range(1, 12):
        await writer.append(said("."))
        await log.say(thread, f"entry:{n}", said(str(n)))
    assert await redis_client.zcard(keys.thread_writers(thread)) == 5
    fields = await redis_client.hkeys(keys.thread_state(thread))
    assert sorted(name for name in fields if not name.startswith(".")) == sorted(
        ["w", *(f"entry:{n}" for n in range(8, 12))]
    )
    await log.say(thread, "entry:11", said("11"))
    assert [text for text in await watcher.data() if text != "."] == [str(n) for n in range(12)]


async def test_out_of_memory_nothing_is_half_written(
    log: ThreadLog, thread: ThreadId, redis_client: redis.asyncio.Redis, watcher: Watcher
) -> None:
    """It is refused whole, and can be repeated."""
    await log.say(thread, "entry:1", said("hello"), is_first=True)
    writer = log.writer(thread, "w", Fence(1, 1))
    await redis_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await writer.append(said("a", "b"))
        with pytest.raises(StoreUnavailable):
            await log.say(ThreadId(new_id()), "entry:1", said("hello"))
    finally:
        await redis_client.config_set("maxmemory", "0")
    assert await watcher.data() == ["hello"]
    await writer.append(said("c"))
    assert await watcher.data() == ["a", "b", "c"]
