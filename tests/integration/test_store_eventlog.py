"""The event log on a real server: what owners append, what refuses them, and what readers are told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio
from event_stores import TS, Reader, Relay, RunKeys, event, events, new_run
from support import eventually

from common.errors import StoreUnavailable
from common.ids import RunId
from common.store import keys
from common.store.eventlog import (
    APPEND_BYTES_MAX,
    PAGE_BYTES,
    PAGE_NEXT_ENTRIES,
    Appends,
    EventId,
    EventLog,
    Fenced,
    Gap,
    NewEvent,
    Position,
    TailLost,
    follow,
)
from common.store.leases import Point, Taken
from common.store.read_bound import READ_BYTES
from common.store.redis import Call, Redis, open_redis
from harness.embedded import EmbeddedValkey
from harness.faults import TcpProxy
from harness.runner import temporary_directory


@pytest.fixture
def run() -> RunId:
    return new_run()


@pytest.fixture
def held(redis_client: redis.asyncio.Redis, run: RunId) -> RunKeys:
    return RunKeys(redis_client, run)


@pytest.fixture
def relay_a(redis_store: Redis, run: RunId) -> Relay:
    return Relay(redis_store, run, "relay-a")


@pytest.fixture
def relay_b(redis_store: Redis, run: RunId) -> Relay:
    return Relay(redis_store, run, "relay-b")


def reader_of(store: Redis, relay: Relay) -> Reader:
    """A client that was there from the run's beginning."""
    assert relay.taken is not None
    return Reader(store, relay.run, Position.start(relay.taken.first_seq))


# ---- appending


async def test_a_batch_is_numbered_on_with_all_that_was_given(
    relay_a: Relay, redis_store: Redis, run: RunId, held: RunKeys
) -> None:
    """Every field, every byte; resume points and the sign of progress in the same step."""
    writer = await relay_a.take(7)
    start = writer.tail.seq
    odd = 'data: "\u2028 \x00 ünicode\r\n'
    tail = await writer.append([event(1), NewEvent("tester", "", "message", odd, TS, True)], progressed=True)
    assert tail == writer.tail == EventId(7, start + 2)
    reader = reader_of(redis_store, relay_a)
    await reader.read()
    first, second = reader.items
    assert first == (EventId(7, start + 1), "coder", "coder:1", "output", b"coder 1", TS + 1, False)
    assert second == (EventId(7, start + 2), "tester", "", "message", odd.encode(), TS, True)
    assert await held.points() == {"coder": "1 coder:1", "tester": "1 "}
    assert 0 < await held.client.ttl(keys.progress(run)) <= keys.PROGRESS_TTL_S


async def test_pings_and_our_own_words_are_no_progress_and_move_no_point(
    relay_a: Relay, run: RunId, held: RunKeys
) -> None:
    """What stands for an upstream's event does, and an event without an id leaves the last one."""
    writer = await relay_a.take(7)
    own = ("towline.discontinuity", "towline.source.gap", "towline.source.ended", "towline.run.stalled")
    await writer.append([event(1), event(2, uid="")], progressed=False)
    await writer.append([event(9, kind=kind) for kind in own], progressed=False)
    assert await held.points() == {"coder": "2 coder:1"}
    assert await held.client.exists(keys.progress(run)) == 0
    await writer.append([event(3, kind="towline.event.too_large")], progressed=False)
    assert await held.points() == {"coder": "3 coder:3"}


async def test_many_runs_append_at_once(redis_store: Redis) -> None:
    """They share round trips, and nothing else: each has its own numbers, points and verdicts."""
    relays = [Relay(redis_store, new_run()) for _ in range(60)]
    writers = [await relay.take(7) for relay in relays]
    fenced = 13
    await relays[fenced].take(8)
    answers = await asyncio.gather(*(w.append(events(1, 3), progressed=False) for w in writers), return_exceptions=True)
    assert [i for i, answer in enumerate(answers) if isinstance(answer, Fenced)] == [fenced]
    del relays[fenced], writers[fenced]
    await asyncio.gather(*(w.append(events(4, 6), progressed=False) for w in writers))
    for relay in relays:
        assert await reader_of(redis_store, relay).read() == [f"coder {n}" for n in range(1, 7)]


