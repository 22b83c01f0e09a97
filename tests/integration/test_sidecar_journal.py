"""The journal on a real disk: what it knows after cuts, and what it does when it cannot record."""

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sidecar_tools
from sidecar_hub import Hub
from support import eventually

from towline.sidecar import Sidecar, memory
from towline.sidecar.decide import Row, State
from towline.sidecar.journal import FORGET_AFTER_MS, Journal, JournalUnavailable
from towline.sidecar.outcome import completed, failed

DAY_MS = 86_400_000
NOW_MS = 1_900_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[Journal]:
    opened = Journal(path)
    yield opened
    await opened.aclose()


async def begin(journal: Journal, job: str, *, user: str = "ada", accepted_at_ms: int = NOW_MS) -> None:
    await journal.begin(user, job, accepted_at_ms=accepted_at_ms, tool="click", args=b"{}")


async def begin_many(journal: Journal, count: int) -> None:
    for n in range(count):
        await begin(journal, f"job-{n}")


async def test_outcomes_survive_a_restart_and_what_ran_is_unknown(path: Path) -> None:
    first = Journal(path)
    await begin(first, "ended")
    await first.finish("ada", "ended", completed({"n": 1}))
    await begin(first, "acknowledged")
    await first.finish("ada", "acknowledged", completed(2))
    first.acknowledge("ada", "acknowledged")
    await begin(first, "cut-off")
    await first.aclose()

    second = Journal(path)
    assert second.id == first.id
    assert second.find("ada", "ended") == Row(State.ENDED, completed({"n": 1}))
    assert second.find("ada", "acknowledged") == Row(State.ACKNOWLEDGED)
    cut_off = second.find("ada", "cut-off")
    assert cut_off is not None
    assert cut_off.outcome is not None
    assert cut_off.outcome.outcome == "unknown"
    assert second.find("ada", "never") is None
    assert second.find("eve", "ended") is None, "jobs are of a user"
    await second.aclose()


async def test_each_write_is_on_disk_when_it_returns(journal: Journal, path: Path) -> None:
    """Read by another connection; and the setting that makes the commit wait for the disk is on."""
    await begin(journal, "a")
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT state FROM jobs").fetchall() == [("running",)]
    await journal.finish("ada", "a", failed("x", "y"))
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT state FROM jobs").fetchall() == [("ended",)]
    assert journal._writer is not None
    assert journal._writer.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_forgetting_raises_the_horizon(journal: Journal) -> None:
    """What is too old to be delivered goes, acknowledged or not; a running row stays; the horizon covers what went."""
    for number, age_ms in enumerate((FORGET_AFTER_MS + 2, FORGET_AFTER_MS + 1, DAY_MS)):
        await begin(journal, f"job-{number}", accepted_at_ms=NOW_MS - age_ms)
        await journal.finish("ada", f"job-{number}", completed(None))
    await begin(journal, "running", accepted_at_ms=NOW_MS - FORGET_AFTER_MS - 1)
    await journal.prune(NOW_MS)
    assert journal.horizon_ms == NOW_MS - FORGET_AFTER_MS - 1
    assert [journal.find("ada", f"job-{n}") is None for n in range(3)] == [True, True, False]
    assert journal.find("ada", "running") == Row(State.RUNNING)
    await journal.prune(NOW_MS - DAY_MS)
    assert journal.horizon_ms == NOW_MS - FORGET_AFTER_MS - 1, "never lowered"


async def test_the_horizon_survives_a_restart(path: Path) -> None:
    first = Journal(path)
    await begin(first, "old", accepted_at_ms=1000)
    await first.finish("ada", "old", completed(None))
    await first.prune(NOW_MS)
    await first.aclose()
    second = Journal(path)
    assert second.horizon_ms == 1000
    await second.aclose()


async def test_a_copied_journal_takes_a_new_id(path: Path, tmp_path: Path) -> None:
    first = Journal(path)
    await begin(first, "a")
    await first.finish("ada", "a", completed(1))
    await first.aclose()
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    second = Journal(copy)
    assert second.id != first.id
    assert second.find("ada", "a") is not None, "what it knows it still knows"
    await second.aclose()


async def test_nobody_else_reads_outcomes(journal: Journal, path: Path) -> None:
    await begin(journal, "a")
    assert {file.stat().st_mode & 0o077 for file in path.parent.glob("journal.db*")} == {0}


@pytest.mark.parametrize("damage", ["garbage", "header", "middle"])
async def test_a_damaged_file_is_moved_aside(path: Path, damage: str) -> None:
    first = Journal(path)
    for n in range(200):
        await begin(first, f"job-{n}")
    await first.aclose()
    content = bytearray(path.read_bytes())
    match damage:
        case "garbage":
            content = bytearray(os.urandom(len(content)))
        case "header":
            content[:16] = b"x" * 16
        case "middle":
            content[4096 : len(content) - 4096] = os.urandom(len(content) - 8192)
    path.write_bytes(content)

    second = Journal(path)
    assert second.is_open
    assert second.id != first.id, "the server must not take it for the one that knew"
    await begin(second, "new")
    assert [file.read_bytes()[:64] for file in path.parent.glob("*.damaged-*")] == [bytes(content[:64])]
    await second.aclose()


async def test_a_torn_tail_loses_nothing_that_was_committed(path: Path, tmp_path: Path) -> None:
    """The last bytes of the write-ahead log are cut off, as by a power cut in the middle of a write."""
    journal = Journal(path)
    await begin(journal, "committed")
    wal = path.with_name("journal.db-wal")
    committed = wal.stat().st_size
    await begin(journal, "torn")
    for cut in range(1, 65):
        directory = tmp_path / f"cut-{cut}"
        directory.mkdir()
        shutil.copy(path, directory / "journal.db")
        (directory / "journal.db-wal").write_bytes(wal.read_bytes()[: committed + cut])
        torn = Journal(directory / "journal.db")
        assert torn.find("ada", "committed") is not None
        assert torn.find("ada", "torn") is None
        await torn.aclose()
    await journal.aclose()


