"""The job streams and presence: each script on a real server, what it writes, refuses, and leaves behind."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import redis.asyncio
from job_stores import TIMING, WORKER, Holder, UserKeys, accepted, finished, names, new_user, queued
from redis.exceptions import ResponseError

from common.errors import StoreUnavailable
from common.ids import GatewayId, JobId, UserId
from common.store import keys
from common.store.jobs import Jobs, terminal_text
from common.store.presence import leave, state_of
from common.store.records import End, Open
from common.store.redis import Redis, open_redis
from common.store.requests import Requests
from harness.faults import TcpProxy

GATEWAY = GatewayId("gateway-1")


@pytest.fixture
def held(redis_client: redis.asyncio.Redis, user: UserId) -> UserKeys:
    return UserKeys(redis_client, user)


async def notes(client: redis.asyncio.Redis, stream: str) -> list[dict[str, str]]:
    return [fields for _, fields in await client.xrange(stream)]


# ---- ask


async def test_ask_tells_presence_tool_and_room(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId
) -> None:
    """One look: what the door must know."""
    seen = await jobs.ask(user, "echo")
    assert (seen.presence, seen.hint, seen.entries, seen.bytes, seen.has_room) == ({}, "", 0, 0, True)
    await Holder(redis_store, user, epoch=7).serve(free=0)
    await queued(requests, jobs, user, args='{"a":1}')
    seen = await jobs.ask(user, "echo")
    assert seen.presence == {
        "state": "online",
        "machine": "machine-1",
        "worker": WORKER,
        "session": seen.presence["session"],
        "epoch": "7",
        "since": "1000",
        "seen": "2000",
        "busy": "0",
        "call": seen.presence["call"],
    }
    assert (seen.hint, seen.entries) == ("h", 1)
    assert seen.bytes > len('{"a":1}')
    assert (await jobs.ask(user, "fill_form")).hint == "u"
    assert (await jobs.ask(user, "nonsense")).hint == ""


async def test_many_asks_at_once_get_their_own_answers(redis_store: Redis, jobs: Jobs) -> None:
    """They share a round trip, and nothing else."""
    users = [new_user() for _ in range(40)]
    for number, user in enumerate(users):
        await Holder(redis_store, user, epoch=number).serve()
    seen = await asyncio.gather(*(jobs.ask(user, "echo") for user in users))
    assert [one.presence["epoch"] for one in seen] == [f"{number}" for number in range(40)]


async def test_a_young_redis_does_not_say_offline(jobs: Jobs, user: UserId, redis_client: redis.asyncio.Redis) -> None:
    """After a loss nobody is told `offline` about a machine that is connected."""
    old_s = TIMING.unknown_window_s
    seen = await jobs.ask(user, "echo")
    assert 0 <= seen.age_ms < 5000
    assert state_of(seen, old_s, TIMING) == "unknown"
    await redis_client.set(keys.BORN, int(await redis_client.get(keys.BORN)) + seen.age_ms - int(old_s * 1000))
    seen = await jobs.ask(user, "echo")
    assert seen.age_ms >= old_s * 1000
    assert state_of(seen, old_s, TIMING) == "offline"
    assert state_of(seen, old_s - 0.1, TIMING) == "unknown"  # our own link is too young to know


# ---- enqueue


async def test_enqueue_is_idempotent_per_job(jobs: Jobs, requests: Requests, user: UserId, held: UserKeys) -> None:
    """Also for twenty at once, and for the sweeper afterwards."""
    record = await accepted(requests, user)
    assert all(await asyncio.gather(*(jobs.enqueue(record, "{}", GATEWAY) for _ in range(20))))
    assert await jobs.enqueue_many([(record, "{}"), (record, "{}")]) == 0
    assert await held.entries() == [record.job]
    index = await held.index()
    assert index.keys() == {record.job, "bytes"}
    assert index[record.job].split(" ")[1] == index["bytes"]
    assert await held.client.smembers(keys.waiters(record.job)) == {GATEWAY}


async def test_the_sweeper_puts_back_what_is_missing(
    jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """And says how many were."""
    records = [await accepted(requests, user) for _ in range(3)]
    assert await jobs.enqueue(records[1], "{}", None)
    missing = await jobs.missing([Open(record.job, record.user) for record in records])
    assert missing == [records[0].job, records[2].job]
    assert await jobs.missing([]) == []
    assert await jobs.enqueue_many([(record, "{}") for record in records]) == 2
    assert sorted(await held.entries()) == sorted(record.job for record in records)


async def test_what_has_ended_is_not_enqueued(jobs: Jobs, requests: Requests, user: UserId, held: UserKeys) -> None:
    """The caller is told to read the record; a waiter stays registered for whoever settles again."""
    record = await accepted(requests, user)
    await jobs.settle(await finished(requests, record))
    assert not await jobs.enqueue(record, "{}", GATEWAY)
    assert await held.exist() == set()


async def test_what_has_ended_and_was_not_settled_is_found(
    jobs: Jobs, requests: Requests, user: UserId, redis_client: redis.asyncio.Redis
) -> None:
    """Paged in the order of their ends, which several jobs may share; settled and open ones are left out."""
    other = new_user()
    lost = [await queued(requests, jobs, user), await queued(requests, jobs, other), await queued(requests, jobs, user)]
    settled = await queued(requests, jobs, user)
    open_one = await queued(requests, jobs, user)
    await asyncio.gather(*(finished(requests, record) for record in lost))
    await jobs.settle(await finished(requests, settled))

    ends: list[End] = []
    while page := await requests.ended_jobs(
        older_than_s=0, younger_than_s=60, after=ends[-1] if ends else None, limit=2
    ):
        ends += page
    ours = [end for end in ends if end.user in (user, other)]
    assert sorted(end.job for end in ours) == sorted(record.job for record in (*lost, settled))
    assert ours == sorted(ours, key=lambda end: (end.ended_at, end.job))
    assert sorted(await jobs.unsettled(ours)) == sorted(record.job for record in lost)
    assert open_one.job not in {end.job for end in ends}
    assert await requests.ended_jobs(older_than_s=60, younger_than_s=3600, after=None, limit=1) == []
    assert await jobs.unsettled([]) == []


async def test_a_note_goes_to_the_worker_that_presence_names(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, redis_client: redis.asyncio.Redis
) -> None:
    """One for each new entry, none for a known one, none while nobody is there."""
    await queued(requests, jobs, user)
    assert await notes(redis_client, keys.control(WORKER)) == []
    await Holder(redis_store, user, epoch=1).serve()
    record = await queued(requests, jobs, user)
    await jobs.enqueue(record, "{}", None)
    assert await notes(redis_client, keys.control(WORKER)) == [{"note": "work", "user": user}]
    assert 0 < await redis_client.ttl(keys.control(WORKER)) <= keys.STREAM_TTL_S


async def test_a_cancel_is_told_to_each_session_until_the_job_is_settled(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, redis_client: redis.asyncio.Redis
) -> None:
    """One that comes after its end is a note, and nothing that stays."""
    record = await queued(requests, jobs, user)
    await jobs.ask_to_stop(record.job, user)
    assert 0 < await redis_client.ttl(keys.cancels(user)) <= keys.QUEUE_TTL_S
    for epoch in (1, 2):
        assert (await Holder(redis_store, user, epoch=epoch).serve()).cancels == [record.job]
    assert await notes(redis_client, keys.control(WORKER)) == []  # nobody was there
    await jobs.settle(await finished(requests, record))
    await jobs.ask_to_stop(record.job, user)
    assert (await Holder(redis_store, user, epoch=3).serve()).cancels == []
    assert await notes(redis_client, keys.control(WORKER)) == [{"note": "cancel", "user": user, "job": record.job}]
    assert not await redis_client.exists(keys.cancels(user))


# ---- serve: presence


async def test_an_assert_writes_presence_epoch_and_catalogue_with_their_times(
    redis_store: Redis, user: UserId, held: UserKeys
) -> None:
    """All of it lapses by itself."""
    served = await Holder(redis_store, user, epoch=5).serve(busy=True)
    assert (served.status, served.tools_missing, served.left) == ("ok", False, 0)
    assert served.born.isdigit()
    assert (await held.presence())["busy"] == "1"
    assert await held.tools() == {"echo": "h", "fill_form": "u"}
    client = held.client
    for key in (keys.presence(user), keys.tools(user)):
        assert TIMING.presence_ttl_ms - 2000 < await client.pttl(key) <= TIMING.presence_ttl_ms
    assert 0 < await client.ttl(keys.epoch(user)) <= keys.EPOCH_TTL_S


async def test_a_refresh_keeps_the_catalogue(redis_store: Redis, user: UserId, held: UserKeys) -> None:
    """What is unchanged is not sent again, but lives on."""
    holder = Holder(redis_store, user, epoch=5)
    await holder.serve()
    await held.client.pexpire(keys.tools(user), 1000)
    served = await holder.serve()
    assert not served.tools_missing
    assert await held.client.pttl(keys.tools(user)) > 2000


async def test_a_changed_catalogue_replaces_the_old_one(redis_store: Redis, user: UserId, held: UserKeys) -> None:
    """Tools that are gone are gone at the door too."""
    holder = Holder(redis_store, user, epoch=5)
    await holder.serve()
    holder.tools = {"echo": False}
    await holder.serve()
    assert await held.tools() == {"echo": "u"}


async def test_an_empty_catalogue_replaces_the_old_one_and_is_not_missed(
    redis_store: Redis, user: UserId, held: UserKeys
) -> None:
    """A machine may have no tools; it must not be asked for them for ever."""
    holder = Holder(redis_store, user, epoch=5)
    await holder.serve()
    holder.tools = {}
    served = await holder.serve()
    assert not served.tools_missing
    assert not (await holder.serve()).tools_missing
    assert await held.tools() == {}


async def test_a_lost_catalogue_is_asked_for(redis_store: Redis, user: UserId, held: UserKeys) -> None:
    """The next assert brings it."""
    holder = Holder(redis_store, user, epoch=5)
    await holder.serve()
    await held.client.delete(keys.tools(user))
    assert (await holder.serve()).tools_missing
    holder.tools = {"echo": True}
    assert not (await holder.serve()).tools_missing


async def test_a_newer_session_outranks_an_older_one(redis_store: Redis, user: UserId, held: UserKeys) -> None:
    """The older one writes nothing, takes nothing, and learns who is there."""
    old = Holder(redis_store, user, epoch=1)
    new = Holder(redis_store, user, epoch=2)
    await old.serve()
    assert (await new.serve()).status == "ok"
    before = await held.presence()
    served = await old.serve()
    assert (served.status, served.machine) == ("outranked", "machine-1")
    assert await old.take() is None
    assert await held.presence() == before


async def test_an_outranked_session_is_told_which_machine_is_there(redis_store: Redis, user: UserId) -> None:
    """Its own: replaced (4503); another: stand by (4003); nobody any more: neither is known."""
    old = Holder(redis_store, user, epoch=1, machine="laptop")
    await old.serve()
    await leave(redis_store, user, 1, grace_ms=None)
    new = Holder(redis_store, user, epoch=2, machine="desktop")
    await new.serve()
    assert (await old.serve()).machine == "desktop"
    await leave(redis_store, user, 2, grace_ms=None)
    served = await old.serve()
    assert (served.status, served.machine) == ("outranked", "")


@pytest.mark.parametrize("state", ["online", "reconnecting"])
async def test_a_first_assert_leaves_another_live_machine_alone(
    redis_store: Redis, user: UserId, held: UserKeys, state: str
) -> None:
    """Rule 14a: nothing is written, not even the epoch; the one that is there goes on."""
    there = Holder(redis_store, user, epoch=1, machine="laptop")
    await there.serve()
    if state == "reconnecting":
        await leave(redis_store, user, 1, grace_ms=5000)
    before = await held.presence()
    served = await Holder(redis_store, user, epoch=2, machine="desktop").serve()
    assert (served.status, served.machine) == ("other", "laptop")
    assert await held.presence() == before
    assert await held.client.get(keys.epoch(user)) == "1"
    assert (await there.serve()).status == "ok"


async def test_another_machine_takes_over_when_the_first_has_gone(redis_store: Redis, user: UserId) -> None:
    """Then refreshes go by the epoch alone."""
    there = Holder(redis_store, user, epoch=1, machine="laptop")
    await there.serve()
    await leave(redis_store, user, 1, grace_ms=None)
    new = Holder(redis_store, user, epoch=2, machine="desktop")
    assert (await new.serve()).status == "ok"
    assert (await there.serve()).status == "outranked"


async def test_after_a_flush_a_refresh_raises_again(redis_store: Redis, user: UserId, held: UserKeys) -> None:
    """And `born` is another one, by which workers learn that everything was lost."""
    holder = Holder(redis_store, user, epoch=3)
    born = (await holder.serve()).born
    await held.client.flushdb()
    await asyncio.sleep(0.002)  # `born` counts milliseconds
    assert await holder.take() is None  # assert, claim, then take
    served = await holder.serve()
    assert (served.status, served.tools_missing) == ("ok", True)
    assert served.born != born


async def test_what_is_asserted_survives_an_epoch_as_large_as_they_come(redis_store: Redis, user: UserId) -> None:
    """Epochs are milliseconds since 1970 and compared as numbers, not as text."""
    small, large = Holder(redis_store, user, epoch=999), Holder(redis_store, user, epoch=1_764_000_000_001)
    await small.serve()
    assert (await large.serve()).status == "ok"
    assert (await small.serve()).status == "outranked"
    assert await large.take() == []


# ---- serve: claim and take


async def test_an_assert_claims_what_older_sessions_held_in_stream_order(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """More than one page of it, over two dead sessions, without any minimum idle time; the rest is counted."""
    records = [await queued(requests, jobs, user) for _ in range(250)]
    order = [record.job for record in records]
    first, second = Holder(redis_store, user, epoch=1), Holder(redis_store, user, epoch=2)
    await first.serve(free=120)
    assert await first.take(free=110) is not None
    await second.serve(free=16)  # claims all 230 of them, has the bodies of 16
    third = Holder(redis_store, user, epoch=3)
    served = await third.serve(free=16)
    assert served.status == "ok"
    assert names(served.taken) == order[:16]
    assert all(one.claimed for one in served.taken)
    assert served.left == 230 - 16
    assert await held.consumers() == {third.session: 230}
    # As jobs end, claims bring the rest, and then the take what nobody had.
    in_flight, seen = set(order[:16]), list(order[:16])
    while len(seen) < 250:
        for job in in_flight:
            await jobs.settle(await finished(requests, records[order.index(job)]))
        served = await third.serve(free=16)
        in_flight = set(names(served.taken))
        assert in_flight
        seen += names(served.taken)
    assert seen == order


async def test_a_claim_returns_own_entries_and_drops_those_in_flight(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId
) -> None:
    """An answer that was lost had brought them; what is known to be in flight is not brought again."""
    records = [await queued(requests, jobs, user) for _ in range(4)]
    holder = Holder(redis_store, user, epoch=1)
    assert names((await holder.serve(free=3)).taken) == [r.job for r in records[:3]]
    served = await holder.serve(free=16, in_flight=(records[0].job, records[2].job))
    assert [(one.entry.job, one.claimed) for one in served.taken] == [
        (records[1].job, True),
        (records[3].job, False),
    ]


async def test_nothing_new_is_taken_while_claimed_bodies_are_left(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId
) -> None:
    """Stream order holds across the take-over."""
    records = [await queued(requests, jobs, user) for _ in range(5)]
    await Holder(redis_store, user, epoch=1).serve(free=3)
    new = Holder(redis_store, user, epoch=2)
    served = await new.serve(free=2)
    assert (names(served.taken), served.left) == ([r.job for r in records[:2]], 1)
    served = await new.serve(free=0, in_flight=tuple(names(served.taken)))
    assert (served.taken, served.left) == ([], 1)
    served = await new.serve(free=2, in_flight=(records[0].job, records[1].job))
    assert (names(served.taken), served.left) == ([r.job for r in records[2:4]], 0)


async def test_consumers_of_ended_sessions_go_when_they_hold_nothing(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """The claim empties them; the newest session's own one stays."""
    record = await queued(requests, jobs, user)
    holders = [Holder(redis_store, user, epoch=epoch) for epoch in range(1, 6)]
    for holder in holders:
        await holder.serve()
    assert await held.consumers() == {holders[-1].session: 1}
    assert await held.pending() == 1
    await jobs.settle(await finished(requests, record))
    assert await held.consumers() == {holders[-1].session: 0}


