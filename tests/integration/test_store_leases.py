"""Leases on a real server: who owns a run, who is fenced, and what each refresh says."""

import asyncio

import pytest
import redis.asyncio
from event_stores import Relay, RunKeys, event, events, new_run

from common.errors import StoreUnavailable
from common.ids import RelayId, RunId
from common.store import keys
from common.store.eventlog import EventId, Fenced, NewEvent
from common.store.leases import Held, Leases, Point, Refused, Taken, look
from common.store.redis import Redis, open_redis
from harness.faults import TcpProxy

LEASE_MS = int(keys.LEASE_TTL_S * 1000)


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


async def now_us(client: redis.asyncio.Redis) -> int:
    seconds, microseconds = await client.time()
    return int(seconds) * 1_000_000 + int(microseconds)


# ---- taking


async def test_a_run_is_born_at_redis_time_with_postgres_points(
    relay_a: Relay, held: RunKeys, redis_client: redis.asyncio.Redis
) -> None:
    """Nothing was there: a marker, no event, the lease, and the points that were saved."""
    before = await now_us(redis_client)
    saved = {"coder": Point("id with spaces", 3), "tester": Point()}
    writer = await relay_a.take(7, saved)
    after = await now_us(redis_client)
    assert relay_a.taken is not None
    assert before <= relay_a.taken.first_seq <= after
    assert relay_a.taken == Taken(7, EventId(7, relay_a.taken.first_seq), relay_a.taken.first_seq, saved)
    assert await held.entries() == [(str(writer.tail), {"marker": "relay-a"})]
    assert await held.owner() == "relay-a:7"
    assert 0 < await held.lease_ms() <= LEASE_MS <= 4000
    assert await held.points() == {"coder": "3 id with spaces", "tester": "0 "}


async def test_a_clock_that_was_set_back_does_not_lower_the_numbers(
    relay_a: Relay, redis_client: redis.asyncio.Redis
) -> None:
    """The epoch, in microseconds of Postgres's clock, is the floor."""
    epoch = await now_us(redis_client) + 3600 * 1_000_000
    assert (await relay_a.take(epoch)).tail == EventId(epoch, epoch)


async def test_a_takeover_marks_at_the_same_number_and_gets_all_points(
    relay_a: Relay, relay_b: Relay, held: RunKeys
) -> None:
    """Those beside the stream, not Postgres's older ones; Postgres's where the stream knows none."""
    old = await relay_a.take(7, {"coder": Point("", 0), "tester": Point("t", 5)})
    await old.append([*events(1, 3), event(1, "tester"), event(4)], progressed=True)
    await held.lapse()
    new = await relay_b.take(9, {"coder": Point("stale", 1), "tester": Point("t", 5), "third": Point("x", 2)})
    assert new.tail == EventId(9, old.tail.seq)
    assert relay_b.taken is not None
    assert relay_a.taken is not None
    assert relay_b.taken.first_seq == relay_a.taken.first_seq
    assert relay_b.taken.points == {
        "coder": Point("coder:4", 4),
        "tester": Point("tester:1", 6),
        "third": Point("x", 2),
    }
    assert (await held.data())[-1] == "|"
    await new.append([event(3, "third")], progressed=False)
    assert (await held.points())["third"] == "3 third:3"


async def test_a_held_run_is_refused_and_nothing_is_written(relay_a: Relay, relay_b: Relay, held: RunKeys) -> None:
    """Its owner is named."""
    await relay_a.take(7)
    assert await relay_b.try_take(9) == Refused("relay-a")
    assert await held.data() == ["|"]
    assert await held.owner() == "relay-a:7"


async def test_of_many_relays_one_takes(redis_store: Redis, run: RunId, held: RunKeys) -> None:
    """At the same instant, each with a fresh epoch."""
    relays = [Relay(redis_store, run, f"relay-{n}") for n in range(20)]
    answers = await asyncio.gather(*(relay.try_take(n + 1) for n, relay in enumerate(relays)))
    assert sum(isinstance(answer, Taken) for answer in answers) == 1
    assert await held.data() == ["|"]


async def test_a_relay_whose_name_begins_like_the_owners_is_another(relay_a: Relay, redis_store: Redis) -> None:
    """Names are compared whole."""
    await relay_a.take(7)
    assert await Relay(redis_store, relay_a.run, "relay").try_take(8) == Refused("relay-a")
    assert await Relay(redis_store, relay_a.run, "relay-a:7").try_take(8) == Refused("relay-a")


