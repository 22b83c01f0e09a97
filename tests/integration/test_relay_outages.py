"""Redis or Postgres out of reach, an answer lost, a Redis that lost everything: what the log has afterwards."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from followed_runs import FollowedRun, Relay, open_relay, source
from support import eventually

from common.store import keys
from common.store.postgres import POOL_TIMEOUT_S, Postgres, migrate, open_postgres
from common.store.runs import Runs
from harness.agent.server import Agent
from harness.agent.stream import Script, Stream
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.faults import TcpProxy
from harness.runner import temporary_directory
from relay.gathering import RUN_EVENTS_MAX


@pytest.fixture(scope="module")
async def directory() -> AsyncIterator[Path]:
    with temporary_directory() as path:
        yield path


@pytest.fixture(scope="module")
async def redis_link(directory: Path) -> AsyncIterator[TcpProxy]:
    """What the relay reaches Redis through."""
    server = EmbeddedValkey(directory)
    proxy = TcpProxy(await server.start())
    await proxy.start()
    yield proxy
    await proxy.stop()
    await server.stop()


@pytest.fixture(scope="module")
async def postgres_link(directory: Path) -> AsyncIterator[TcpProxy]:
    server = EmbeddedPostgres(directory)
    await migrate(await server.start())
    proxy = TcpProxy(server.url)
    await proxy.start()
    yield proxy
    await proxy.stop()
    await server.stop()


@pytest.fixture(scope="module")
async def postgres(postgres_link: TcpProxy) -> AsyncIterator[Postgres]:
    """Past the proxy."""
    async with open_postgres(postgres_link.target_url) as store:
        yield store


@pytest.fixture
async def client(redis_link: TcpProxy) -> AsyncIterator[redis.asyncio.Redis]:
    """Past the proxy."""
    async with redis.asyncio.Redis.from_url(redis_link.target_url, decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def relay(
    client: redis.asyncio.Redis, redis_link: TcpProxy, postgres_link: TcpProxy, postgres: Postgres
) -> AsyncIterator[Relay]:
    async with open_relay(redis_link.url, postgres_link.url, drain_s=2.0) as running:
        yield running
    for link in (redis_link, postgres_link):
        await link.heal()
    await Runs(postgres).open_runs()


@pytest.fixture
async def run(relay: Relay, client: redis.asyncio.Redis, postgres: Postgres) -> AsyncIterator[FollowedRun]:
    followed = FollowedRun(Runs(postgres), client)
    yield followed
    await followed.runs.end(followed.run, "stopped", "test", 0)


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as running:
        yield running


async def test_without_redis_reading_goes_on_into_a_bounded_buffer_and_then_stops(
    relay: Relay, redis_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    """On return everything is appended, in order, and the rest is read: none lost, none twice."""
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit(10)
    await run.has(range(1, 11))
    redis_link.refuse()
    redis_link.cut()
    stream.emit(8000)
    await eventually(lambda: relay.metric("towline_relay_gathered_events") > RUN_EVENTS_MAX)
    await eventually(lambda: _is_still(relay))
    assert relay.metric("towline_relay_gathered_events") < 1.5 * RUN_EVENTS_MAX
    assert len(await run.entries()) == 10
    await redis_link.heal()
    await run.has(range(1, 8011), within_s=30)
    assert len(stream.requests) == 1, "the connection was kept, and TCP held the upstream back"


async def test_an_append_whose_answer_is_lost_is_there_once(
    relay: Relay, redis_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    """It is tried again under the same ids, before anything newer gets a number."""
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit()
    await run.has([1])
    cut = redis_link.cut_after(b"needle-in-the-append")
    stream.emit(data='{"n": 2, "text": "needle-in-the-append"}')
    await asyncio.wait_for(cut.happened.wait(), 10)
    stream.emit(3)
    await run.has([1, 2, 3, 4, 5])


async def test_a_flushed_redis_costs_no_event_that_the_upstream_still_has(
    relay: Relay, client: redis.asyncio.Redis, agent: Agent, run: FollowedRun, postgres: Postgres
) -> None:
    """The tail is gone: a new epoch, and the source resumes after the point that Postgres has.

    The new stream begins above every number of the old one, so that every reader sees a gap.
    """
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit(20)
    await run.has(range(1, 21))

    async def saved() -> int:
        return (await run.record()).sources[0].point.count

    await eventually(saved)
    point = await saved()
    old = int((await run.entries())[-1]["id"].partition("-")[2])
    await client.flushall()
    stream.emit(5)
    await run.has(range(point + 1, 26), within_s=15)
    entries = await run.entries()
    seqs = [int(e["id"].partition("-")[2]) for e in entries]
    assert seqs[0] > old + 1
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert relay.metric("towline_relay_takeovers_total", reason="behind") >= 1


async def test_without_postgres_runs_are_followed_on_and_their_end_is_written_later(
    relay: Relay, postgres_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    postgres_link.refuse()
    postgres_link.cut()
    stream.emit(10)
    stream.end()
    await run.has(range(1, 12))
    await eventually(lambda: _has_end(run))
    assert postgres_link.connections == 0
    assert await run.state() == "active"
    await postgres_link.heal()
    record = await run.ended(within_s=20)
    assert (record.state, record.sources[0].state) == ("completed", "completed")


async def test_an_end_that_was_told_stays_so_if_redis_loses_it_before_postgres_hears_of_it(
    relay: Relay, client: redis.asyncio.Redis, postgres_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    """Both stores fail at once: readers were told `completed`, and the run is not followed anew to another end."""
    stream = await _ends_without_postgres(postgres_link, agent, run)
    await client.flushall()
    await eventually(run.owner)  # a refresh has put the lease back, and has seen that the tail is gone
    assert await run.entries() == []
    # The statement under way has been given up: the end is owed by the owner alone. Nothing shows that but time.
    await asyncio.sleep(POOL_TIMEOUT_S + 1)
    await postgres_link.heal()
    record = await run.ended(within_s=20)
    assert (record.state, record.reason, record.sources[0].state) == ("completed", "sources-completed", "completed")
    assert len(stream.requests) == 1


async def _is_still(relay: Relay) -> bool:
    """Whether nothing more was read for two beats."""
    before = relay.metric("towline_relay_gathered_events")
    await asyncio.sleep(2 * keys.LEASE_REFRESH_EVERY_S)
    return relay.metric("towline_relay_gathered_events") == before


async def _ends_without_postgres(postgres_link: TcpProxy, agent: Agent, run: FollowedRun) -> Stream:
    """The run's end is in the log, and Postgres, which is out of reach, has not heard of it."""
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    postgres_link.refuse()
    postgres_link.cut()
    stream.emit(2)
    stream.end()
    await eventually(lambda: _has_end(run))
    return stream


