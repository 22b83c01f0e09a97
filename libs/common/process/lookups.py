"""Look-ups of names that callers gave: in threads of their own, one per name under way, which all who ask share.

The system's resolver blocks, and a name whose servers are down holds its thread for 10 s and more, whoever has given up
by then. In the loop's own pool, which has a handful of threads, such a name would starve all others, Redis' too.

Promises: a name that is down holds one thread, however many ask for it. Nobody who leaves ends a look-up for the
          others. The process's exit waits for no look-up. Nothing is kept: who asks later has it looked up again.
Used by:  egress (`resolve`), connections (the way to a proxy).
"""

import asyncio
import contextlib
import socket
import threading
from collections import deque
from dataclasses import dataclass

# So many names may be down at one time; while they are, others wait for a thread.
THREADS_MAX = 64


@dataclass(slots=True)
class _LookUp:
    addresses: asyncio.Future[list[str]]
    askers: int = 0


class LookUps:
    """Make it inside the running loop. There is nothing to close."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._of_name: dict[str, _LookUp] = {}
        self._waiting: deque[str] = deque()
        self._threads = 0

    async def find(self, name: str) -> list[str]:
        """The addresses of a name, each once, in the resolver's order. It takes as long as it takes: set a deadline.

        Raises:
            OSError: there is none, or none to be had now.
        """
        if name not in self._of_name:
            self._of_name[name] = _LookUp(self._loop.create_future())
            self._waiting.append(name)
        look_up = self._of_name[name]
        look_up.askers += 1
        try:
            self._start_waiting()
            # Not awaited itself: who is cancelled would cancel it for the others.
            await asyncio.wait([look_up.addresses])
        finally:
            look_up.askers -= 1
        return look_up.addresses.result()

    def _start_waiting(self) -> None:
        while self._waiting and self._threads < THREADS_MAX:
            name = self._waiting.popleft()
            if not self._of_name[name].askers:  # all have left
                del self._of_name[name]
                continue
            # Not an executor's: the interpreter would wait for it at exit.
            thread = threading.Thread(target=self._run, args=(name,), name=f"lookup:{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._answer(name, OSError(f"no thread to look it up: {error}"))
            else:
                self._threads += 1

    def _run(self, name: str) -> None:
        """In the thread."""
        outcome: list[str] | Exception
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            outcome = list(dict.fromkeys(str(info[4][0]) for info in found))
        except Exception as error:  # whatever it is, the askers wait to hear of it
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: there are none
            self._loop.call_soon_threadsafe(self._end, name, outcome)

    def _end(self, name: str, outcome: list[str] | Exception) -> None:
        self._threads -= 1
        self._answer(name, outcome)
        self._start_waiting()

    def _answer(self, name: str, outcome: list[str] | Exception) -> None:
        addresses = self._of_name.pop(name).addresses
        if isinstance(outcome, Exception):
            addresses.set_exception(outcome)
            addresses.exception()  # seen, though all may have left
        else:
            addresses.set_result(outcome)