async def test_an_owner_takes_its_own_run_under_a_new_epoch(relay_a: Relay, held: RunKeys) -> None:
    """And its older epoch is fenced like any other owner's."""
    old = await relay_a.take(7)
    new = await relay_a.take(8)
    assert await held.owner() == "relay-a:8"
    with pytest.raises(Fenced):
        await old.append([event(1)], progressed=False)
    assert await relay_a.refresh(old) == "lost"
    await relay_a.release(old)
    assert await held.owner() == "relay-a:8"
    await new.append([event(1)], progressed=False)
    assert await held.data() == ["|", "|", "coder 1"]


async def test_an_older_epoch_takes_nothing(relay_a: Relay, relay_b: Relay, held: RunKeys) -> None:
    """It was minted before, and slept; the lease it might have had stays free."""
    await relay_a.take(9)
    await held.lapse()
    assert await relay_b.try_take(8) == Refused("")
    assert await held.owner() is None
    assert await held.data() == ["|"]


async def test_a_take_whose_answer_was_lost_is_repeated(redis_url: str, run: RunId, held: RunKeys) -> None:
    """Under the same epoch: no second marker, the same answer."""
    proxy = TcpProxy(redis_url)
    async with open_redis(await proxy.start()) as store:
        try:
            relay = Relay(store, run)
            cut = proxy.cut_after(b"some-point")
            with pytest.raises(StoreUnavailable):
                await relay.try_take(7, {"coder": Point("some-point", 1)})
            assert cut.happened.is_set()
            assert await held.data() == ["|"]
            await relay.take(7, {"coder": Point("some-point", 1)})
            assert await held.data() == ["|"]
            assert relay.taken is not None
            assert relay.taken.tail.seq == relay.taken.first_seq
        finally:
            await proxy.stop()


