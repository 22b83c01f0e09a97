"""Lifecycle with real processes and real signals."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from common.process.lifecycle import Lifecycle, State

DEADLINE_S = 15.0

# A service that says what happens to it, line by line; what it does after READY comes from the test.
SERVICE = """
import asyncio, sys
from common.process.lifecycle import Lifecycle, run_service

def say(line):
    print(line, flush=True)

async def serve(lifecycle):
    try:
        {body}
    finally:
        say("finally")

sys.exit(run_service(serve))
"""


class Service:
    """One process under test."""

    def __init__(self, body: str) -> None:
        source = SERVICE.format(body=body.strip().replace("\n", "\n        "))
        self._process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def wait_for(self, line: str) -> None:
        """Read up to this line (log lines come between)."""
        assert self._process.stdout is not None
        seen = []
        for text in self._process.stdout:
            seen.append(text.rstrip())
            if seen[-1] == line:
                return
        raise AssertionError(f"ended without {line!r}: {seen}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(DEADLINE_S)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Any]:
    """Start services that are gone after the test, whatever became of it."""
    services: list[Service] = []

    def start_one(body: str) -> Service:
        services.append(Service(body))
        return services[-1]

    yield start_one
    for service in services:
        service.end()


DRAINS_FOR_EVER = """
lifecycle.mark_ready(); say("ready")
await lifecycle.draining.wait(); say("draining")
await lifecycle.run_budgeted("slow", asyncio.sleep(3600), 3600); say("not reached")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(start: Any, number: signal.Signals) -> None:
    service = start("""
lifecycle.mark_ready(); say("ready")
await lifecycle.draining.wait(); say("draining")
await lifecycle.run_budgeted("quick", asyncio.sleep(0.01), 5); say("drained")
""")
    service.wait_for("ready")
    service.signal(number)
    service.wait_for("draining")
    service.wait_for("drained")
    service.wait_for("finally")
    assert service.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_drain_short(start: Any, number: signal.Signals) -> None:
    """What was built is still taken down: `finally` blocks run."""
    service = start(DRAINS_FOR_EVER)
    service.wait_for("ready")
    service.signal(signal.SIGTERM)
    service.wait_for("draining")
    service.signal(number)
    service.wait_for("finally")
    assert service.exit_code() == 128 + number


def test_a_third_signal_kills(start: Any) -> None:
    """Also a process whose clean-up hangs ends when it is told to often enough."""
    service = start("""
lifecycle.mark_ready(); say("ready")
await lifecycle.draining.wait(); say("draining")
try:
    await asyncio.sleep(3600)
finally:
    say("hanging")
    await asyncio.sleep(3600)
""")
    service.wait_for("ready")
    service.signal(signal.SIGTERM)
    service.wait_for("draining")
    service.signal(signal.SIGTERM)
    service.wait_for("hanging")
    service.signal(signal.SIGTERM)
    assert service.exit_code() == -signal.SIGTERM


def test_a_signal_during_start_stops_at_once(start: Any) -> None:
    """A service that waits for a store it will never reach has nothing to drain."""
    service = start("""
say("starting")
await asyncio.sleep(3600)
""")
    service.wait_for("starting")
    service.signal(signal.SIGTERM)
    service.wait_for("finally")
    assert service.exit_code() == 0


@pytest.mark.parametrize("service", ["gateway", "worker", "relay"])
def test_a_signal_is_heard_while_the_modules_are_being_loaded(service: str) -> None:
    """A pod is deleted in its first second.

    Process 1 of a container has no default action for a signal: what arrives before a handler is there is lost. The
    same goes for a process that inherits the signal as ignored, which needs no container.
    """
    process = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; exec \"$@\"", "sh", sys.executable, "-X", "importtime", "-m", service],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "REDIS_URL": "redis://127.0.0.1:1", "DATABASE_URL": "postgresql://127.0.0.1:1/none"},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith(f"{service}.settings"):
                raise AssertionError("all is loaded: the signal came too late, or was not heard")
            if line.rstrip().endswith(" structlog"):
                process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_failed_service_exits_with_one(start: Any) -> None:
    service = start('raise RuntimeError("no such port")')
    service.wait_for("finally")
    assert service.exit_code() == 1


async def test_states_go_one_way() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.state is State.STARTING
    lifecycle.mark_ready()
    assert lifecycle.state is State.READY
    lifecycle.begin_drain("test")
    lifecycle.mark_ready()
    assert lifecycle.state is State.DRAINING
    lifecycle.mark_stopped()
    lifecycle.begin_drain("again")
    lifecycle.mark_ready()
    assert lifecycle.state is State.STOPPED


async def test_a_drain_during_start_is_not_undone() -> None:
    lifecycle = Lifecycle()
    lifecycle.begin_drain("test")
    lifecycle.mark_ready()
    assert lifecycle.state is State.DRAINING


async def test_a_step_over_its_budget_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with asyncio.timeout(DEADLINE_S):
        assert not await Lifecycle().run_budgeted("endless", endless(), 0.05)
    assert cancelled.is_set()


async def test_a_step_that_resists_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its budget is the others' time."""
    monkeypatch.setattr("common.process.lifecycle.CANCEL_GRACE_S", 0.05)
    release = asyncio.Event()
    steps: set[asyncio.Task[Any]] = set()

    async def stubborn() -> None:
        step = asyncio.current_task()
        assert step is not None
        steps.add(step)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with asyncio.timeout(DEADLINE_S):
        assert not await Lifecycle().run_budgeted("stubborn", stubborn(), 0.05)
    release.set()
    await asyncio.wait(steps)


async def test_a_failing_step_does_not_keep_the_next_from_its_turn() -> None:
    async def failing() -> None:
        raise RuntimeError("no")

    lifecycle = Lifecycle()
    assert not await lifecycle.run_budgeted("failing", failing(), 5)
    assert await lifecycle.run_budgeted("next", asyncio.sleep(0), 5)


async def test_cancelling_a_drain_cancels_its_step() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    drain = asyncio.create_task(Lifecycle().run_budgeted("step", step(), 3600))
    await began.wait()
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    async with asyncio.timeout(DEADLINE_S):
        await cancelled.wait()
