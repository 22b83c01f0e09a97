"""The process runner: what it starts gets ready or says why, hears every signal, and is gone when it should be."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from support import eventually

from harness import stack
from harness.ports import is_http_ready
from harness.runner import Process, ProcessFailed, is_alive, temporary_directory
from harness.stack import Service

Start = Callable[[str], Process]


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    with temporary_directory() as path:
        yield path


@pytest.fixture
async def describe(directory: Path) -> AsyncIterator[Callable[..., Process]]:
    """Describe processes that run a piece of Python; they are killed at the end of the test."""
    described: list[Process] = []

    def describe(source: str, name: str = "child") -> Process:
        argv = [sys.executable, "-u", "-c", textwrap.dedent(source)]
        described.append(Process(name, argv, directory=directory, env={}))
        return described[-1]

    yield describe
    for process in described:
        await process.stop(within_s=0)


def said(process: Process, word: str) -> Callable[[], bool]:
    return lambda: word in process.read_log()


async def test_failed_start_shows_the_end_of_the_log(describe: Callable[..., Process]) -> None:
    """Whoever reads the test's output need not look for a log file."""
    process = describe("print('cannot: no such table'); raise SystemExit(3)")
    await process.start()

    async def never() -> bool:
        return False

    with pytest.raises(ProcessFailed, match=r"ended with 3 before it was ready(.|\n)*cannot: no such table"):
        await process.wait_ready(never, within_s=20)


async def test_not_ready_in_time_is_an_error(describe: Callable[..., Process]) -> None:
    """A process that hangs at its start is named, and can still be stopped."""
    process = describe("print('hanging'); import time; time.sleep(600)")
    await process.start()

    async def never() -> bool:
        return False

    with pytest.raises(ProcessFailed, match=r"was not ready within 0\.1 s"):
        await process.wait_ready(never, within_s=0.1)
    await process.stop()
    assert process.returncode == -signal.SIGTERM


async def test_log_of_the_last_start_is_told_from_older_ones(describe: Callable[..., Process]) -> None:
    """What a killed process said must not count as the word of its successor."""
    process = describe("import os, time; print('pid', os.getpid()); time.sleep(600)")
    for _ in range(2):
        await process.start()
        await eventually(said(process, f"pid {process.pid}"))
        assert process.read_log().count("pid") == 1
        process.kill()
        assert await process.wait(within_s=10) == -signal.SIGKILL


async def test_a_killed_process_starts_again_although_the_kernel_is_still_ending_it(
    describe: Callable[..., Process],
) -> None:
    """Memory takes the kernel time to free: just killed, a process is there for a while."""
    process = describe("held = bytearray(200_000_000); print('ready', flush=True); import time; time.sleep(600)")
    pids = set()
    was_there = False
    for _ in range(5):
        await process.start()
        await eventually(said(process, "ready"))
        pids.add(process.pid)
        process.kill()
        was_there |= process.is_running
    assert was_there, "the cut did not happen: each was gone at once"
    assert len(pids) == 5
    await process.wait(within_s=10)


