"""A relay dies, is told to go, freezes or gets company: its runs go on elsewhere, and their logs do not show it.

Real processes on one host. What is counted: every upstream event once and in order, one owner at a time.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from followed_runs import FollowedRun, source
from support import eventually

from common.ids import new_id
from common.store import keys
from common.store.postgres import Postgres
from common.store.runs import Runs
from harness.agent.server import Agent
from harness.agent.stream import Script
from harness.stack import Relay, Stack


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as running:
        yield running


@pytest.fixture
async def stack(state_directory: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Stack]:
    directory = state_directory / f"relays-{new_id()}"
    async with Stack(directory, postgres_url=postgres_url, redis_url=redis_url) as running:
        yield running


@pytest.fixture
async def opened(postgres: Postgres, redis_client: redis.asyncio.Redis) -> AsyncIterator[list[FollowedRun]]:
    """Runs that no later test's relays are to find."""
    runs: list[FollowedRun] = []
    yield runs
    for run in runs:
        await run.runs.end(run.run, "stopped", "test", 0)


@pytest.fixture
def run(opened: list[FollowedRun], postgres: Postgres, redis_client: redis.asyncio.Redis) -> FollowedRun:
    opened.append(FollowedRun(Runs(postgres), redis_client))
    return opened[-1]


async def markers(run: FollowedRun) -> int:
    """How often the run was taken."""
    return sum("marker" in fields for _, fields in await run.client.xrange(keys.events(run.run)))


def owner_of(stack: Stack, lease: str) -> Relay:
    """The process that has a lease."""
    name = lease.rpartition(":")[0]
    said = f'"relay":"{name}"'
    (found,) = (each for each in stack.relays if each.is_running and said in each.read_log().replace(" ", ""))
    return found


async def owned(run: FollowedRun) -> str:
    return await eventually(run.owner)


@pytest.mark.parametrize("how", ["kill", "term"])
async def test_a_run_goes_on_when_its_relay_is_gone(stack: Stack, agent: Agent, run: FollowedRun, how: str) -> None:
    """Killed: its lease lapses. Told to go: it appends what it has read and gives the lease back first."""
    stream = agent.add("a", Script(rate=100.0, total=900))
    await asyncio.gather(stack.add_relay(), stack.add_relay())
    await run.put(source(agent.url("a")))
    first = await owned(run)
    await run.has_more_than(50)
    relay = owner_of(stack, first)
    before = stream.emitted
    relay.kill() if how == "kill" else relay.term()
    code = await relay.wait(within_s=10)
    assert code == (-9 if how == "kill" else 0)
    if how == "term":
        assert await run.owner() != first, "given back, or with the next one already"
    await eventually(lambda: _has_moved(run, first), within_s=15)
    assert (await run.ended(within_s=40)).state == "completed"
    assert await run.numbers() == list(range(1, 902))
    assert before < 900, "it happened in the middle"
    assert await markers(run) == 2
    assert len(stream.requests) == 2
    assert stream.requests[1].last_event_id is not None
    assert stream.most_connections == 1


async def _has_moved(run: FollowedRun, first: str) -> bool:
    return await run.owner() not in ("", first)


async def test_a_frozen_relay_that_wakes_writes_nothing_and_stops(stack: Stack, agent: Agent, run: FollowedRun) -> None:
    """It wakes with an open upstream, events in its sockets and the belief that the run is its own."""
    stream = agent.add("a", Script(rate=50.0, total=2000))
    await asyncio.gather(stack.add_relay(), stack.add_relay())
    await run.put(source(agent.url("a")))
    first = await owned(run)
    await run.has_more_than(20)
    frozen = owner_of(stack, first)
    frozen.freeze()
    await eventually(lambda: _has_moved(run, first), within_s=15)
    second = await run.owner()
    await eventually(lambda: stream.open_connections == 2)
    frozen.thaw()
    await eventually(lambda: stream.open_connections == 1, within_s=15)
    await eventually(lambda: "run_lost" in frozen.read_log())
    assert await run.owner() == second
    stream.end()
    assert (await run.ended(within_s=20)).state == "completed"
    numbers = await run.numbers()
    assert numbers == list(range(1, len(numbers) + 1))
    assert await markers(run) == 2


async def test_runs_spread_evenly_as_relays_come_and_go_and_lose_nothing(
    stack: Stack, agent: Agent, opened: list[FollowedRun], postgres: Postgres, redis_client: redis.asyncio.Redis
) -> None:
    """One relay, then three, then one: shares are even, every move is graceful, no source is open twice."""
    count = 24
    for number in range(count):
        agent.add(f"s{number}", Script(rate=10.0))
        opened.append(FollowedRun(Runs(postgres), redis_client))
        await opened[-1].put(source(agent.url(f"s{number}")))

    async def shares() -> list[int]:
        leases = await redis_client.mget([keys.owner(run.run) for run in opened])
        return sorted(collections.Counter(lease for lease in map(_relay, leases) if lease).values())

    await stack.add_relay()
    await eventually(lambda: _equals(shares(), [count]), within_s=20)
    await asyncio.gather(stack.add_relay(), stack.add_relay())
    await eventually(lambda: _equals(shares(), [8, 8, 8]), within_s=30)
    for relay in stack.relays[:2]:
        relay.term()
        assert await relay.wait(within_s=10) == 0
    await eventually(lambda: _equals(shares(), [count]), within_s=20)
    assert max(stream.most_connections for stream in agent.streams.values()) == 1
    for number, run in enumerate(opened):
        stream = agent.streams[f"s{number}"]
        stream.end()
        await run.has(range(1, stream.emitted + 1))
    moves = [await markers(run) - 1 for run in opened]
    assert 16 + 8 <= sum(moves) <= 16 + 16 + 8, "those above a share, and those of relays that left"


def _relay(lease: str | None) -> str:
    return lease.rpartition(":")[0] if lease else ""


async def _equals(found: object, wanted: object) -> bool:
    with contextlib.suppress(TypeError):
        found = await found  # type: ignore[misc]
    assert found == wanted
    return True
