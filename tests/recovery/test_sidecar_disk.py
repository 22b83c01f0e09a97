"""A disk that is full, read-only or torn: nothing runs unrecorded, nothing recorded is forgotten.

The disk is a small one of its own, which needs the right to mount; where there is none these tests say so and are
skipped. (Kills at random instants, and a full disk without that right: tests/integration/test_sidecar_journal.py.)
"""

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sidecar_hub import Hub, Session
from sidecar_starts import Start, open_sidecars
from support import eventually

from towline.sidecar.decide import Row, State
from towline.sidecar.journal import Journal
from towline.sidecar.outcome import completed


class Disk:
    """One mebibyte, mounted for the test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs to mount a disk of its own: {done.stderr.strip()}")

    def fill(self) -> None:
        """Leave nothing free."""
        with (self.path / "filler").open("ab", buffering=0) as filler:
            for size in (4096, 1):
                try:
                    while True:
                        filler.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()
    disk.mount("size=1m")
    yield disk
    subprocess.run(["umount", "-l", str(disk.path)], check=True)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def start(hub: Hub, disk: Disk, executions: Path) -> AsyncIterator[Start]:
    async with open_sidecars(hub.url, disk.path) as starter:
        yield starter


async def click(session: Session, job: str) -> str:
    """Run a job with a side effect; how it ended, or with which code."""
    result = await session.run("click", {"button": job}, job=job)
    return result.error.code if result.error else result.outcome


async def test_a_full_disk_refuses_before_the_action_and_recovers(
    hub: Hub, disk: Disk, start: Start, executions: Path
) -> None:
    """Jobs are run until the disk is full, and on; then there is space again. What was said to have ended, ran once."""
    start()
    session = await hub.session()
    assert await click(session, "first") == "completed"
    disk.fill()
    ended = {job: await click(session, job) for job in (f"full-{n}" for n in range(40))}
    refused = {job for job, how in ended.items() if how == "journal-unavailable"}
    # What SQLite had reserved may still take a few.
    assert "full-39" in refused, ended
    assert (await session.run("look", {"at": "hinted"}, job="hinted", hinted=True)).outcome == "completed"
    ran = executions.read_text().splitlines()
    assert not {f"click {job}" for job in refused} & set(ran)

    disk.free()
    await eventually(lambda: _completes(session, "after"))
    again = await session.run("click", {"button": "first"}, job="first", attempt=2)
    assert (again.outcome, again.replayed) == ("completed", True)
    assert executions.read_text().splitlines().count("click first") == 1


_tries = iter(range(1000))


async def _completes(session: Session, job: str) -> bool:
    return await click(session, f"{job}-{next(_tries)}") == "completed"


async def test_a_read_only_disk_refuses_side_effects_alone_and_recovers(
    hub: Hub, disk: Disk, start: Start, executions: Path
) -> None:
    """From the start on: the sidecar starts, serves hinted jobs, and takes up its journal when it may write."""
    (disk.path / "state").mkdir(mode=0o700)
    disk.mount("remount,ro")
    start()
    session = await hub.session()
    assert await click(session, "never") == "journal-unavailable"
    assert (await session.run("look", {"at": "x"}, job="hinted", hinted=True)).outcome == "completed"
    assert executions.read_text() == "look x\n"
    disk.mount("remount,rw")
    session = await hub.session(2, within_s=20)
    assert await click(session, "now") == "completed"


@pytest.mark.parametrize("file", ["journal.db-wal", "journal.db"])
async def test_a_journal_cut_anywhere_in_its_last_bytes_is_opened(tmp_path: Path, file: str) -> None:
    """Of the log, only what was written last is lost. A cut database is none that a crash could leave: moved aside."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    for number in range(200):
        await journal.begin("ada", f"job-{number}", accepted_at_ms=1, tool="t", args=b"{}")
        await journal.finish("ada", f"job-{number}", completed(number))
    if file == "journal.db":
        await journal.aclose()  # everything is moved from the log into the database
    original = tmp_path / file
    for cut in range(1, 65):
        copy = tmp_path / f"cut-{cut}"
        copy.mkdir()
        for part in tmp_path.glob("journal.db*"):
            if not part.name.endswith("-shm"):
                shutil.copy(part, copy)
        with (copy / file).open("r+b") as torn:
            torn.truncate(original.stat().st_size - cut)
        opened = Journal(copy / "journal.db")
        assert opened.is_open
        if file == "journal.db-wal":
            assert opened.find("ada", "job-198") == Row(State.ENDED, completed(198))
            last = opened.find("ada", "job-199")
            assert last is not None
            assert last.outcome is not None
            assert last.outcome.outcome == "unknown", "its end was cut off, and not that it began"
            assert not list(copy.glob("*.damaged-*"))
        else:
            # A copy has a new id anyhow; what matters is that it either knows, or does not claim to.
            assert opened.find("ada", "job-0") == Row(State.ENDED, completed(0)) or list(copy.glob("*.damaged-*"))
        await opened.begin("ada", "new", accepted_at_ms=1, tool="t", args=b"{}")
        await opened.aclose()
    if file == "journal.db-wal":
        await journal.aclose()
