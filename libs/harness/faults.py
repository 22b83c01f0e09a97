"""A TCP proxy that fails on request, to stand in front of Redis, Postgres, a gateway or a worker in recovery tests.

It runs on real sockets in the loop of the test, and knows nothing of the protocols it carries. One proxy has one state,
for the connections it has and for those to come; `heal` ends all of it.
"""

import asyncio
import contextlib
import socket
import struct
import time
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from harness.ports import free_port

Direction = Literal["to_server", "to_client"]
DIRECTIONS: tuple[Direction, Direction] = ("to_server", "to_client")

CHUNK_BYTES = 64 * 1024
# Per connection and direction: what a stalled or slow link holds before the sender is pushed back.
CHUNKS_HELD_MAX = 64
NEEDLE_BYTES_MAX = 1024


class Cut:
    """One connection that will be cut after a request went out; see `TcpProxy.cut_after`."""

    def __init__(self, needle: bytes) -> None:
        self.needle = needle
        self.happened = asyncio.Event()


class TcpProxy:
    """Carries connections from a loopback port of its own to one server, until told to do it badly.

    Attributes:
        host, port: where it listens after `start`.
        accepted: connections taken so far.
        target_url: the server's own, past the proxy.
    """

    def __init__(self, url: str, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        """Stand in front of the server that `url` names, with host and port; on a free port unless told which."""
        self.target_url = url
        self._target = ("", 0)
        self.lead_to(url)
        self.host = host
        self.port = port or free_port()
        self.accepted = 0
        self.delay_s: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        self._open = {direction: asyncio.Event() for direction in DIRECTIONS}
        for gate in self._open.values():
            gate.set()
        self._cuts: list[Cut] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: set[_Link] = set()
        self._cuts_made = 0

    @property
    def url(self) -> str:
        """The server's URL with the proxy's host and port in it."""
        parts = urlsplit(self.target_url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}{self.host}:{self.port}"))

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._links)

    def lead_to(self, url: str) -> None:
        """Carry new connections to another server, as after a fail-over; open ones stay with the old one."""
        parts = urlsplit(url)
        if not (parts.hostname and parts.port):
            raise ValueError("a proxy needs a URL with host and port")
        self._target = (parts.hostname, parts.port)

    async def start(self) -> str:
        """Listen; return the URL that leads through the proxy."""
        await self._listen()
        return self.url

    async def stop(self) -> None:
        """Close the port, and cut what is open."""
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self, *directions: Direction) -> None:
        """Hold back all bytes in these directions (default: both): a link that is dead without a word.

        Connections stay open and new ones are accepted. What is held back arrives after `heal`.
        """
        for direction in directions or DIRECTIONS:
            self._open[direction].clear()

    def delay(self, seconds: float, *directions: Direction) -> None:
        """Let bytes that enter from now on arrive this much later in these directions (default: both), at full rate."""
        for direction in directions or DIRECTIONS:
            self.delay_s[direction] = seconds

    def cut(self) -> None:
        """Reset every open connection, at both ends, and those that are being opened; new ones are served."""
        self._cuts_made += 1
        for link in self._links:
            link.cut()

    def cut_after(self, needle: bytes) -> Cut:
        """Lose the answer to the next request that contains `needle`.

        The request is forwarded; when the server answers on that connection, which shows that it has acted, the answer
        is dropped and both ends are reset. Then it passes everything again. With several requests on their way in one
        connection, the answer that counts may be one to an earlier request.

        Returns:
            A cut whose `happened` is set once both ends were reset.
        """
        if len(needle) > NEEDLE_BYTES_MAX:
            raise ValueError(f"a needle has at most {NEEDLE_BYTES_MAX} bytes")
        cut = Cut(needle)
        self._cuts.append(cut)
        return cut

    def refuse(self) -> None:
        """Stop listening: new connections are refused by the operating system; open ones go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def heal(self) -> None:
        """Carry everything again, at once: no stall, delay or refusal; cuts that did not happen yet are forgotten."""
        self.delay(0.0)
        self._cuts.clear()
        for gate in self._open.values():
            gate.set()
        if self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        before = self._cuts_made
        try:
            if self._server is None:  # it was accepted just before
                return
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            if self._cuts_made != before:
                _reset(server_writer)
                return
            link = _Link(self, task, writer, server_writer)
            self._links.add(link)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(link.carry("to_server", reader, server_writer))
                    group.create_task(link.carry("to_client", server_reader, writer))
            finally:
                self._links.discard(link)
                _reset(server_writer)
        except* OSError:
            pass  # One end refused or was reset; the other one is told below.
        except* asyncio.CancelledError:
            pass  # Only `cut` and `stop` do it. Python 3.11 would report a cancelled connection as an error.
        finally:
            self._tasks.discard(task)
            _reset(writer)

    def _take_cut(self, before: bytes, chunk: bytes) -> Cut | None:
        """Find a cut whose needle ends in `chunk`; it may begin in what went before."""
        for cut in self._cuts:
            if cut.needle in before[max(0, len(before) - len(cut.needle) + 1) :] + chunk:
                self._cuts.remove(cut)
                return cut
        return None


class _Link:
    """One connection through the proxy."""

    def __init__(
        self, proxy: TcpProxy, task: asyncio.Task[None], client: asyncio.StreamWriter, server: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._task = task
        self._ends = (client, server)
        self._cut: Cut | None = None

    def cut(self) -> None:
        """Reset both ends, and end the task even while it holds bytes back."""
        for end in self._ends:
            _reset(end)
        self._task.cancel()

    async def carry(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction to its end. Reading and writing are two tasks, so that a delay costs no rate."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_HELD_MAX)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(direction, reader, held))
            group.create_task(self._write(direction, held, writer))

    async def _read(
        self, direction: Direction, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        chunk = b"?"
        while chunk:
            chunk = await reader.read(CHUNK_BYTES)
            await held.put((time.monotonic() + self._proxy.delay_s[direction], chunk))

    async def _write(
        self, direction: Direction, held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        before = b""
        while True:
            due, chunk = await held.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._proxy._open[direction].wait()
            if not chunk:
                # The end comes as late as the bytes before it.
                writer.write_eof()
                return
            if direction == "to_client" and self._cut:
                self.cut()
                self._cut.happened.set()
                return
            if direction == "to_server" and self._cut is None:
                self._cut = self._proxy._take_cut(before, chunk)
                before = (before + chunk)[-NEEDLE_BYTES_MAX:]
            writer.write(chunk)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, not FIN: the peer sees a broken connection, not an orderly end."""
    if not writer.transport.is_closing():
        end: socket.socket = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