async def test_a_full_disk_refuses_and_recovers(journal: Journal) -> None:
    await begin(journal, "before")
    with full_disk():
        with pytest.raises(JournalUnavailable):
            await begin_many(journal, 1000)
        with pytest.raises(JournalUnavailable):
            await journal.finish("ada", "before", completed("x" * 100_000))
        assert journal.find("ada", "before") == Row(State.RUNNING)
    await journal.finish("ada", "before", completed(1))
    await begin(journal, "after")


async def test_a_journal_that_cannot_be_opened_is_opened_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.mkdir()
    journal = Journal(path)
    assert not journal.is_open
    with pytest.raises(JournalUnavailable):
        await begin(journal, "a")
    with pytest.raises(JournalUnavailable):
        journal.find("ada", "a")
    stand_in = journal.id
    path.rmdir()
    await journal.reopen()
    await begin(journal, "a")
    assert journal.id != stand_in
    await journal.aclose()


async def test_without_a_journal_only_hinted_jobs_run(tmp_path: Path, executions: Path) -> None:
    """And when it can be opened again, the sidecar dials anew to say which one it has now."""
    obstacle = tmp_path / "state" / "journal.db"
    obstacle.mkdir(parents=True)
    async with Hub() as hub:
        sidecar = Sidecar(url=hub.url, token="secret", state_dir=tmp_path / "state", tools=sidecar_tools.ALL)
        task = asyncio.create_task(sidecar.run())
        session = await hub.session()
        refused = await session.run("click", {"button": "x"})
        assert refused.outcome == "failed"
        assert refused.error is not None
        assert (refused.error.code, refused.error.retryable) == ("journal-unavailable", True)
        maybe = await session.run("click", {"button": "x"}, attempt=2)
        assert maybe.outcome == "unknown", "an earlier delivery may have run"
        assert (await session.run("look", {"at": "y"}, job="job-2", hinted=True)).outcome == "completed"
        assert executions.read_text() == "look y\n"

        obstacle.rmdir()
        again = await hub.session(2, within_s=15)
        assert again.hello.journal != session.hello.journal
        assert (await again.run("click", {"button": "z"}, job="job-3")).outcome == "completed"
        sidecar.stop()
        await task


@pytest.mark.parametrize("recovers", [True, False])
async def test_a_disk_that_fills_while_a_tool_runs(
    tmp_path: Path, executions: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    """The tool has ended; no answer leaves before its outcome is on disk. If that stays full, nobody knows."""
    monkeypatch.setattr(memory, "RECORD_PAUSE_S", 0.1)
    sidecar_tools.release.clear()
    async with Hub() as hub:
        sidecar = Sidecar(url=hub.url, token="secret", state_dir=tmp_path / "state", tools=sidecar_tools.ALL)
        task = asyncio.create_task(sidecar.run())
        session = await hub.session()
        # Its outcome makes the log longer than the full disk allows.
        await session.run("click", {"button": "x" * 100_000}, job="long")
        frame = await session.deliver("click_plain")
        await eventually(lambda: "plain" in executions.read_text())
        with full_disk():
            sidecar_tools.release.set()
            await asyncio.sleep(0.15)
            assert not session.results(frame=frame)
            refused = await session.result(frame=frame) if not recovers else None
            if refused:
                assert refused.error is not None
                assert (refused.outcome, refused.error.code) == ("unknown", "journal-unavailable")
                again = await session.run("click_plain", attempt=2)
                assert again.outcome == "unknown"
                assert again.error is not None
                assert again.error.code == "interrupted"
                not_run = await session.run("click", {"button": "never"}, job="next")
                assert not_run.error is not None
                assert not_run.error.code == "journal-unavailable"
                assert (
                    await session.run("give", {"kind": "surrogate"}, job="hinted", hinted=True)
                ).outcome == "completed"
        if recovers:
            assert (await session.result(frame=frame)).outcome == "completed"
        assert (await session.run("click", {"button": "after"}, job="after")).outcome == "completed"
        assert "never" not in executions.read_text()
        sidecar.stop()
        await task


@contextmanager
def full_disk() -> Iterator[None]:
    """Writes beyond 64 KiB into any file fail, for this process, as they do when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


WRITER = """
import asyncio, sys
from pathlib import Path
from towline.sidecar.journal import Journal
from towline.sidecar.outcome import completed

async def main():
    journal = Journal(Path(sys.argv[1]))
    for n in range(100000):
        await journal.begin("ada", f"job-{n}", accepted_at_ms=1, tool="t", args=b"{}")
        print(f"begun {n}", flush=True)
        await journal.finish("ada", f"job-{n}", completed("x" * (n % 5000)))
        print(f"ended {n}", flush=True)

asyncio.run(main())
"""


def test_kills_at_random_instants_lose_nothing_that_was_promised(path: Path) -> None:
    """Twenty processes are killed while they write; whatever `begin` or `finish` had returned for is still known."""
    for round_ in range(20):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.01 + 0.007 * round_)
            process.kill()
            said = [line.split() for line in process.stdout if line.endswith("\n")]
        journal = asyncio.run(_reopened(path))
        for what, number in said:
            row = journal[int(number)]
            if what == "ended":
                assert row == Row(State.ENDED, completed("x" * (int(number) % 5000)))
            else:
                assert row is not None


async def _reopened(path: Path) -> dict[int, Row | None]:
    journal = Journal(path)
    rows = {n: journal.find("ada", f"job-{n}") for n in range(2000)}
    await journal.aclose()
    return rows