async def test_a_lost_group_is_made_again(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """By the take as by the assert, and from the first entry on."""
    records = [await queued(requests, jobs, user) for _ in range(2)]
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve(free=0)
    await held.client.xgroup_destroy(keys.jobs(user), keys.GROUP)
    assert names(await holder.take()) == [r.job for r in records]
    await held.client.xgroup_destroy(keys.jobs(user), keys.GROUP)
    assert names((await holder.serve()).taken) == [r.job for r in records]


async def test_an_entry_that_was_deleted_while_pending_is_passed_over(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """By hand, or by a trim of the operator's."""
    records = [await queued(requests, jobs, user) for _ in range(2)]
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve(free=1)
    entry_id = (await held.index())[records[0].job].split(" ")[0]
    await held.client.xdel(keys.jobs(user), entry_id)
    assert names((await holder.serve()).taken) == [records[1].job]


async def test_an_entry_that_cannot_be_read_is_told_and_then_removed(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """A take that meets one brings nothing: the assert that follows claims, and the next one removes what it named."""
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve()
    before, spoilt, after = [await queued(requests, jobs, user) for _ in range(3)]
    ids = [await _spoil(held, spoilt.job)]
    ids += [await held.client.xadd(keys.jobs(user), fields) for fields in ({"job": "x"}, {"job": "x", "body": "{}"})]
    assert await holder.take() is None
    served = await holder.serve(free=16)
    assert (names(served.taken), served.unreadable) == ([before.job, after.job], ids)
    served = await holder.serve(in_flight=(before.job, after.job), unreadable=ids)
    assert (served.taken, served.unreadable) == ([], [])
    assert await held.entries() == [before.job, after.job]
    assert await held.pending() == 2
    index = await held.index()
    assert spoilt.job not in index
    assert int(index["bytes"]) == sum(int(index[record.job].split(" ")[1]) for record in (before, after))
    # An open job is put back by the sweeper.
    assert await jobs.enqueue_many([(record, "{}") for record in (before, spoilt, after)]) == 1
    assert names(await holder.take()) == [spoilt.job]


async def _spoil(held: UserKeys, job: JobId) -> str:
    """Make the entry of a job say nothing; returns its new id."""
    entry, size = (await held.index())[job].split(" ")
    await held.client.xdel(keys.jobs(held.user), entry)
    entry = await held.client.xadd(keys.jobs(held.user), {"job": job, "body": '{"job":"x"}'})
    await held.client.hset(keys.jobs_index(held.user), job, f"{entry} {size}")
    return str(entry)


async def test_the_sweeper_passes_over_a_user_whose_keys_are_broken(
    jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """The others' jobs are put back, and found where they are to be settled."""
    broken = new_user()
    records = [await accepted(requests, one) for one in (broken, user, broken)]
    for key in (keys.jobs(broken), keys.jobs_index(broken)):
        await held.client.set(key, "none of ours")
    assert await jobs.enqueue_many([(record, "{}") for record in records]) == 1
    assert await held.entries() == [records[1].job]
    now = datetime.now(UTC)
    assert await jobs.unsettled([End(record.job, record.user, now) for record in records]) == [records[1].job]
    assert await jobs.missing([Open(record.job, record.user) for record in records]) == []


async def test_an_assert_makes_no_stream_for_a_user_without_jobs(
    redis_store: Redis, user: UserId, held: UserKeys
) -> None:
    """Ten thousand idle users cost their presence only."""
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve()
    assert await holder.take() == []
    assert await held.exist() == {"presence", "epoch", "tools"}


async def test_a_take_is_refused_unless_the_epoch_is_the_stored_one(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """Older, newer and unknown alike; and then nothing was moved."""
    record = await queued(requests, jobs, user)
    for epoch, stored in ((1, None), (1, 2), (3, 2)):
        if stored:
            await held.client.set(keys.epoch(user), stored)
        assert await Holder(redis_store, user, epoch=epoch).take() is None
    assert await held.pending() == 0
    assert names(await Holder(redis_store, user, epoch=2).take()) == [record.job]


async def test_two_sessions_that_take_at_once_never_get_one_job_twice(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId
) -> None:
    """One epoch, many takes in flight: each entry is answered once."""
    records = [await queued(requests, jobs, user) for _ in range(60)]
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve(free=0)
    brought = await asyncio.gather(*(holder.take(free=4) for _ in range(20)))
    assert sorted(job for taken in brought for job in names(taken or [])) == sorted(r.job for r in records)


async def test_an_entry_says_all_that_a_delivery_needs(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId
) -> None:
    """Arguments are the caller's bytes."""
    args = '{"text": "\\u00e9 ü",  "n": 1.0}'
    record = await queued(requests, jobs, user, args=args, key='a "quoted" key', name="fill_form", hinted=False)
    (taken,) = (await Holder(redis_store, user, epoch=1).serve()).taken
    entry = taken.entry
    assert bytes(entry.args).decode() == args
    assert (entry.job, entry.key, entry.name, entry.hinted) == (record.job, record.key, "fill_form", False)
    assert (entry.accepted_ms, entry.deadline_ms, entry.timeout_s) == (record.accepted_ms, record.deadline_ms, 120)
    assert taken.size > len(args)


# ---- settle


async def test_settle_removes_everything_and_tells_each_waiting_gateway(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """What is published is the record, with the outcome's own bytes."""
    await Holder(redis_store, user, epoch=1).serve()
    record = await accepted(requests, user)
    await jobs.enqueue(record, "{}", GATEWAY)
    await jobs.register_waiter([record.job], GatewayId("gateway-2"))
    ended = await finished(requests, record, '{"result": [1.0,  "ü"]}')
    await jobs.settle(ended)
    for gateway in ("gateway-1", "gateway-2"):
        (note,) = await notes(held.client, keys.replies(GatewayId(gateway)))
        assert note == {"job": record.job, "record": terminal_text(ended)}
    assert json.loads(terminal_text(ended)) == {
        "state": "completed",
        "attempts": 1,
        "ended_ms": ended.ended_ms,
        "outcome": {"result": [1.0, "ü"]},
    }
    assert '{"result": [1.0,  "ü"]}' in terminal_text(ended)
    assert await held.client.get(keys.result(record.job)) == "1"
    assert await held.client.exists(keys.waiters(record.job)) == 0
    assert await held.entries() == []
    assert await held.index() == {"bytes": "0"}
    assert await held.pending() == 0


async def test_a_large_outcome_is_not_copied_to_every_gateway(
    jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """They fetch the record."""
    record = await accepted(requests, user)
    await jobs.enqueue(record, "{}", GATEWAY)
    await jobs.settle(await finished(requests, record, json.dumps({"result": "x" * keys.REPLY_INLINE_BYTES_MAX})))
    (note,) = await notes(held.client, keys.replies(GATEWAY))
    assert note == {"job": record.job, "record": ""}


async def test_settle_is_idempotent_and_anyones(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """Twenty at once, with no epoch, over an entry that some session holds; the books come out even."""
    other = await queued(requests, jobs, user)
    record = await queued(requests, jobs, user)
    await jobs.register_waiter([record.job], GATEWAY)
    await Holder(redis_store, user, epoch=1).serve()
    ended = await finished(requests, record)
    await asyncio.gather(*(jobs.settle(ended) for _ in range(20)))
    assert await held.entries() == [other.job]
    index = await held.index()
    assert index["bytes"] == index[other.job].split(" ")[1]
    assert len(await notes(held.client, keys.replies(GATEWAY))) == 1


async def test_settle_leaves_nothing_of_an_absent_user(
    jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """Stream, group and index go with the last job when nobody is present."""
    records = [await queued(requests, jobs, user) for _ in range(3)]
    for number, record in enumerate(records):
        assert await held.exist() == {"jobs", "index"}, number
        await jobs.settle(await finished(requests, record))
    assert await held.exist() == set()


async def test_only_an_ended_job_is_settled(jobs: Jobs, requests: Requests, user: UserId) -> None:
    """Anything else is a bug of the caller's."""
    with pytest.raises(ValueError, match="has not ended"):
        await jobs.settle(await accepted(requests, user))


async def test_the_books_return_to_zero(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """Enqueues, takes, claims and settles of all sizes, many at once."""
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve()

    async def one(number: int) -> None:
        record = await queued(requests, jobs, user, args=json.dumps("ü" * number))
        await holder.take()
        await jobs.settle(await finished(requests, record))
        await jobs.settle(await finished(requests, record))

    await asyncio.gather(*(one(number) for number in range(60)))
    assert await held.index() == {"bytes": "0"}
    assert (await held.entries(), await held.pending()) == ([], 0)
    seen = await jobs.ask(user, "echo")
    assert (seen.entries, seen.bytes) == (0, 0)


async def test_the_door_sees_a_full_queue_by_entries_and_by_bytes(
    jobs: Jobs, requests: Requests, user: UserId, redis_client: redis.asyncio.Redis
) -> None:
    """Nothing is trimmed, also beyond the cap: the accepts in flight may exceed it."""
    record = await accepted(requests, user)
    for number in range(keys.QUEUE_ENTRIES_MAX):
        await redis_client.xadd(keys.jobs(user), {"job": f"{number}", "body": "{}"})
    assert not (await jobs.ask(user, "echo")).has_room
    assert await jobs.enqueue(record, "{}", None)
    assert await redis_client.xlen(keys.jobs(user)) == keys.QUEUE_ENTRIES_MAX + 1
    large = new_user()
    for _ in range(33):
        await queued(requests, jobs, large, args=json.dumps("x" * 256 * 1024))
    seen = await jobs.ask(large, "echo")
    assert seen.entries == 33
    assert not seen.has_room


# ---- leave


async def test_goodbye_deletes_presence_and_an_empty_stream(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """The epoch stays, so that a zombie stays fenced; outstanding jobs stay too."""
    record = await queued(requests, jobs, user)
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve()
    await leave(redis_store, user, 1, grace_ms=None)
    assert await held.exist() == {"epoch", "jobs", "index"}
    await Holder(redis_store, user, epoch=2).serve()
    await jobs.settle(await finished(requests, record))
    await leave(redis_store, user, 2, grace_ms=None)
    assert await held.exist() == {"epoch"}


async def test_a_lost_socket_leaves_presence_reconnecting_for_a_while(
    redis_store: Redis, jobs: Jobs, user: UserId, held: UserKeys
) -> None:
    """The door counts the machine as online meanwhile."""
    await Holder(redis_store, user, epoch=1).serve()
    await leave(redis_store, user, 1, grace_ms=TIMING.reconnecting_ms)
    assert (await held.presence())["state"] == "reconnecting"
    for key in (keys.presence(user), keys.tools(user)):
        assert 0 < await held.client.pttl(key) <= TIMING.reconnecting_ms
    seen = await jobs.ask(user, "echo")
    assert (state_of(seen, 1e9, TIMING), seen.hint) == ("reconnecting", "h")
    assert (await Holder(redis_store, user, epoch=2).serve()).status == "ok"
    assert (await held.presence())["state"] == "online"


@pytest.mark.parametrize("kind", ["take", "serve"])
async def test_a_call_that_runs_after_a_later_serve_brings_nothing(
    kind: str, redis_url: str, redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """Its bytes were held back on their way, its caller has given it up: what it took would be nobody's."""
    proxy = TcpProxy(redis_url)
    await proxy.start()
    try:
        async with open_redis(proxy.url) as held_back:
            holder = Holder(redis_store, user, epoch=1)
            await holder.serve()
            late = replace(holder, redis=held_back)
            assert await late.take() == []
            record = await queued(requests, jobs, user)
            proxy.stall("to_server")
            call = asyncio.create_task(late.take() if kind == "take" else late.serve(busy=True))
            await asyncio.sleep(0)  # it is made, whether or not its bytes have left
            await holder.serve(free=0)
            await proxy.heal()
            if kind == "take":
                assert await call is None
            else:
                with pytest.raises(ResponseError, match="LATE"):
                    await call
            assert (await held.presence())["busy"] == "0"
            assert await held.pending() == 0
            assert names(await holder.take()) == [record.job]
    finally:
        await proxy.stop()


@pytest.mark.parametrize("grace_ms", [None, 5000])
async def test_an_older_session_cannot_end_the_newer_one(
    redis_store: Redis, user: UserId, held: UserKeys, grace_ms: int | None
) -> None:
    """Its close may be noticed long after the machine is back."""
    await Holder(redis_store, user, epoch=1).serve()
    await Holder(redis_store, user, epoch=2).serve()
    before = await held.presence()
    await leave(redis_store, user, 1, grace_ms=grace_ms)
    assert await held.presence() == before


async def test_leaving_twice_or_after_a_flush_does_nothing(redis_store: Redis, user: UserId, held: UserKeys) -> None:
    """No presence is made out of nothing."""
    await Holder(redis_store, user, epoch=1).serve()
    await leave(redis_store, user, 1, grace_ms=None)
    await leave(redis_store, user, 1, grace_ms=5000)
    assert await held.presence() == {}
    await held.client.flushdb()
    await leave(redis_store, user, 1, grace_ms=5000)
    assert await held.exist() == set()


# ---- the client


async def test_scripts_that_the_server_forgot_are_loaded_again(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """Each script after SCRIPT FLUSH, and none of them runs twice."""
    holder = Holder(redis_store, user, epoch=1)
    record = await accepted(requests, user)
    await held.client.script_flush()
    await jobs.ask(user, "echo")
    await held.client.script_flush()
    await jobs.enqueue(record, "{}", GATEWAY)
    await held.client.script_flush()
    assert names((await holder.serve()).taken) == [record.job]
    await held.client.script_flush()
    assert await holder.take() == []
    await held.client.script_flush()
    await jobs.settle(await finished(requests, record))
    await held.client.script_flush()
    await leave(redis_store, user, 1, grace_ms=None)
    assert await held.exist() == {"epoch"}
    assert len(await notes(held.client, keys.replies(GATEWAY))) == 1


async def test_a_failing_script_fails_alone(redis_store: Redis, jobs: Jobs, held: UserKeys) -> None:
    """Its neighbours in the pipeline get their answers: one broken user must not stop a worker."""
    broken, sound = new_user(), new_user()
    await held.client.set(keys.presence(broken), "not a hash")
    answers = await asyncio.gather(jobs.ask(broken, "echo"), jobs.ask(sound, "echo"), return_exceptions=True)
    assert isinstance(answers[0], redis.exceptions.ResponseError)
    assert not isinstance(answers[1], BaseException)


async def test_a_full_redis_is_unavailable_and_not_a_success(
    redis_store: Redis, jobs: Jobs, requests: Requests, user: UserId, held: UserKeys
) -> None:
    """`noeviction`: writes are refused while memory is out, and work again afterwards."""
    record = await accepted(requests, user)
    await held.client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable):
            await jobs.enqueue(record, "{}", GATEWAY)
        with pytest.raises(StoreUnavailable):
            await jobs.settle(await finished(requests, record))
        with pytest.raises(StoreUnavailable):
            await Holder(redis_store, user, epoch=1).serve()
    finally:
        await held.client.config_set("maxmemory", "0")
    assert await held.exist() == set()
    assert await jobs.enqueue(record, "{}", GATEWAY)


async def test_a_redis_that_may_evict_is_refused_at_the_start(redis_store: Redis, held: UserKeys) -> None:
    """It would lose jobs in silence."""
    await redis_store.check()
    await held.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ValueError, match="noeviction"):
            await redis_store.check()
    finally:
        await held.client.config_set("maxmemory-policy", "noeviction")


async def test_waiters_lapse(jobs: Jobs, held: UserKeys) -> None:
    """Nobody waits for ever, and nobody cleans up after a gateway that died."""
    await jobs.register_waiter([JobId("a")], GATEWAY)
    assert 0 < await held.client.ttl(keys.waiters(JobId("a"))) <= keys.WAITERS_TTL_S
