"""Runs whose headers no relay can read any more, since a key was taken out: they wait for newer ones, and they end.

Two relays in this process, which have the same key: another one than the headers were encrypted with.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis.asyncio
import structlog
from followed_runs import FollowedRun, Relay, open_relay
from support import eventually

from common.ids import RunId
from common.process.secrets import Secrets, new_key
from common.store.postgres import Postgres
from common.store.runs import NewSource, Runs
from harness.agent.server import Agent
from relay import scan

KEY, LOST_KEY = new_key(), new_key()
HEADERS = {"Authorization": "Bearer kept"}


def source(agent: Agent, name: str, key: str, *, stream: str = "a") -> NewSource:
    return NewSource(name, agent.url(stream), Secrets([key]).encrypt(HEADERS), "ids", 1800.0)


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as running:
        running.add("a")
        yield running


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """What the relays log."""
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
async def relays(
    redis_url: str, postgres_url: str, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Relay]]:
    monkeypatch.setattr(scan, "READ_EVERY_S", 1.0)
    async with (
        open_relay(redis_url, postgres_url, secret_keys=KEY) as one,
        open_relay(redis_url, postgres_url, secret_keys=KEY) as other,
    ):
        yield [one, other]


@pytest.fixture
async def runs(postgres: Postgres, redis_client: redis.asyncio.Redis) -> AsyncIterator[list[FollowedRun]]:
    """Two of them, which no later test's relays are to find."""
    opened = [FollowedRun(Runs(postgres), redis_client) for _ in range(2)]
    yield opened
    for run in opened:
        await run.runs.end(run.run, "stopped", "test", 0)


def warnings(lines: list[Any]) -> Counter[str]:
    """How often each run was warned of."""
    return Counter(line["run"] for line in lines if line["event"] == "headers_unreadable")


@pytest.mark.parametrize(("state", "reason"), [("stopped", "stop-requested"), ("expired", "max-duration")])
async def test_a_run_that_cannot_be_read_ends_once(
    agent: Agent, relays: list[Relay], runs: list[FollowedRun], lines: list[Any], state: str, reason: str
) -> None:
    """DELETE ends it, and so does its time: in the stream, in Postgres, by one relay; its upstream is never asked."""
    run = runs[0]
    await run.put(source(agent, "coder", LOST_KEY), max_duration_s=3.0 if state == "expired" else 86_400.0)
    await eventually(lambda: warnings(lines)[run.run] >= len(relays))
    assert (await run.state(), await run.own()) == ("active", [])
    if state == "stopped":
        await run.runs.request_stop(run.run)
    record = await run.ended(within_s=6.0)
    assert (record.state, record.reason, record.sources[0].state) == (state, reason, state)
    told = {"state": state, "reason": reason}
    assert await run.own() == [("towline.run.ended", {**told, "sources": {"coder": told}})]
    assert agent.streams["a"].requests == []
    await eventually(lambda: _is_free(run))
    assert sum(relay.metric("towline_runs_ended_total", state=state) for relay in relays) == 1
    assert warnings(lines)[run.run] == len(relays), "one each, however often they looked"


async def _is_free(run: FollowedRun) -> bool:
    return not await run.owner()


async def test_newer_headers_are_heeded_with_the_next_read(
    agent: Agent, relays: list[Relay], runs: list[FollowedRun], lines: list[Any]
) -> None:
    """Long before the run would be tried again."""
    run = runs[0]
    await run.put(source(agent, "coder", LOST_KEY))
    await eventually(lambda: warnings(lines)[run.run] >= len(relays))
    await run.put(source(agent, "coder", KEY))
    await eventually(lambda: agent.streams["a"].open_connections, 5)
    assert warnings(lines)[run.run] == len(relays)


async def test_a_source_that_has_ended_needs_no_headers(
    agent: Agent, relays: list[Relay], runs: list[FollowedRun], lines: list[Any]
) -> None:
    """It is not asked again, so the other one goes on."""
    run = runs[0]
    await run.put(source(agent, "planner", LOST_KEY), source(agent, "coder", KEY, stream="b"))
    await eventually(lambda: warnings(lines)[run.run] >= len(relays))
    agent.add("b").emit(2)
    await run.runs.end_source(run.run, "planner", "completed", "terminal-event", "as a former owner wrote")
    await run.runs.tell([run.run])
    await run.has([1, 2])
    assert agent.streams["a"].requests == []


async def test_runs_that_cannot_be_read_take_no_place_from_others(
    agent: Agent,
    relays: list[Relay],
    runs: list[FollowedRun],
    lines: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look takes so many runs and no more; those that come first in it must not be the same ones for ever."""
    monkeypatch.setattr(scan, "TAKES_MAX", 1)
    await relays.pop().stop()  # it would take what the other one leaves
    first, second = runs
    first.run = RunId(f"a-{first.run}")  # in the order in which they are taken
    await first.put(source(agent, "coder", LOST_KEY))
    await eventually(lambda: warnings(lines)[first.run])
    await second.put(source(agent, "coder", KEY))
    await eventually(lambda: agent.streams["a"].open_connections)
    assert await second.owner()