async def test_the_beginning_is_known_as_long_as_it_is_there(relay_a: Relay, held: RunKeys) -> None:
    """An owner that died before it wrote `first_seq` leaves that to the next; what was trimmed is not made up."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 3), progressed=False)
    await relay_a.take(8)
    assert relay_a.taken is not None
    first_seq = relay_a.taken.first_seq
    assert (await held.entries())[1][0] == f"7-{first_seq + 1}"
    await held.client.xtrim(keys.events(held.run), minid=f"7-{first_seq + 2}", approximate=False)
    await relay_a.take(9)
    assert relay_a.taken.first_seq == 0


async def test_how_sources_ended_is_handed_over(relay_a: Relay, relay_b: Relay, held: RunKeys) -> None:
    """It stands beside the stream from the moment on in which the stream says so."""
    writer = await relay_a.take(7)
    ended = NewEvent("tester", "", "towline.source.ended", '{"source":"tester","state":"failed"}', 1)
    await writer.append([event(1), ended], progressed=False)
    await held.lapse()
    await relay_b.take(8)
    assert relay_b.taken is not None
    assert relay_b.taken.ended == {"tester": b'{"source":"tester","state":"failed"}'}
    assert relay_b.taken.end == ""


async def test_a_run_that_has_ended_is_taken_without_a_mark(relay_a: Relay, relay_b: Relay, held: RunKeys) -> None:
    """Its owner died before Postgres knew: the next one reads the end, and writes nothing after it."""
    writer = await relay_a.take(7)
    last = NewEvent("", "", "towline.run.ended", '{"state":"completed"}', 1)
    tail = await writer.append([event(1), last], progressed=False, end="completed")
    await held.lapse()
    await relay_b.take(8)
    assert relay_b.taken is not None
    assert (relay_b.taken.end, relay_b.taken.end_data, relay_b.taken.tail) == (
        "completed",
        b'{"state":"completed"}',
        tail,
    )
    assert await held.data() == ["|", "coder 1", '{"state":"completed"}']
    assert await held.owner() == "relay-b:8"


# ---- refreshing


async def test_a_refresh_prolongs_the_lease_and_tells_of_life(
    relay_a: Relay, held: RunKeys, redis_store: Redis, run: RunId
) -> None:
    """Without a frame since the last one the age goes on, and what is said of the sources is still new."""
    writer = await relay_a.take(7)
    await held.client.pexpire(keys.owner(run), 1500)
    assert (await look(redis_store, [run]))[run].live_age_s is None
    assert await relay_a.refresh(writer, alive=False, status=b"none yet") == "kept"
    assert await held.client.exists(keys.liveness(run)) == 0
    assert (await look(redis_store, [run]))[run].status == b"none yet"
    assert await relay_a.refresh(writer, alive=True, status=b"one") == "kept"
    assert await held.lease_ms() > 1500
    assert 0 < await held.client.ttl(keys.liveness(run)) <= keys.LIVENESS_TTL_S
    await held.client.expire(keys.liveness(run), keys.LIVENESS_TTL_S - 100)
    assert await relay_a.refresh(writer, alive=False, status=b"two") == "kept"
    seen = (await look(redis_store, [run]))[run]
    assert (seen.owner, seen.status) == ("relay-a", b"two")
    assert seen.live_age_s is not None
    assert 100 <= seen.live_age_s < 150
    assert seen.progress_age_s is None
    await writer.append([event(1)], progressed=True)
    progress_age_s = (await look(redis_store, [run]))[run].progress_age_s
    assert progress_age_s is not None
    assert 0 <= progress_age_s < 30
    assert await look(redis_store, []) == {}
    assert (await look(redis_store, [RunId("nobody")]))[RunId("nobody")] == (None, None, None, b"")


async def test_a_lease_that_is_merely_gone_is_put_back(relay_a: Relay, relay_b: Relay, held: RunKeys) -> None:
    """Its owner goes on, and nobody else takes the run."""
    writer = await relay_a.take(7)
    await held.lapse()
    assert await relay_a.refresh(writer) == "kept"
    assert await held.owner() == "relay-a:7"
    assert 0 < await held.lease_ms() <= LEASE_MS
    assert await relay_b.try_take(8) == Refused("relay-a")


async def test_a_frozen_owner_neither_lengthens_nor_removes_its_successors_lease(
    relay_a: Relay, relay_b: Relay, held: RunKeys, run: RunId
) -> None:
    """It wakes, refreshes and releases; the key is the successor's, with the successor's own time."""
    frozen = await relay_a.take(7)
    await held.lapse()
    await relay_b.take(8)
    await held.client.pexpire(keys.owner(run), 1500)
    assert await relay_a.refresh(frozen, status=b"mine") == "lost"
    await relay_a.release(frozen)
    assert await held.owner() == "relay-b:8"
    assert 0 < await held.lease_ms() <= 1500
    assert await held.client.exists(keys.liveness(run), keys.source_status(run)) == 0


async def test_a_newer_epoch_at_the_tail_ends_an_ownership_that_has_the_lease(
    relay_a: Relay, relay_b: Relay, held: RunKeys
) -> None:
    """The successor's lease lapsed and the frozen owner put its own back in between: it gives it away again."""
    frozen = await relay_a.take(7)
    await held.lapse()
    await relay_b.take(8)
    await held.client.set(keys.owner(held.run), "relay-a:7", px=LEASE_MS)
    assert await relay_a.refresh(frozen) == "lost"
    assert await held.owner() is None


async def test_an_append_under_way_is_not_a_loss(relay_a: Relay) -> None:
    """The tail is ahead of what the owner knew when it asked."""
    writer = await relay_a.take(7)
    before = writer.tail
    await writer.append(events(1, 3), progressed=False)
    assert await relay_a.leases.refresh([Held(relay_a.run, 7, before, True)]) == ["kept"]


async def test_after_a_flush_the_owner_is_behind_and_keeps_the_lease(
    relay_a: Relay, relay_b: Relay, held: RunKeys
) -> None:
    """Nobody comes in between while it mints a new epoch; then the stream is born again, above."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 3), progressed=False)
    await held.flush()
    assert await relay_a.refresh(writer) == "behind"
    assert await relay_b.try_take(8) == Refused("relay-a")
    again = await relay_a.take(9, {"coder": Point("coder:2", 2)})
    assert relay_a.taken is not None
    assert relay_a.taken.points == {"coder": Point("coder:2", 2)}  # as Postgres had it
    assert again.tail.seq > writer.tail.seq
    assert await relay_a.refresh(again) == "kept"


async def test_a_stream_that_is_lost_alone_takes_what_stood_beside_it_along(relay_a: Relay, held: RunKeys) -> None:
    """Points further than Postgres's would leave out events that nobody has any more."""
    writer = await relay_a.take(7)
    ended = NewEvent("tester", "", "towline.source.ended", "{}", 1)
    await writer.append([event(1), event(1, "tester"), ended], progressed=False)
    await held.client.delete(keys.events(held.run))
    await relay_a.take(8, {"coder": Point("", 0)})
    assert relay_a.taken is not None
    assert (relay_a.taken.points, relay_a.taken.ended) == ({"coder": Point("", 0)}, {})


