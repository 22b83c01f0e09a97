"""The journal: what this machine has started and how it ended, on disk. SQLite, one file.

Owns:     `journal.db` in the state directory, the journal's id and its horizon.
Promises: `begin` and `finish` return only once their row would survive a power cut; a job that was cut off is `unknown`
          after a restart, never run again; nothing is forgotten without raising the horizon over it. When it cannot
          record, it says so before anything ran.
Used by:  sidecar.memory (begin, finish, find, acknowledge), sidecar.app (open, prune, close).

Only jobs that are not hinted come here; a row therefore always was, and stays, unhinted, whatever its tool says later.
What the server has acknowledged keeps its row without the outcome until no job of its age can be delivered any more:
jobs need not end in the order in which they were accepted, so a horizon raised sooner could refuse one that never ran.

The id is bound to the operating system's machine id, the host name and the file itself, by its inode. Opened elsewhere
the journal takes a new id, and the server then sends it nothing that the old one may have begun. (Older content put
back into the same file is not noticed, nor is an image of the whole disk.)
"""

import asyncio
import hashlib
import os
import platform
import secrets
import sqlite3
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from towline.sidecar.decide import Row, State
from towline.sidecar.outcome import UNCERTAIN, JobOutcome, unknown

# The longest deadline a job may have (86 400 s), plus a day: nothing older is ever delivered.
FORGET_AFTER_MS = 2 * 86_400_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    user TEXT NOT NULL,
    job TEXT NOT NULL,
    accepted_at_ms INTEGER NOT NULL,  -- the server's clock
    tool TEXT NOT NULL,               -- with args_hash: for whoever looks into an `unknown`
    args_hash TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ended', 'acknowledged')),
    outcome BLOB,                     -- JSON, while ended
    PRIMARY KEY (user, job)
);
CREATE INDEX IF NOT EXISTS jobs_by_age ON jobs (accepted_at_ms);
"""

_outcomes = msgspec.json.Decoder(JobOutcome)
_logger = structlog.get_logger("towline.sidecar")
T = TypeVar("T")


class JournalUnavailable(Exception):
    """Nothing was recorded; `str()` says why."""


class Journal:
    """One journal file, written by one thread, read by the loop.

    Attributes:
        id: stable while the file stays where it is. While the file cannot be opened: one of this process's own.
        horizon_ms: `accepted_at` of the youngest job that was forgotten.
        is_open: False: every `begin` fails until `reopen` succeeds.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal, or make one; a damaged file is moved aside first.

        A file that cannot be opened (no space, no permission) is no error here: see `is_open`.
        """
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        # Acknowledged since the last commit. They ride on the next one: losing them costs a few kept outcomes.
        self._acknowledged: list[tuple[str, str]] = []
        self.id = secrets.token_hex(16)
        self.horizon_ms = 0
        self._thread.submit(self._open).result()

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def reopen(self) -> None:
        """Try to open again what could not be opened, or what turned out damaged. Compare `id` afterwards."""
        if not self.is_open:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def find(self, user: str, job: str) -> Row | None:
        """The row of a job; None if there is none.

        Raises:
            JournalUnavailable: the file cannot be read, so nobody knows.
        """
        try:
            if self._reader is None:
                raise JournalUnavailable("the journal is not open")
            found = self._reader.execute("SELECT state, outcome FROM jobs WHERE user = ? AND job = ?", (user, job))
            row = found.fetchone()
            if row is None:
                return None
            state, outcome = row
            return Row(State(state), None if outcome is None else _outcomes.decode(outcome))
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise JournalUnavailable(f"cannot read the journal: {error}") from error

    async def begin(self, user: str, job: str, *, accepted_at_ms: int, tool: str, args: bytes) -> None:
        """Record that a job starts now; on disk when this returns.

        Raises:
            JournalUnavailable: nothing was recorded; the job must not start.
        """
        args_hash = hashlib.sha256(args).hexdigest()
        await self._write(
            "INSERT INTO jobs (user, job, accepted_at_ms, tool, args_hash, state) VALUES (?, ?, ?, ?, ?, 'running')",
            (user, job, accepted_at_ms, tool, args_hash),
        )

    async def finish(self, user: str, job: str, outcome: JobOutcome) -> None:
        """Record how a job ended; on disk when this returns.

        Raises:
            JournalUnavailable: the row still says running, as it would after a crash.
        """
        await self._write(
            "UPDATE jobs SET state = 'ended', outcome = ? WHERE user = ? AND job = ? AND state = 'running'",
            (msgspec.json.encode(outcome), user, job),
        )

    def acknowledge(self, user: str, job: str) -> None:
        """The server has the outcome: let go of it with the next commit. Unknown jobs are ignored."""
        self._acknowledged.append((user, job))

    async def prune(self, now_ms: int) -> None:
        """Forget what no server delivers any more, and raise the horizon over it.

        Args:
            now_ms: the server's clock.
        """
        await self._on_thread(lambda writer: self._prune(writer, now_ms - FORGET_AFTER_MS))

    async def aclose(self) -> None:
        """Write what is left and close. A second call does nothing."""
        try:
            await self._on_thread(lambda _: None)
        except JournalUnavailable as error:
            _logger.warning("journal_not_closed_cleanly", error=str(error))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _write(self, statement: str, values: tuple[object, ...]) -> None:
        await self._on_thread(lambda writer: writer.execute(statement, values))

    async def _on_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_transaction, work)

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """On the journal's thread: `work` and the pending acknowledgements, all or nothing."""
        writer = self._writer
        if writer is None:
            raise JournalUnavailable("the journal is not open")
        acknowledged = self._acknowledged[:]
        try:
            writer.execute("BEGIN IMMEDIATE")
            try:
                result = work(writer)
                writer.executemany(
                    "UPDATE jobs SET state = 'acknowledged', outcome = NULL"
                    " WHERE user = ? AND job = ? AND state = 'ended'",
                    acknowledged,
                )
                writer.execute("COMMIT")
            finally:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:
                # Malformed or no longer a database: nothing in it can be trusted, see `reopen`.
                self._close()
            raise JournalUnavailable(f"cannot write the journal: {error}") from error
        del self._acknowledged[: len(acknowledged)]
        return result

    def _prune(self, writer: sqlite3.Connection, before_ms: int) -> None:
        # A running row is never forgotten: after the next start it is an outcome.
        (youngest,) = writer.execute(
            "SELECT max(accepted_at_ms) FROM jobs WHERE accepted_at_ms < ? AND state != 'running'", (before_ms,)
        ).fetchone()
        if youngest is None:
            return
        writer.execute("DELETE FROM jobs WHERE accepted_at_ms < ? AND state != 'running'", (before_ms,))
        horizon_ms = max(youngest, self.horizon_ms)
        writer.execute("UPDATE meta SET value = ? WHERE name = 'horizon_ms'", (str(horizon_ms),))
        # Before the commit: too high for a moment refuses what is two days old, too low could run a job twice.
        self.horizon_ms = horizon_ms

    def _open(self) -> None:
        """On the journal's thread."""
        for attempt in ("as it is", "after moving a damaged file aside"):
            try:
                self._open_once()
            except (sqlite3.OperationalError, OSError) as error:
                self._close()
                _logger.warning("journal_unavailable", path=str(self._path), error=str(error))
            except sqlite3.DatabaseError as error:
                self._close()
                _logger.warning("journal_damaged", path=str(self._path), error=str(error), opened=attempt)
                if self._move_aside():
                    continue
            return

    def _open_once(self) -> None:
        # Outcomes are the user's: nobody else reads them. (SQLite gives its other files the same mode.)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        writer = self._writer = _connect(self._path)
        (verdict,) = writer.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        writer.executescript(_SCHEMA)
        cut_off = msgspec.json.encode(unknown("interrupted", f"the sidecar ended while this job ran; {UNCERTAIN}"))
        writer.execute("BEGIN IMMEDIATE")
        interrupted = writer.execute("SELECT user, job, tool FROM jobs WHERE state = 'running'").fetchall()
        writer.execute("UPDATE jobs SET state = 'ended', outcome = ? WHERE state = 'running'", (cut_off,))
        meta = dict(writer.execute("SELECT name, value FROM meta").fetchall())
        binding = _binding(self._path)
        if meta.get("binding") != binding:
            meta = {"horizon_ms": "0"} | meta | {"id": secrets.token_hex(16), "binding": binding}
            writer.executemany("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", meta.items())
        writer.execute("COMMIT")
        for user, job, tool in interrupted:
            _logger.warning("job_interrupted", user=user, job=job, tool=tool, outcome="unknown")
        self.id, self.horizon_ms = meta["id"], int(meta["horizon_ms"])
        self._reader = _connect(self._path)

    def _close(self) -> None:
        """On the journal's thread."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None

    def _move_aside(self) -> bool:
        aside = self._path.with_name(f"{self._path.name}.damaged-{int(time.time())}")
        try:
            self._path.rename(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("journal_unavailable", path=str(self._path), error=str(error))
            return False
        return True


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        # In WAL mode the default, NORMAL, would lose the last rows at a power cut; macOS needs to be told to mean it.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "fullfsync = 1", "checkpoint_fullfsync = 1"):
            connection.execute(f"PRAGMA {pragma}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _binding(path: Path) -> str:
    file = path.stat()
    parts = (os_machine_id(), platform.node(), str(file.st_dev), str(file.st_ino))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def os_machine_id() -> str:
    """The operating system's id of this machine; "" where it has none."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            return path.read_text().strip()
        except OSError:
            continue
    if platform.system() == "Darwin":
        command = ["/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603
        for line in found.splitlines():
            if "IOPlatformUUID" in line:
                return line.split('"')[-2]
    return ""
