"""One install started twice, or copied: one machine, one journal, nothing run twice."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sidecar_hub import Hub
from sidecar_starts import NewProcess, open_processes
from support import eventually


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def new(hub: Hub, tmp_path: Path, executions: Path) -> AsyncIterator[NewProcess]:
    async with open_processes(hub.url, tmp_path) as make:
        yield make


async def test_started_twice_in_the_same_instant_one_serves(hub: Hub, new: NewProcess, executions: Path) -> None:
    first, second = await asyncio.gather(new().start(), new().start())
    ended, pending = await asyncio.wait(
        [asyncio.create_task(each.ended(30)) for each in (first, second)], return_when=asyncio.FIRST_COMPLETED
    )
    assert [task.result() for task in ended] == [4]
    loser = first if first.process.returncode is not None else second
    assert "another sidecar already runs on" in loser.log.read_text()
    session = await hub.session(within_s=20)
    assert (await session.run("click", {"button": "once"})).outcome == "completed"
    assert executions.read_text() == "click once\n"
    assert len(hub.handshakes) == 1
    for task in pending:
        task.cancel()


async def test_killed_and_started_again_at_once_no_lock_is_in_the_way(
    hub: Hub, new: NewProcess, executions: Path
) -> None:
    """Five times in a row; each time it is the same machine, with the same journal, which still knows."""
    identities = set()
    for round_ in range(1, 6):
        process = await new().start()
        session = await hub.session(round_, within_s=20)
        identities.add((session.hello.machine, session.hello.journal))
        assert (await session.run("click", {"button": "once"}, job="once")).replayed == (round_ > 1)
        await process.kill()
    assert len(identities) == 1
    assert executions.read_text() == "click once\n"


async def test_a_copied_state_directory_is_the_same_machine_with_another_journal(
    hub: Hub, new: NewProcess, tmp_path: Path, executions: Path
) -> None:
    """The server sends the copy nothing that the original has begun; what both know, the copy answers all the same."""
    original = await new().start()
    first = await hub.session(within_s=20)
    await first.run("click", {"button": "known"}, job="known")
    await first.deliver("click", {"button": "cut off", "seconds": 60}, job="cut-off")
    await eventually(lambda: "cut off" in executions.read_text())
    shutil.copytree(tmp_path / "state", tmp_path / "copy")

    await new(TOWLINE_STATE_DIR=str(tmp_path / "copy")).start()
    second = await hub.session(2, within_s=20)
    assert second.hello.journal != first.hello.journal
    assert second.hello.machine == first.hello.machine
    assert (await second.run("click", {"button": "known"}, job="known", attempt=2)).replayed
    cut_off = await second.run("click", {"button": "cut off"}, job="cut-off", attempt=2)
    assert (cut_off.outcome, cut_off.replayed) == ("unknown", True)
    assert executions.read_text() == "click known\nclick cut off\n"
    # The original goes on, under its own id, also after a restart.
    await original.kill()
    await original.start()
    third = await hub.session(3, within_s=20)
    assert third.hello.journal == first.hello.journal


async def test_a_journal_put_back_as_another_file_takes_a_new_id(hub: Hub, new: NewProcess, tmp_path: Path) -> None:
    """A backup of yesterday does not know what ran today; under another id it is not asked about it."""
    process = await new().start()
    first = await hub.session(within_s=20)
    await first.run("click", {"button": "x"}, job="today")
    process.process.terminate()
    await process.ended()
    journal = tmp_path / "state" / "journal.db"
    # Renamed and not removed, or the copy might get the inode that has just become free.
    journal.rename(tmp_path / "yesterday")
    shutil.copy(tmp_path / "yesterday", journal)
    await process.start()
    assert (await hub.session(2, within_s=20)).hello.journal != first.hello.journal