async def test_a_frozen_owners_late_append_is_refused(
    relay_a: Relay, relay_b: Relay, held: RunKeys, redis_store: Redis
) -> None:
    """Also before its successor has appended anything, and for what it tried before: nothing is interleaved."""
    frozen = await relay_a.take(7)
    await frozen.append(events(1, 2), progressed=False)
    await held.lapse()
    successor = await relay_b.take(8)
    with pytest.raises(Fenced):
        await frozen.append(events(3, 4), progressed=True)
    await successor.append(events(3, 3), progressed=False)
    with pytest.raises(Fenced):
        await frozen.retry()
    assert await held.data() == ["|", "coder 1", "coder 2", "|", "coder 3"]
    assert await held.points() == {"coder": "3 coder:3"}
    assert await held.client.exists(keys.progress(held.run)) == 0
    assert await reader_of(redis_store, relay_a).read() == ["coder 1", "coder 2", "coder 3"]


async def test_two_owners_in_turn_leave_one_history(
    relay_a: Relay, relay_b: Relay, held: RunKeys, redis_store: Redis
) -> None:
    """Each continues where the other left the sources; a reader sees no seam."""
    reader = None
    for turn in range(6):
        relay = (relay_a, relay_b)[turn % 2]
        writer = await relay.take(10 + turn, {"coder": Point()})
        assert relay.taken is not None
        done = relay.taken.points["coder"].count
        assert done == turn * 3
        await writer.append(events(done + 1, done + 3), progressed=False)
        await relay.release(writer)
        reader = reader or reader_of(redis_store, relay)
        assert await reader.read() == [f"coder {n}" for n in range(done + 1, done + 4)]
    assert (await held.data()).count("|") == 6


@pytest.mark.parametrize("cut_at", ["the first batch", "the last batch"])
async def test_an_append_whose_answer_was_lost_adds_nothing_when_retried(
    cut_at: str, redis_url: str, run: RunId, held: RunKeys
) -> None:
    """It was done; nothing new gets a number before that is known."""
    proxy = TcpProxy(redis_url)
    async with open_redis(await proxy.start()) as store:
        try:
            relay = Relay(store, run)
            writer = await relay.take(7)
            if cut_at == "the last batch":
                await writer.append(events(1, 2), progressed=False)
            before = await held.data()
            end = "completed" if cut_at == "the last batch" else ""
            cut = proxy.cut_after(b"coder 4")
            with pytest.raises(StoreUnavailable):
                await writer.append(events(3, 4), progressed=False, end=end)
            assert cut.happened.is_set()
            assert await held.data() == [*before, "coder 3", "coder 4"]  # it had been done
            assert writer.is_pending
            with pytest.raises(RuntimeError):
                await writer.append(events(5, 5), progressed=False)
            points = await held.points()
            tail = await writer.retry()
            assert not writer.is_pending
            assert await writer.retry() == tail
            assert await held.data() == [*before, "coder 3", "coder 4"]
            assert await held.points() == points
            assert (await held.entries())[-1][0] == str(tail)
        finally:
            await proxy.stop()


async def test_an_append_that_did_not_arrive_is_done_by_the_retry(redis_url: str, run: RunId, held: RunKeys) -> None:
    """The same call serves both cases."""
    proxy = TcpProxy(redis_url)
    async with open_redis(await proxy.start()) as store:
        try:
            writer = await Relay(store, run).take(7)
            proxy.refuse()
            proxy.cut()
            with pytest.raises(StoreUnavailable):
                await writer.append(events(1, 2), progressed=False)
            assert await held.data() == ["|"]
            with pytest.raises(StoreUnavailable):
                await writer.retry()
            await proxy.heal()
            await writer.retry()
            assert await held.data() == ["|", "coder 1", "coder 2"]
        finally:
            await proxy.stop()


