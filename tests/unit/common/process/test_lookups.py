"""Look-ups that many share: a resolver that blocks, and askers who do not wait for it."""

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import eventually

from common.process import lookups
from common.process.lookups import LookUps


class Resolver:
    """In place of the system's: it blocks until told, and then answers each name with 192.0.2.1, twice.

    Attributes:
        asked: the names, in order; each is in a thread of its own.
        fails: with this, in place of an answer.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails: Exception | None = None
        self._answered: set[str] = set()
        self._news = threading.Condition()

    def answer(self, *names: str) -> None:
        with self._news:
            self._answered.update(names)
            self._news.notify_all()

    def __call__(self, host: str, *_: Any, **__: Any) -> list[Any]:
        with self._news:
            self.asked.append(host)
            assert self._news.wait_for(lambda: host in self._answered, 30)
        if self.fails is not None:
            raise self.fails
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))] * 2


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    fake = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", fake)
    yield fake
    fake.answer(*fake.asked)


def ask(look_ups: LookUps, name: str) -> asyncio.Task[list[str]]:
    return asyncio.create_task(look_ups.find(name))


async def leave(*tasks: asyncio.Task[list[str]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_all_who_ask_for_a_name_share_its_look_up_and_who_leaves_ends_it_for_nobody(resolver: Resolver) -> None:
    look_ups = LookUps()
    first, *others = [ask(look_ups, "a") for _ in range(100)]
    await eventually(lambda: resolver.asked == ["a"])
    await leave(first)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await look_ups.find("a")
    resolver.answer("a")
    assert await asyncio.gather(*others) == [["192.0.2.1"]] * 99
    assert resolver.asked == ["a"]
    # Nothing is kept: the next one has it looked up again.
    assert await look_ups.find("a") == ["192.0.2.1"]
    assert resolver.asked == ["a", "a"]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "no such name"), UnicodeError("label too long")])
async def test_a_failure_is_told_to_all_and_is_no_fault_if_nobody_is_left(
    resolver: Resolver, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    look_ups = LookUps()
    resolver.fails = error
    askers = [ask(look_ups, "a") for _ in range(3)]
    left = ask(look_ups, "b")
    await eventually(lambda: sorted(resolver.asked) == ["a", "b"])
    await leave(left)
    resolver.answer("a", "b")
    assert await asyncio.gather(*askers, return_exceptions=True) == [error] * 3
    resolver.fails = None
    assert await look_ups.find("b") == ["192.0.2.1"]
    del left
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_threads_are_bounded_and_none_is_spent_on_a_name_that_nobody_waits_for(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names are down and hold both threads. Who gave up in the queue is passed over when one is free again."""
    monkeypatch.setattr(lookups, "THREADS_MAX", 2)
    look_ups = LookUps()
    down = [ask(look_ups, "down-1"), ask(look_ups, "down-2")]
    await eventually(lambda: len(resolver.asked) == 2)
    assert {thread.name for thread in threading.enumerate()} >= {"lookup:down-1", "lookup:down-2"}
    given_up, waiting = ask(look_ups, "given-up"), ask(look_ups, "waiting")
    await asyncio.sleep(0.02)  # a third thread would have asked by now
    await leave(given_up, *down)  # their threads are as busy as before
    await asyncio.sleep(0.02)  # the same
    assert len(resolver.asked) == 2
    resolver.answer("down-1", "waiting")
    assert await waiting == ["192.0.2.1"]
    assert sorted(resolver.asked) == ["down-1", "down-2", "waiting"]
    resolver.answer("given-up", "down-2")
    assert await look_ups.find("given-up") == ["192.0.2.1"]


async def test_without_a_thread_the_look_up_fails_and_the_next_one_works(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_ups = LookUps()
    resolver.answer("a")
    with monkeypatch.context() as patched:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="no thread"):
            await look_ups.find("a")
    assert await look_ups.find("a") == ["192.0.2.1"]


def test_a_look_up_under_way_keeps_no_process_from_its_exit() -> None:
    script = """
import asyncio, socket, time
from common.process.lookups import LookUps
socket.getaddrinfo = lambda *_, **__: time.sleep(60)
async def main():
    async with asyncio.timeout(0.1):
        await LookUps().find("dead.invalid")
try:
    asyncio.run(main())
except TimeoutError:
    print("left")
"""
    began_at = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
    assert time.monotonic() - began_at < 30