async def test_after_a_failover_to_an_older_replica_the_owner_is_behind(relay_a: Relay, held: RunKeys) -> None:
    """The tail that it left is not there; the points that the replica has go with its stream."""
    writer = await relay_a.take(7)
    await writer.append(events(1, 2), progressed=False)
    replica = await held.photograph()
    await writer.append(events(3, 4), progressed=False)
    await replica.take_over()
    assert await relay_a.refresh(writer) == "behind"
    await relay_a.take(8, {"coder": Point("coder:1", 1)})
    assert relay_a.taken is not None
    assert relay_a.taken.points == {"coder": Point("coder:2", 2)}
    assert await held.data() == ["|", "coder 1", "coder 2", "|"]


async def test_all_runs_are_refreshed_in_one_answer_each(redis_store: Redis, redis_client: redis.asyncio.Redis) -> None:
    """Kept, lost and behind side by side; a key that cannot be used spoils nobody else's; scripts may be unknown."""
    relays = [Relay(redis_store, new_run()) for _ in range(5)]
    writers = [await relay.take(7) for relay in relays]
    spoilt = RunKeys(redis_client, relays[1].run)
    await redis_client.delete(keys.owner(spoilt.run))
    await redis_client.rpush(keys.owner(spoilt.run), "not a lease")
    await redis_client.set(keys.owner(relays[2].run), "relay-b:8", px=LEASE_MS)
    await RunKeys(redis_client, relays[3].run).flush()
    await redis_client.script_flush()
    held = [Held(relay.run, 7, writer.tail, True) for relay, writer in zip(relays, writers, strict=True)]
    assert await relays[0].leases.refresh(held) == ["kept", "unknown", "lost", "behind", "kept"]
    assert await relays[0].leases.refresh([]) == []
    await relays[0].leases.release([(relay.run, 7) for i, relay in enumerate(relays) if i != 1])
    owners = [await redis_client.get(keys.owner(relay.run)) for i, relay in enumerate(relays) if i != 1]
    assert owners == [None, "relay-b:8", None, None]


async def test_no_key_of_a_run_stays_for_ever_even_before_its_end(relay_a: Relay, held: RunKeys, run: RunId) -> None:
    """The end may be lost with what was not replicated. While the run is followed its stream's time is put off."""
    writer = await relay_a.take(7)
    await writer.append([event(1)], progressed=True)
    assert await relay_a.refresh(writer) == "kept"
    made = (keys.owner, keys.events, keys.events_resume, keys.liveness, keys.source_status, keys.progress)
    for name in [key(run) for key in made]:
        assert await held.client.ttl(name) > 0
    for name in (keys.events(run), keys.events_resume(run)):
        await held.client.expire(name, 100)
    assert await relay_a.refresh(writer) == "kept"
    for name in (keys.events(run), keys.events_resume(run)):
        assert await held.client.ttl(name) > keys.EVENTS_TTL_S - 60


# ---- who lives


async def test_relays_see_each_other_until_they_leave(redis_store: Redis, redis_client: redis.asyncio.Redis) -> None:
    """Or until they say nothing for as long as a lease lives. The list itself goes when there is no relay."""
    a, b = Leases(redis_store, RelayId("relay-a")), Leases(redis_store, RelayId("relay-b"))
    assert await a.join() == ["relay-a"]
    assert await b.join() == ["relay-a", "relay-b"]
    assert await a.join() == ["relay-a", "relay-b"]
    await b.leave()
    assert await a.join() == ["relay-a"]
    assert 0 < await redis_client.ttl(keys.RELAYS) <= keys.RELAYS_TTL_S


async def test_the_dead_are_forgotten_whatever_the_clock_did(
    redis_store: Redis, redis_client: redis.asyncio.Redis
) -> None:
    """One that said so too long ago, and one that said so before the clock was set back."""
    now_ms = await now_us(redis_client) // 1000
    scores = {"dead": now_ms - LEASE_MS - 1, "living": now_ms, "future": now_ms + 3600_000}
    await redis_client.zadd(keys.RELAYS, scores)
    a = Leases(redis_store, RelayId("relay-a"))
    assert await a.join() == ["living", "relay-a"]
