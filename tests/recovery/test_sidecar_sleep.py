"""Sleep, wake and clocks that jump: at most one new connection each, and nothing runs twice."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sidecar_hub import Hub
from sidecar_starts import Start, open_processes, open_sidecars
from support import eventually

from towline.sidecar import app
from towline.sidecar.wake import GAP_S


class LaptopClocks:
    """Both clocks of a laptop, as the sidecar reads them: ours, moved by what a test adds."""

    def __init__(self) -> None:
        self.wall_ahead_s = 0.0
        self.monotonic_ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self.wall_ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.monotonic_ahead_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> LaptopClocks:
    clocks = LaptopClocks()
    monkeypatch.setattr(app, "time", clocks)
    return clocks


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def start(hub: Hub, tmp_path: Path, executions: Path) -> AsyncIterator[Start]:
    async with open_sidecars(hub.url, tmp_path) as starter:
        yield starter


@pytest.mark.parametrize(
    ("wall_s", "monotonic_s"),
    [(3600, 0), (0, 3600), (3600, 3600), (-3600, 0), (6, 0)],
    ids=["asleep", "monotonic-jumps", "stopped", "set-back", "six-seconds"],
)
async def test_a_jump_of_either_clock_is_one_new_connection(
    hub: Hub, start: Start, clocks: LaptopClocks, executions: Path, wall_s: float, monotonic_s: float
) -> None:
    """Within ten seconds; and what had ended before is answered from memory, not run again."""
    start()
    first = await hub.session()
    done = await first.run("click", {"button": "before"}, job="before")
    clocks.wall_ahead_s, clocks.monotonic_ahead_s = wall_s, monotonic_s
    await asyncio.wait_for(first.closed.wait(), 10)
    second = await hub.session(2)
    again = await second.run("click", {"button": "before"}, job="before", attempt=2)
    assert (again.replayed, bytes(again.result)) == (True, bytes(done.result))
    # Clocks are read once a second: none of the next readings takes it for another sleep.
    await asyncio.sleep(3)
    assert len(hub.handshakes) == 2, "no loop"
    assert executions.read_text() == "click before\n"


async def test_a_clock_that_is_slewed_or_stepped_a_little_changes_nothing(
    hub: Hub, start: Start, clocks: LaptopClocks, executions: Path
) -> None:
    """As time synchronisation does: half a second forth and back, and up to four at once."""
    start()
    session = await hub.session()
    for step_s in (0.5, -0.5, 0.5, -4.0, 3.0):
        clocks.wall_ahead_s += step_s
        await asyncio.sleep(1.1)
    assert len(hub.handshakes) == 1
    assert (await session.run("click", {"button": "x"})).outcome == "completed"


async def test_a_loop_that_was_blocked_counts_as_asleep(hub: Hub, tmp_path: Path, executions: Path) -> None:
    """An async tool that blocks: nobody could answer pings, so the sockets cannot be trusted. One new connection."""
    tools = tmp_path / "blocking.py"
    tools.write_text(
        "import time\nfrom towline.sidecar import tool\n\n\n"
        "@tool(read_only=True)\nasync def block() -> str:\n"
        f"    time.sleep({GAP_S + 1})\n    return 'blocked'\n"
    )
    async with open_processes(hub.url, tmp_path) as new:
        await new("--tools", str(tools)).start()
        first = await hub.session(within_s=20)
        frame = await first.deliver("block", job="blocks", hinted=True)
        second = await hub.session(2, within_s=20)
        answers = first.results(frame=frame) or [await second.result(job="blocks")]
        assert answers[0].outcome == "completed"
        # Clocks are read once a second: none of the next readings takes it for another sleep.
        await asyncio.sleep(3)
        assert len(hub.handshakes) == 2


async def test_woken_after_a_sleep_it_reconnects_and_answers_from_the_journal(
    hub: Hub, tmp_path: Path, executions: Path
) -> None:
    """The line was cut while it slept, without a word, and a job had ended just before: its answer never arrived."""
    async with open_processes(hub.url, tmp_path) as new:
        process = await new().start()
        first = await hub.session(within_s=20)
        before = await first.run("click", {"button": "before"}, job="before")
        process.process.send_signal(signal.SIGSTOP)
        await first.drop()
        await asyncio.sleep(GAP_S + 1)
        woken_at = time.monotonic()
        process.process.send_signal(signal.SIGCONT)
        second = await hub.session(2)
        assert time.monotonic() - woken_at < 10
        again = await second.run("click", {"button": "before"}, job="before", attempt=2)
        assert (again.replayed, bytes(again.result)) == (True, bytes(before.result))
        assert executions.read_text() == "click before\n"
        await eventually(lambda: '"event":"slept"' in process.log.read_text())
