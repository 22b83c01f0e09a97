"""Processes that the harness starts: each in a session of its own, with its log in a file, ended when the harness ends.

Owns:     a process' pid file `{name}.pid` and log `{name}.log` in a state directory, and the lock on that directory.
Promises: nothing survives the harness, even if it is killed: on Linux the kernel ends the processes with it, elsewhere
          the next start in the same state directory does. Signals reach the whole tree of a process.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

TETHER = Path(__file__).with_name("tether.py")
POLL_EVERY_S = 0.02
LOG_TAIL_LINES = 30

# How long a process may take between SIGKILL and being gone; more only when the disk hangs.
KILL_WITHIN_S = 10.0


class ProcessFailed(RuntimeError):
    """A process ended, or did not do what was awaited in time; the message has the end of its log."""


class DirectoryBusy(RuntimeError):
    """Another harness is using this state directory."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the operating system under which a process runs."""

    name: str
    uid: int
    gid: int


@contextlib.contextmanager
def hold_directory(directory: Path) -> Iterator[None]:
    """Make a state directory if need be, and keep it for this harness alone.

    Raises:
        DirectoryBusy: another harness holds it. The hold of a harness that died is gone with it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise DirectoryBusy(f"{directory} is in use by another harness (pid {lock.read().strip()})") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Make a state directory that every account can enter, and remove it at the end."""
    directory = Path(tempfile.mkdtemp(prefix="towline-"))
    try:
        directory.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Process:
    """One program under the harness.

    Start it from the main thread: the kernel ties it to the thread that made it.

    Attributes:
        name: names the log and the pid file; one running process per name and directory.
        argv: the program's absolute path and arguments.
        env: its whole environment.
        log: where standard output and error go; grows over restarts.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        directory: Path,
        env: Mapping[str, str],
        account: Account | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        orphan_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Describe a process without starting it.

        Args:
            directory: state directory for the log and the pid file.
            account: who it runs as; None: as the harness.
            stop_signal: what asks it to leave.
            orphan_signal: what it gets from the kernel when the harness is gone. SIGKILL also ends frozen processes.
        """
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.log = directory / f"{name}.log"
        self._pid_file = directory / f"{name}.pid"
        self._account = account
        self._stop_signal = stop_signal
        self._orphan_signal = orphan_signal
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._is_killed = False
        self._killed: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        """Id of the process that was started last."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._started().poll()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended; a frozen process runs."""
        return self._popen is not None and self._popen.poll() is None

    async def start(self) -> None:
        """Start it, and first end what an earlier harness left behind under this name.

        What was sent SIGKILL is waited for: the kernel takes its time to end a process.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start processes from the main thread: they end with the thread that made them")
        if self._is_killed:
            await self.wait(within_s=KILL_WITHIN_S)
        if self.is_running:
            raise RuntimeError(f"{self.name} is running already")
        await self._end_leftover()
        self._spawn()

    async def wait_ready(self, probe: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
        """Return once `probe` says yes.

        Raises:
            ProcessFailed: it ended, or was not ready in time.
        """
        deadline = time.monotonic() + within_s
        while True:
            ready = await probe()
            # Asked after the probe: what answered it may have been somebody else on the same port.
            if self.returncode is not None:
                raise self._failed(f"ended with {self.returncode} before it was ready")
            if ready:
                return
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready within {within_s:g} s")
            await asyncio.sleep(POLL_EVERY_S)

    def term(self) -> None:
        """Send SIGTERM to the process alone."""
        self._started().send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it and its descendants: no cleanup code runs. `wait` returns when all are gone."""
        tree = self._tree()
        self._is_killed = True
        self._killed += tree[1:]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def freeze(self) -> None:
        """SIGSTOP it and its descendants; their sockets stay open and nobody answers on them."""
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Let a frozen process go on; does nothing to one that is not frozen."""
        for process in reversed(self._tree()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    async def wait(self, *, within_s: float) -> int:
        """Wait until it (and whatever `kill` was sent to) is gone; return its exit code, negative for a signal.

        Raises:
            ProcessFailed: still there after `within_s`.
        """
        deadline = time.monotonic() + within_s
        while (code := self.returncode) is None or any(map(is_alive, self._killed)):
            if time.monotonic() > deadline:
                raise self._failed(f"was still there after {within_s:g} s")
            await asyncio.sleep(POLL_EVERY_S)
        self._pid_file.unlink(missing_ok=True)
        return code

    async def stop(self, *, within_s: float = 10.0) -> None:
        """End it: ask, thaw, and kill what is left of its tree after `within_s`. Does nothing if it is not running."""
        if not self.is_running:
            return
        descendants = self._tree()[1:]
        self._started().send_signal(self._stop_signal)
        self.thaw()
        try:
            await self.wait(within_s=within_s)
        except ProcessFailed:
            self.kill()
        for descendant in filter(is_alive, descendants):
            self._killed.append(descendant)
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        await self.wait(within_s=KILL_WITHIN_S)

    def read_log(self) -> str:
        """Return what it has written since its last start."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _spawn(self) -> None:
        account = f"{self._account.uid}:{self._account.gid}" if self._account else "-"
        replaced, replaces = os.pipe()
        tether = [str(TETHER), str(os.getpid()), str(int(self._orphan_signal)), account, str(replaces)]
        with self.log.open("ab") as log, os.fdopen(replaced, "rb") as pipe:
            self._log_start = log.tell()
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", *tether, *self.argv],
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[replaces],
                )
            finally:
                os.close(replaces)
            # Until the program has taken over, a signal would meet the tether, which is not tied to us yet.
            pipe.read()
        self._is_killed = False
        self._killed = []
        self._pid_file.write_text(f"{self.pid} {psutil.Process(self.pid).create_time()}\n")

    async def _end_leftover(self) -> None:
        process = _read_pid_file(self._pid_file)
        if process is None:
            return
        leftovers = [process, *process.children(recursive=True)]
        # Asked first, so that a database leaves its files in order; a frozen or deaf one is killed.
        process.send_signal(self._stop_signal)
        if not await _are_gone(leftovers, within_s=5.0):
            for leftover in filter(is_alive, leftovers):
                with contextlib.suppress(psutil.NoSuchProcess):
                    leftover.kill()
            await _are_gone(leftovers, within_s=KILL_WITHIN_S)

    def _tree(self) -> list[psutil.Process]:
        """The process and its descendants, the process first: a server must not see its children die one by one."""
        if not self.is_running:
            return []
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._popen

    def _failed(self, what: str) -> ProcessFailed:
        tail = "\n".join(self.read_log().splitlines()[-LOG_TAIL_LINES:])
        return ProcessFailed(f"{self.name} {what}; its log, {self.log}, ends:\n{tail}")


def _read_pid_file(path: Path) -> psutil.Process | None:
    """Find the process a pid file was written for; None when it is gone and perhaps another one has its pid."""
    try:
        pid, created_at = path.read_text().split()
        process = psutil.Process(int(pid))
        # Start times are derived from the clock, which may have been set since.
        return process if abs(process.create_time() - float(created_at)) < 2.0 else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


async def _are_gone(processes: Sequence[psutil.Process], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, processes)):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_EVERY_S)
    return True


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended yet."""
    try:
        # A zombie has ended; its new parent may be slow to collect it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