async def _has_end(run: FollowedRun) -> bool:
    return any(kind == "towline.run.ended" for kind, _ in await run.own())


async def test_a_relay_that_cannot_reach_redis_still_stops_in_time(
    relay: Relay, redis_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    """What is in its buffer is read again by the next one: the resume point is behind it."""
    stream = agent.add("a", Script(rate=50.0))
    await run.put(source(agent.url("a")))
    await run.has_more_than(5)
    redis_link.stall()
    stream.emit(10)
    await asyncio.wait_for(relay.stop(), 15)
    await redis_link.heal()


async def test_an_end_that_postgres_did_not_hear_of_is_written_by_the_next_owner(
    relay: Relay, redis_link: TcpProxy, postgres_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    """The relay dies between the last event and Postgres: the log knows, nothing is said twice."""
    stream = await _ends_without_postgres(postgres_link, agent, run)
    assert await run.state() == "active"
    before = await run.entries()
    await relay.stop()
    await postgres_link.heal()
    async with open_relay(redis_link.url, postgres_link.url):
        record = await run.ended(within_s=15)
    assert (record.state, record.reason, record.sources[0].state) == ("completed", "sources-completed", "completed")
    assert await run.entries() == before
    assert len(stream.requests) == 1


async def test_a_new_owner_tells_nothing_twice_and_does_not_take_a_stalled_run_for_recovered(
    relay: Relay, redis_link: TcpProxy, postgres_link: TcpProxy, agent: Agent, run: FollowedRun
) -> None:
    """The verdict is in the record; even with its heartbeats lost the run has not recovered."""
    stream = agent.add("a", Script(comment_every_s=0.2))
    await run.put(source(agent.url("a")), stall_after_s=1.5)
    await eventually(lambda: _is(run, "stalled"))
    await relay.stop()
    await run.client.delete(keys.progress(run.run), keys.liveness(run.run))
    async with open_relay(redis_link.url, postgres_link.url):
        await eventually(lambda: len(stream.requests) == 2 and stream.open_connections)
        stream.emit(type="ping")
        await eventually(run.upstream)
        await eventually(lambda: run.client.exists(keys.liveness(run.run)))
        assert [kind for kind, _ in await run.own()] == ["towline.run.stalled"]
        stream.emit(type="output")
        await eventually(lambda: _is(run, "active"))
        assert [kind for kind, _ in await run.own()] == ["towline.run.stalled", "towline.run.recovered"]
        stream.end()
        await run.ended()


async def _is(run: FollowedRun, state: str) -> bool:
    return await run.state() == state
