"""The two heartbeats: what a run's record, its log and the metric say of one that pings, works or is silent."""

from collections.abc import AsyncIterator

import msgspec
import pytest
from followed_runs import FollowedRun, Relay, source
from support import eventually

from common.store import keys
from common.store.leases import look
from common.store.redis import open_redis
from harness.agent.server import Agent
from harness.agent.stream import Script

STALL_AFTER_S = 1.5


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as running:
        yield running


async def told(run: FollowedRun) -> list[str]:
    return [kind for kind, _ in await run.own()]


async def test_a_run_that_only_pings_is_stalled_and_recovers_with_real_work(
    agent: Agent, relay: Relay, run: FollowedRun
) -> None:
    """Any frame is life; only the run's progress types are work, and its other events are not."""
    stream = agent.add("a", Script(comment_every_s=0.2))
    await run.put(source(agent.url("a")), stall_after_s=STALL_AFTER_S)
    await eventually(lambda: stream.open_connections)
    stream.emit(type="ping")
    await eventually(lambda: _is(run, "stalled"))
    assert await told(run) == ["towline.run.stalled"]
    assert (await run.own())[0][1]["stale_s"] >= STALL_AFTER_S
    assert relay.metric("towline_runs_stalled") == 1
    stream.emit(type="output")
    await eventually(lambda: _is(run, "active"))
    assert (await told(run))[:2] == ["towline.run.stalled", "towline.run.recovered"]
    assert await run.client.exists(keys.progress(run.run), keys.liveness(run.run)) == 2


async def test_a_run_without_any_sign_of_life_is_orphaned(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    """It is reported, not ended: only its idle timeout, its caller or its age does that."""
    stream = agent.add("a")
    await run.put(source(agent.url("a")), stall_after_s=STALL_AFTER_S)
    await eventually(lambda: _is(run, "orphaned"))
    assert await told(run) == ["towline.run.orphaned"]
    stream.emit()
    await eventually(lambda: _is(run, "active"))
    assert (await told(run))[:2] == ["towline.run.orphaned", "towline.run.recovered"]


async def test_each_source_has_its_own_verdict_for_gateways(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    agent.add("busy", Script(rate=10.0))
    agent.add("quiet")
    done = agent.add("done")
    await run.put(
        source(agent.url("busy"), "busy"),
        source(agent.url("quiet"), "quiet"),
        source(agent.url("done"), "done"),
        stall_after_s=STALL_AFTER_S,
    )
    await eventually(lambda: done.open_connections)
    done.end()
    async with open_redis(relay.redis_url) as store:

        async def verdicts() -> bool:
            status = (await look(store, [run.run]))[run.run].status
            assert status
            found = {name: (s["connected"], s["verdict"]) for name, s in msgspec.json.decode(status).items()}
            assert found == {"busy": (True, "active"), "quiet": (True, "orphaned"), "done": (False, "ended")}
            return True

        await eventually(verdicts)
    assert await run.state() == "active"


async def _is(run: FollowedRun, state: str) -> bool:
    return await run.state() == state
