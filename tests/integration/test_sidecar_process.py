"""`towline sidecar run` as a process: killed, started twice, stopped."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sidecar_hub import Hub
from sidecar_starts import TOKEN, NewProcess, open_processes
from support import eventually


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def new(hub: Hub, tmp_path: Path, executions: Path) -> AsyncIterator[NewProcess]:
    async with open_processes(hub.url, tmp_path) as make:
        yield make


async def test_killed_in_mid_action_it_does_not_run_again(hub: Hub, new: NewProcess, executions: Path) -> None:
    """SIGKILL while a tool with a side effect runs: after the restart its job is `unknown`, and was executed once."""
    first = await new().start()
    session = await hub.session(within_s=20)
    await session.deliver("click", {"button": "buy", "seconds": 30})
    await eventually(executions.read_text)
    first.process.kill()
    await first.ended()

    restarted = await new().start()
    second = await hub.session(2, within_s=20)
    await restarted.said("job_interrupted")
    assert second.hello.running == []
    assert second.hello.journal == session.hello.journal
    assert second.hello.machine == session.hello.machine
    result = await second.run("click", {"button": "buy", "seconds": 30}, attempt=2)
    assert (result.outcome, result.replayed) == ("unknown", True)
    assert executions.read_text() == "click buy\n"


async def test_killed_after_the_action_it_answers_from_the_journal(hub: Hub, new: NewProcess, executions: Path) -> None:
    first = await new().start()
    session = await hub.session(within_s=20)
    before = await session.run("click", {"button": "buy"})
    first.process.kill()
    await first.ended()

    await new().start()
    again = await (await hub.session(2, within_s=20)).run("click", {"button": "buy"}, attempt=2)
    assert (again.outcome, bytes(again.result), again.replayed) == ("completed", bytes(before.result), True)
    assert executions.read_text() == "click buy\n"


async def test_killed_in_a_hinted_job_it_runs_it_again(hub: Hub, new: NewProcess, executions: Path) -> None:
    first = await new().start()
    session = await hub.session(within_s=20)
    await session.deliver("look", {"at": "page", "seconds": 30}, hinted=True)
    await eventually(executions.read_text)
    first.process.kill()
    await first.ended()

    await new().start()
    again = await (await hub.session(2, within_s=20)).run("look", {"at": "page"}, hinted=True, attempt=2)
    assert (again.outcome, again.replayed) == ("completed", False)
    assert executions.read_text() == "look page\n" * 2


async def test_frozen_and_woken_it_connects_again_and_drops_what_waited(
    hub: Hub, new: NewProcess, executions: Path
) -> None:
    """SIGSTOP for longer than the gap, as a closed lid: both clocks jump, and TCP noticed nothing."""
    process = await new().start()
    session = await hub.session(within_s=20)
    await session.deliver("look", {"at": "runs", "seconds": 5.1}, job="runs", hinted=True)
    await session.deliver("click", {"button": "waited"}, job="waits")
    await eventually(executions.read_text)
    process.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(5.2)  # `wake.GAP_S` and some
    process.process.send_signal(signal.SIGCONT)
    again = await hub.session(2)
    assert '"event":"slept"' in process.log.read_text()
    assert executions.read_text() == "look runs\n"
    assert (await again.run("click", {"button": "waited"}, job="waits", attempt=2)).outcome == "completed"


async def test_started_twice_the_second_says_so_and_leaves(hub: Hub, new: NewProcess) -> None:
    first = await new().start()
    await hub.session(within_s=20)
    second = await new().start()
    assert await second.ended() == 4
    assert "another sidecar already runs on" in second.log.read_text()
    assert len(hub.sessions) == 1
    first.process.kill()
    await first.ended()
    await new().start()
    await hub.session(2, within_s=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_zero(hub: Hub, new: NewProcess, executions: Path, number: signal.Signals) -> None:
    """Also while a plain function hangs, which nobody can stop."""
    process = await new().start()
    session = await hub.session(within_s=20)
    await session.deliver("click_plain")
    await eventually(executions.read_text)
    process.process.send_signal(number)
    assert await process.ended(within_s=8) == 0
    assert session.socket.close_code == 1000


async def test_the_token_is_nowhere_to_be_seen(hub: Hub, new: NewProcess, tmp_path: Path) -> None:
    """Not among the arguments, not in the log, not in what tools inherit."""
    tools = tmp_path / "peeping.py"
    tools.write_text(
        "import os\nfrom towline.sidecar import tool\n\n\n"
        "@tool(read_only=True)\nasync def environment() -> list[str]:\n    return list(os.environ.values())\n"
    )
    process = await new("--tools", str(tools)).start()
    session = await hub.session(within_s=20)
    result = await session.run("environment", hinted=True)
    assert result.outcome == "completed"
    assert TOKEN not in bytes(result.result).decode()
    assert TOKEN not in process.log.read_text()
    assert TOKEN in next(iter(hub.authorizations))


async def test_wrong_settings_are_one_line_and_exit_code_two(hub: Hub, new: NewProcess, tmp_path: Path) -> None:
    unnameable = tmp_path / "unnameable.py"
    unnameable.write_text("from towline.sidecar import tool\n\n\n@tool\ndef _private() -> None: ...\n")
    for arguments in (
        ("--url", "ws://example.com"),
        ("--tools", str(unnameable)),
        ("--tools", "no_such_module"),
        ("--tools", str(tmp_path / "no.py")),
    ):
        process = await new(*arguments).start()
        assert await process.ended() == 2
        lines = process.log.read_text().strip().split("\n")
        assert len(lines) == 1, lines
        assert lines[0].startswith("towline: ")