async def test_stop_ends_what_ignores_sigterm_with_all_its_children(describe: Callable[..., Process]) -> None:
    """A deaf process, its child and its child's child are gone after the budget."""
    process = describe(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["/bin/sh", "-c", "sleep 600 & echo ready; wait"], start_new_session=True)
        time.sleep(600)
        """
    )
    await process.start()
    await eventually(said(process, "ready"))
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(tree) == 3
    await process.stop(within_s=0.2)
    assert process.returncode == -signal.SIGKILL
    assert not any(map(is_alive, tree))


async def test_kill_reaches_all_children(describe: Callable[..., Process]) -> None:
    """As when the machine dies: nobody is left to notice or to clean up."""
    process = describe(
        """
        import subprocess, time
        subprocess.Popen(["/bin/sh", "-c", "sleep 600 & echo ready; wait"], start_new_session=True)
        time.sleep(600)
        """
    )
    await process.start()
    await eventually(said(process, "ready"))
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    process.kill()
    assert await process.wait(within_s=10) == -signal.SIGKILL
    assert not any(map(is_alive, children))


async def test_stop_takes_the_children_of_an_obedient_process_too(describe: Callable[..., Process]) -> None:
    """What a process leaves behind when it goes on SIGTERM is ended, although it is in a session of its own."""
    process = describe(
        """
        import subprocess, time
        subprocess.Popen(["/bin/sh", "-c", "echo ready; exec sleep 600"], start_new_session=True)
        time.sleep(600)
        """
    )
    await process.start()
    await eventually(said(process, "ready"))
    (child,) = psutil.Process(process.pid).children()
    await process.stop()
    assert process.returncode == -signal.SIGTERM
    assert not is_alive(child)


async def test_frozen_process_rests_until_thawed(describe: Callable[..., Process]) -> None:
    """SIGSTOP reaches the process; SIGCONT, or a stop, gets it going again."""
    process = describe("import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)")
    await process.start()
    await eventually(said(process, "5"))
    process.freeze()
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    seen = len(process.read_log())
    await asyncio.sleep(0.1)
    assert len(process.read_log()) == seen
    process.thaw()
    await eventually(lambda: len(process.read_log()) > seen)
    process.freeze()
    await process.stop()
    assert process.returncode == -signal.SIGTERM


async def test_start_belongs_to_the_main_thread(describe: Callable[..., Process]) -> None:
    """The kernel ties a process to the thread that made it: from a pool's thread it would die at random."""
    process = describe("pass")
    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(asyncio.run, process.start())


async def test_leftover_of_an_earlier_harness_is_ended_first(describe: Callable[..., Process], directory: Path) -> None:
    """Where the kernel ends nothing, the next start does: by the pid file, even if the leftover is frozen."""
    leftover = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)  # noqa: ASYNC220
    try:
        created_at = psutil.Process(leftover.pid).create_time()
        (directory / "child.pid").write_text(f"{leftover.pid} {created_at}\n")
        process = describe("import time; time.sleep(600)")
        await process.start()
        assert leftover.poll() == -signal.SIGTERM
        assert process.is_running
    finally:
        leftover.kill()
        leftover.wait()


async def test_stranger_with_a_leftovers_pid_is_left_alone(describe: Callable[..., Process], directory: Path) -> None:
    """Pids are used again; the pid file also says when its process began."""
    created_at = psutil.Process(os.getpid()).create_time()
    (directory / "child.pid").write_text(f"{os.getpid()} {created_at - 3600}\n")
    process = describe("import time; time.sleep(600)")
    await process.start()  # would end this very process
    assert process.is_running


SERVICE = """
import http.server, os, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

http.server.ThreadingHTTPServer.allow_reuse_address = True
serving = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["TOWLINE_ADMIN_PORT"])), Handler).serve_forever()
"""


@pytest.fixture
async def service(directory: Path) -> AsyncIterator[Service]:
    """The smallest program that keeps to what the runner expects of a service."""
    (directory / "small_service.py").write_text(SERVICE)
    env = {"PYTHONPATH": str(directory)}
    service = Service("service", "small_service", port_variable="PORT", directory=directory, env=env)
    yield service
    await service.stop()


async def test_service_keeps_its_ports_over_a_kill(service: Service) -> None:
    """Whoever knew a replica's address finds the restarted one there."""
    await service.start_ready()
    ports = service.port, service.admin_port
    service.kill()
    await service.wait(within_s=10)
    assert not await is_http_ready(service.admin_port)
    await service.start_ready()
    assert (service.port, service.admin_port) == ports
    assert await is_http_ready(service.admin_port)


async def test_service_whose_port_was_taken_gets_another(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and its use another program may take it."""
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as occupant:
        taken = occupant.sockets[0].getsockname()[1]
        free = [stack.free_port(), stack.free_port(), stack.free_port(), taken]
        monkeypatch.setattr(stack, "free_port", free.pop)
        await service.start_ready()
        assert service.port != taken
        assert not free