async def test_what_many_runs_have_gathered_goes_out_in_pieces_and_comes_once(redis_url: str) -> None:
    """As after an outage of Redis. The answer to a piece is lost: its runs alone repeat, and nothing comes twice."""
    proxy = TcpProxy(redis_url)
    async with open_redis(await proxy.start()) as store:
        try:
            appends = Appends(store)
            relays = [Relay(store, new_run()) for _ in range(6)]
            writers = [await relay.take(7) for relay in relays]
            for writer in writers:
                writer._appends = appends  # one process follows them all
            calls: list[int] = []
            run_many = store.run_many

            async def noted(given: Sequence[Call]) -> list[Any]:
                calls.append(len(given))
                return await run_many(given)

            appends._calls._flush = noted
            large = "x" * (APPEND_BYTES_MAX * 2 // 5 // 20)
            batches = [
                [NewEvent("coder", f"{i}:{n}", "output", f"run {i} event {n} {large}", TS) for n in range(20)]
                for i in range(len(writers))
            ]
            cut = proxy.cut_after(b"run 4 event 19")
            answers = await asyncio.gather(
                *(writer.append(batch, progressed=True) for writer, batch in zip(writers, batches, strict=True)),
                return_exceptions=True,
            )
            assert cut.happened.is_set()
            lost = [i for i, answer in enumerate(answers) if isinstance(answer, StoreUnavailable)]
            assert 4 in lost
            assert 0 not in lost
            assert sum(calls) == 6
            assert max(calls) == 2, calls
            await asyncio.gather(*(writers[i].retry() for i in lost))
            for relay, batch in zip(relays, batches, strict=True):
                assert await reader_of(store, relay).read() == [event.data for event in batch]
        finally:
            await proxy.stop()


async def test_an_append_that_was_cancelled_is_retried_like_one_without_an_answer(
    redis_url: str, run: RunId, held: RunKeys
) -> None:
    """Its tailer was told to leave while the answer was on its way; what is last appended comes after it."""
    proxy = TcpProxy(redis_url)
    async with open_redis(await proxy.start()) as store:
        try:
            writer = await Relay(store, run).take(7)
            proxy.stall("to_client")
            append = asyncio.create_task(writer.append(events(1, 2), progressed=False))
            await eventually(lambda: held.has("coder 2"))
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            assert writer.is_pending
            await proxy.heal()
            await writer.retry()
            await writer.append(events(3, 3), progressed=False)
            assert await held.data() == ["|", "coder 1", "coder 2", "coder 3"]
        finally:
            await proxy.stop()


async def test_a_first_try_that_arrives_late_adds_nothing(relay_a: Relay, held: RunKeys, redis_store: Redis) -> None:
    """It timed out, was retried, and more was appended: then it is executed after all."""
    writer = await relay_a.take(7)
    late = Relay(redis_store, relay_a.run)
    twin = await late.take(7)  # the same owner's first connection, stuck
    await writer.append(events(1, 3), progressed=False)
    await writer.append(events(4, 5), progressed=False)
    await twin.append(events(1, 3), progressed=True)
    assert await held.data() == ["|"] + [f"coder {n}" for n in range(1, 6)]
    assert await held.points() == {"coder": "5 coder:5"}
    assert await held.client.exists(keys.progress(relay_a.run)) == 0


async def test_of_a_batch_that_is_half_there_the_rest_is_added(relay_a: Relay, held: RunKeys) -> None:
    """A replica that took over in mid-batch, say: each event once, each counted once."""
    writer = await relay_a.take(7)
    replica = await held.photograph()
    await writer.append(events(1, 2), progressed=False)
    half = await held.photograph()
    await replica.take_over()
    retrying = await relay_a.take(7)
    await half.take_over()
    await retrying.append(events(1, 5), progressed=False)
    assert await held.data() == ["|"] + [f"coder {n}" for n in range(1, 6)]
    assert await held.points() == {"coder": "5 coder:5"}


async def test_after_a_flush_nothing_is_appended_until_the_run_is_taken_again(
    relay_a: Relay, held: RunKeys, redis_store: Redis
) -> None:
    """An append would be a stream without a beginning. The reader is told of a gap, and events may repeat after it."""
    writer = await relay_a.take(7)
    reader = reader_of(redis_store, relay_a)
    await writer.append(events(1, 4), progressed=False)
    assert await reader.read() == [f"coder {n}" for n in range(1, 5)]
    await held.flush()
    with pytest.raises(TailLost):
        await writer.append(events(5, 6), progressed=True)
    assert await held.entries() == []
    assert await reader.read() == []
    again = await relay_a.take(8, {"coder": Point("coder:3", 3)})
    await again.append(events(4, 6), progressed=False)
    assert await reader.read() == ["gap", "coder 4", "coder 5", "coder 6"]
    fresh = Reader(redis_store, relay_a.run, Position.after(EventId(7, writer.tail.seq)))
    assert await fresh.read() == ["gap", "coder 4", "coder 5", "coder 6"]


async def test_after_a_failover_the_tail_must_be_the_one_that_was_left(
    relay_a: Relay, held: RunKeys, redis_store: Redis
) -> None:
    """Appending onto an older tail would be a silent hole."""
    writer = await relay_a.take(7)
    reader = reader_of(redis_store, relay_a)
    await writer.append(events(1, 2), progressed=False)
    replica = await held.photograph()
    await writer.append(events(3, 4), progressed=False)
    await reader.read()
    await replica.take_over()
    with pytest.raises(TailLost):
        await writer.append(events(5, 6), progressed=False)
    assert await held.data() == ["|", "coder 1", "coder 2"]
    assert await reader.read() == ["gap"]  # its place is beyond the stream
    again = await relay_a.take(8)
    await again.append(events(3, 6), progressed=False)
    assert await reader.read() == ["coder 3", "coder 4", "coder 5", "coder 6"]


async def test_a_blocked_reader_learns_of_a_failover_from_the_marker(
    relay_a: Relay, held: RunKeys, redis_store: Redis
) -> None:
    """It waits behind the old tail, and looks at nothing else."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 2), progressed=False)
    replica = await held.photograph()
    await writer.append(events(3, 4), progressed=False)
    position = Position.after(writer.tail)
    await replica.take_over()
    again = await relay_a.take(8)
    await again.append(events(3, 3), progressed=False)
    name = keys.events(relay_a.run)
    ((_, entries),) = await redis_store.reader().read({name: str(position.at)})
    page = follow(position, entries)
    assert ["gap" if isinstance(item, Gap) else item.data for item in page.items] == ["gap", b"coder 3"]


# ---- how much at once


LARGE = NewEvent("coder", "", "output", "x" * 100_000, TS)


async def test_a_page_is_bounded_in_bytes_and_whole_in_the_end(relay_a: Relay, redis_store: Redis, run: RunId) -> None:
    """A thousand small events are a page or three; of large ones each holds as many as memory can have."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 20), progressed=False)
    for _ in range(5):
        await writer.append([LARGE] * 50, progressed=False)
    log = EventLog(redis_store, keys.events)
    assert relay_a.taken is not None
    position = Position.start(relay_a.taken.first_seq)
    pages = []
    more = True
    while more:
        page = await log.read_after(run, position, count=1000)
        position, more = page.position, page.more
        pages.append([len(item.data) for item in page.items if not isinstance(item, Gap)])
    assert sum(map(len, pages)) == 270
    # Nobody can know that the small ones are over: one read too many, and no more.
    assert sum(pages[0]) <= PAGE_BYTES + PAGE_NEXT_ENTRIES * len(LARGE.data)
    assert max(map(sum, pages[1:])) <= 2 * PAGE_BYTES
    assert len(pages) <= 2 + 250 * len(LARGE.data) // PAGE_BYTES


async def test_a_page_counts_events_and_not_the_marks_between(relay_a: Relay, redis_store: Redis, run: RunId) -> None:
    writer = await relay_a.take(7)
    assert relay_a.taken is not None
    position = Position.start(relay_a.taken.first_seq)
    for number in (1, 2, 3):
        await writer.append(events(number, number), progressed=False)
        await relay_a.take(10 * number)
        writer = await relay_a.take(10 * number + 1)
    log = EventLog(redis_store, keys.events)
    for number in (1, 2, 3):
        page = await log.read_after(run, position, count=1)
        position = page.position
        assert [item.data for item in page.items if not isinstance(item, Gap)] == [b"coder %d" % number]


async def test_a_reader_that_stood_still_is_not_brought_everything_at_once(redis_store: Redis) -> None:
    """Redis bounds a read in entries of each stream; with many streams and large events that is no bound."""
    relays = [Relay(redis_store, new_run()) for _ in range(10)]
    writers = [await relay.take(7) for relay in relays]
    reader = redis_store.reader()
    places = {keys.events(relay.run): "0" for relay in relays}

    async def read() -> list[int]:
        sizes = []
        for name, entries in await reader.read(places):
            places[name] = entries[-1][0]
            sizes += [len(fields[b"data"]) for _, fields in entries if b"data" in fields]
        return sizes

    for _ in range(5):
        for writer in writers:
            await writer.append([LARGE], progressed=False)
        await read()
    for writer in writers:
        await writer.append([LARGE] * 100, progressed=False)
    reads = []
    while sum(map(len, reads)) < 1000:
        reads.append(await read())
    assert max(map(sum, reads)) <= 2 * READ_BYTES


# ---- the end


async def test_the_last_event_ends_the_run_and_gives_everything_a_time(
    relay_a: Relay, run: RunId, held: RunKeys, redis_client: redis.asyncio.Redis
) -> None:
    """Nothing is appended after it; nothing of the run stays for ever."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 2), progressed=True)
    assert await relay_a.refresh(writer) == "kept"
    last = NewEvent("", "", "towline.run.ended", "{}", TS)
    await writer.append([event(3), last], progressed=True, end="completed")
    with pytest.raises(Fenced):
        await writer.append(events(4, 4), progressed=True)
    assert (await held.data())[-1] == "{}"
    assert await redis_client.hget(keys.events_resume(run), ".end") == "completed"
    assert keys.EVENTS_TTL_S - 60 < await redis_client.ttl(keys.events(run)) <= keys.EVENTS_TTL_S
    await relay_a.release(writer)
    await relay_a.leases.join()
    answer = await relay_a.try_take(8)  # whoever comes late makes nothing that stays, either
    assert isinstance(answer, Taken)
    kept = [name async for name in redis_client.scan_iter()]
    made = (keys.events, keys.events_resume, keys.liveness, keys.source_status, keys.progress)
    assert {key(run) for key in made} <= set(kept)
    assert [name for name in kept if await redis_client.ttl(name) == -1] == []


# ---- bounds


async def test_a_stream_keeps_about_ten_thousand_events(relay_a: Relay, held: RunKeys, redis_store: Redis) -> None:
    """Of small ones; a reader that starts now is told that the beginning is missing."""
    writer = await relay_a.take(7)
    for first in range(1, 12_001, 500):
        await writer.append(events(first, first + 499), progressed=False)
    length = await held.client.xlen(keys.events(relay_a.run))
    assert keys.EVENTS_MAX <= length < keys.EVENTS_MAX + 500
    read = await reader_of(redis_store, relay_a).read(count=1000)
    assert read[0] == "gap"
    assert read.count("gap") == 1
    assert read[1:] == [f"coder {n}" for n in range(12_001 - length, 12_001)]


async def test_a_stream_of_long_events_is_bounded_in_bytes(relay_a: Relay, held: RunKeys, redis_store: Redis) -> None:
    """Three times what may be there: at each moment no more is, and not much less; also across owners."""
    long = "x" * 200_000
    reader = None
    sizes = []
    for owner in range(3):
        writer = await relay_a.take(7 + owner)
        reader = reader or reader_of(redis_store, relay_a)
        for _ in range(20):
            await writer.append([event(0)._replace(data=long) for _ in range(8)], progressed=False)
            sizes.append(await held.client.xlen(keys.events(relay_a.run)) * len(long))
    assert max(sizes) <= keys.EVENTS_BYTES_MAX + 2 * len(long)
    assert min(sizes[-30:]) >= keys.EVENTS_BYTES_MAX - 2 * keys.EVENTS_BYTES_STEP - 8 * len(long)
    read = await reader.read(count=50) if reader else []
    assert (read[0], read.count("gap")) == ("gap", 1)


async def test_a_batch_larger_than_the_bound_leaves_its_end(relay_a: Relay, held: RunKeys) -> None:
    """The tail stays, whatever is trimmed."""
    writer = await relay_a.take(7)
    long = "x" * 1_000_000
    tail = await writer.append([event(n)._replace(data=long) for n in range(1, 41)], progressed=False)
    entries = await held.client.xrevrange(keys.events(relay_a.run), count=1)
    assert entries[0][0] == str(tail)
    assert await held.client.xlen(keys.events(relay_a.run)) <= 34
    await writer.append(events(41, 41), progressed=False)


# ---- reading


async def test_history_is_read_in_pages_and_from_any_place(relay_a: Relay, held: RunKeys, redis_store: Redis) -> None:
    """Takeovers in between are not seen; each event that was given is a place to go on from."""
    for owner in range(3):
        writer = await relay_a.take(7 + owner)
        await writer.append(events(owner * 4 + 1, owner * 4 + 4), progressed=False)
    assert relay_a.taken is not None
    for count in (1, 2, 3, 100):
        reader = reader_of(redis_store, relay_a)
        assert await reader.read(count=count) == [f"coder {n}" for n in range(1, 13)]
    for place, item in enumerate(reader.items, 1):
        assert not isinstance(item, Gap)
        cursor = EventId.parse(str(item.id))
        assert cursor is not None
        resumed = Reader(redis_store, relay_a.run, Position.after(cursor))
        assert await resumed.read() == [f"coder {n}" for n in range(place + 1, 13)]


async def test_live_readers_see_what_comes_and_nothing_before(relay_a: Relay, redis_store: Redis) -> None:
    """Without a gap for what they asked not to see."""
    log = EventLog(redis_store, keys.events)
    assert await log.tail(relay_a.run) is None
    writer = await relay_a.take(7)
    await writer.append(events(1, 3), progressed=False)
    tail = await log.tail(relay_a.run)
    assert tail == writer.tail
    assert tail is not None
    reader = Reader(redis_store, relay_a.run, Position.live(tail))
    assert await reader.read() == []
    await writer.append(events(4, 5), progressed=False)
    assert await reader.read() == ["coder 4", "coder 5"]


async def test_a_cursor_older_than_the_buffer_is_a_gap(relay_a: Relay, held: RunKeys, redis_store: Redis) -> None:
    """And says from where on there is something; one at the edge is none."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 5), progressed=False)
    start = writer.tail.seq - 5
    await held.client.xtrim(keys.events(relay_a.run), minid=f"7-{start + 4}", approximate=False)
    reader = Reader(redis_store, relay_a.run, Position.after(EventId(7, start + 2)))
    assert await reader.read() == ["gap", "coder 4", "coder 5"]
    assert reader.items[0] == Gap(EventId(7, start + 2), EventId(7, start + 4))
    assert await Reader(redis_store, relay_a.run, Position.after(EventId(7, start + 3))).read() == [
        "coder 4",
        "coder 5",
    ]


async def test_a_cursor_from_the_future_is_a_gap_and_then_what_comes(relay_a: Relay, redis_store: Redis) -> None:
    """It was given by a stream that is no more, or by nobody."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 2), progressed=False)
    future = Reader(redis_store, relay_a.run, Position.after(EventId(7, writer.tail.seq + 10)))
    assert await future.read() == ["gap"]
    await writer.append(events(3, 3), progressed=False)
    assert await future.read() == ["coder 3"]
    other = Reader(redis_store, relay_a.run, Position.after(EventId(99, 5)))
    assert await other.read() == ["gap", "coder 1", "coder 2", "coder 3"]


async def test_reading_what_is_not_there_is_no_gap(redis_store: Redis, run: RunId) -> None:
    """The record knows whether there was more."""
    assert await Reader(redis_store, run, Position.start(None)).read() == []
    assert await Reader(redis_store, run, Position.after(EventId(7, 3))).read() == []


# ---- a server of this module's own: out of memory, and gone


@pytest.fixture(scope="module")
async def valkey() -> AsyncIterator[EmbeddedValkey]:
    with temporary_directory() as directory:
        server = EmbeddedValkey(directory)
        await server.start()
        yield server
        await server.stop()


async def test_a_full_redis_takes_nothing_and_ends_no_lease(valkey: EmbeddedValkey) -> None:
    """The batch waits, all of it; heartbeats stand still; the lease is prolonged. Then all is well again."""
    async with (
        open_redis(valkey.url) as store,
        redis.asyncio.Redis.from_url(valkey.url, decode_responses=True) as client,
    ):
        relay = Relay(store, new_run())
        held = RunKeys(client, relay.run)
        writer = await relay.take(7)
        await client.pexpire(keys.owner(relay.run), 2000)
        await client.config_set("maxmemory", "1")
        try:
            with pytest.raises(StoreUnavailable):
                await writer.append(events(1, 3), progressed=True, end="completed")
            assert await held.data() == ["|"]
            assert await held.points() == {"coder": "0 "}
            assert await client.exists(keys.progress(relay.run)) == 0
            assert await relay.refresh(writer) == "kept"
            assert await held.lease_ms() > 2000
            newborn = Relay(store, new_run())
            with pytest.raises(StoreUnavailable):
                await newborn.take(7)
            assert await client.exists(keys.owner(newborn.run), keys.events(newborn.run)) == 0
        finally:
            await client.config_set("maxmemory", "0")
        await writer.retry()
        assert await held.data() == ["|", "coder 1", "coder 2", "coder 3"]
        assert await client.ttl(keys.events(relay.run)) > 0


async def test_a_restart_loses_nothing_that_was_answered(valkey: EmbeddedValkey) -> None:
    """Killed and started again: the owner goes on where it was, and no reader is told of a gap."""
    async with open_redis(valkey.url) as store:
        relay = Relay(store, new_run())
        writer = await relay.take(7)
        reader = reader_of(store, relay)
        await writer.append(events(1, 3), progressed=False)
        valkey.kill()
        with pytest.raises(StoreUnavailable):
            await writer.append(events(4, 5), progressed=False)
        await valkey.start()
        await writer.retry()
        assert await reader.read() == [f"coder {n}" for n in range(1, 6)]
        assert await relay.refresh(writer) == "kept"
