"""A run that its relay could not follow, and whose lease it could not give back either: it is followed all the same."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from followed_runs import FollowedRun, Relay, source

from common.store.leases import Leases
from harness.agent.server import Agent
from harness.agent.stream import Script
from relay.owner import Owner


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as running:
        yield running


async def test_a_run_is_taken_again_after_a_release_that_failed_unforeseen(
    agent: Agent, relay: Relay, run: FollowedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fail once, as a mistake of ours would: the only relay there is must not believe for ever that it has it."""
    failed = []

    def fails_once(owner: type, name: str) -> None:
        real = getattr(owner, name)

        async def fail(self: Any, *given: Any) -> Any:
            if name not in failed:
                failed.append(name)
                raise RuntimeError(name)
            return await real(self, *given)

        monkeypatch.setattr(owner, name, fail)

    fails_once(Owner, "follow")
    fails_once(Leases, "release")
    agent.add("a", Script(rate=100.0, total=3))
    await run.put(source(agent.url("a")))
    assert (await run.ended(within_s=15)).state == "completed"
    assert failed == ["follow", "release"]
    await run.has([1, 2, 3, 4])
