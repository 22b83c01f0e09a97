"""A small HTTP server on a loopback port: what stand-ins for the servers of others are made of.

It is ours because a stand-in has to do what no web framework offers: never answer, or reset a connection in the middle
of a chunk. One request per connection.

Owns:     the listening socket and everything that it accepted; both end with the context.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, unquote

import msgspec

HEAD_BYTES_MAX = 64 * 1024
# Whoever does not read for so long sees a cut a little earlier in the answer.
FLUSH_WITHIN_S = 1.0
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


class Call(NamedTuple):
    """One HTTP request. `path`: its parts, decoded; `headers`: by name in lower case."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: dict[str, str]
    body: bytes


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One whole HTTP response."""

    status: int
    headers: Mapping[str, str] = {}
    body: str = ""


class Connection:
    """The connection of one request.

    Attributes:
        writer: takes bytes as they are, for answers that are not whole.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader

    async def answer(self, answer: Answer) -> None:
        """Write a whole response."""
        body = answer.body.encode()
        headers = {"Connection": "close", **answer.headers}
        if answer.status != HTTPStatus.NO_CONTENT:
            headers["Content-Length"] = str(len(body))
        phrase = HTTPStatus(answer.status).phrase
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(f"HTTP/1.1 {answer.status} {phrase}\r\n{head}\r\n".encode() + body)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        """Write one chunk of a response that has begun with `SSE_HEAD`."""
        self.writer.write(chunk(data))
        await self.writer.drain()

    async def cut(self, data: bytes) -> None:
        """Write half of these bytes, and reset the connection once they have left this process."""
        # A reset throws away what has not left yet.
        self.writer.transport.set_write_buffer_limits(high=0)
        self.writer.write(data[: len(data) // 2])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_WITHIN_S):
                await self.writer.drain()
        self.writer.transport.abort()

    async def while_open(self, work: Coroutine[Any, Any, None] | None = None) -> bool:
        """Do the work (None: nothing, without end) until it is done or the other side has gone.

        Returns:
            Whether it was done.
        """
        # The other side may go at any time, and nothing need be on its way to notice it.
        gone = asyncio.create_task(self._reader.read(1), name="gone")
        tasks: set[asyncio.Task[Any]] = {gone}
        if work is not None:
            tasks.add(asyncio.create_task(work, name="work"))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return any(task.done() and task.exception() is None for task in tasks if task is not gone)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class LoopbackServer:
    """A server on a loopback port, as an async context manager; a stand-in says in `serve` what it answers.

    Attributes:
        host, port: where it listens. Set another host before the context begins where others are to reach it, as in
            a container.
    """

    def __init__(self, port: int = 0) -> None:
        """Describe it; port 0 takes any free one."""
        self.host = "127.0.0.1"
        self.port = port
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen. Raises: OSError: the port is taken."""
        self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=HEAD_BYTES_MAX)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the port and every connection."""
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def serve(self, call: Call, connection: Connection) -> None:
        """Answer one request; the connection is closed behind it."""
        raise NotImplementedError

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self.serve(await _read(reader), Connection(reader, writer))
        except asyncio.CancelledError:
            pass  # Only `__aexit__` does it. Python 3.11 would report a cancelled connection as an error.
        finally:
            self._connections.discard(task)
            writer.close()


def chunk(data: bytes) -> bytes:
    """Encode one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _read(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    path, _, query = target.partition("?")
    return Call(method, tuple(unquote(part) for part in path.split("/")[1:]), dict(parse_qsl(query)), headers, body)
