"""A watcher of a stream out, as light as five hundred of them in one process must be: one socket, one parser.

Owns:     the socket, and everything that came over it.
Promises: it behaves as EventSource does: a stream that broke off is asked for again, after the pause that the gateway
          named, with the id of the last event, here at the next gateway; it stops at the stream's end (a run has one, a
          thread has not), told by `towline.end` or by 204. Nothing it saw is left out or put in order.
Used by:  the streams and threads of a drill, and the soak.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from harness.drills.sequences import Seen
from harness.drills.target import Gateway
from towline.wire import events, sse

S = TypeVar("S")

# What EventSource waits by itself, in most browsers; the gateway's own word counts once it was heard.
RETRY_S = 1.0
CONNECTS_WITHIN_S = 20.0
# The gateway shows a sign of life more often than this, or the stream is as good as broken.
SILENT_FOR_S = 60.0


class _Body(msgspec.Struct):
    """Data of an event as gateways send it."""

    source: str
    data: str


class _Own(msgspec.Struct):
    """Data of what the product says itself, as far as it matters here."""

    source: str = ""
    state: str = ""


class _Upstream(msgspec.Struct):
    """Data of an event as the stand-in agent says it."""

    n: int
    stream: str


_body = msgspec.json.Decoder(_Body)
_own = msgspec.json.Decoder(_Own)
_upstream = msgspec.json.Decoder(_Upstream)


class StreamRefused(Exception):
    """The gateway answered with something that is no stream; `str()` is the status."""


class StreamWatcher(Generic[S]):
    """See the module; `note` says what is kept of an event or frame.

    Attributes:
        name: for people.
        seen: everything, in order.
        opened: how many streams it was given.
        broken: how many of them broke off before the end.
        refused: statuses of answers that were no stream, as often as they came.
        ended: the stream has ended, and it was told so.
        last_id: of the last event.
    """

    def __init__(
        self,
        name: str,
        path: str,
        api_key: str,
        gateways: Sequence[Gateway],
        *,
        first: int = 0,
        receives_bytes: int = 0,
    ) -> None:
        """Describe a watcher.

        Args:
            path: of the stream, below a gateway's root.
            gateways: read at each attempt, so it may change meanwhile.
            first: index of the gateway to begin at.
            receives_bytes: about how much it takes in while it does not read; 0: what the system gives to everyone.
        """
        self.name = name
        self.seen: list[S] = []
        self.opened = 0
        self.broken = 0
        self.refused: list[str] = []
        self.ended = False
        self.last_id = ""
        self._path = path
        self._api_key = api_key
        self._gateways = gateways
        self._turn = first
        self._retry_s = RETRY_S
        self._reads = asyncio.Event()
        self._reads.set()
        self._receives_bytes = receives_bytes

    def note(self, event: sse.Event, now: float) -> S:
        """What is kept of an event or frame; `now`: monotonic seconds."""
        raise NotImplementedError

    async def watch(self) -> None:
        """Watch until the stream has ended."""
        while not self.ended:
            gateway = self._gateways[self._turn % len(self._gateways)]
            try:
                await self._follow(gateway)
            except StreamRefused as refusal:
                self.refused.append(str(refusal))
            except (OSError, EOFError, TimeoutError):
                # Broken off, or never opened; both are taken elsewhere.
                pass
            if not self.ended:
                self._turn += 1
                await asyncio.sleep(self._retry_s)

    def stall(self) -> None:
        """Read nothing more from now on."""
        self._reads.clear()

    def go_on(self) -> None:
        """Read again."""
        self._reads.set()

    async def _follow(self, gateway: Gateway) -> None:
        """One stream, to its end. Raises: StreamRefused; OSError, EOFError, TimeoutError: it broke off."""
        async with asyncio.timeout(CONNECTS_WITHIN_S):
            reader, writer = await self._connect(gateway)
        try:
            async with asyncio.timeout(CONNECTS_WITHIN_S):
                status = await self._ask(reader, writer)
            if status == 204:
                self.ended = True
                return
            if status != 200:
                raise StreamRefused(str(status))
            self.opened += 1
            try:
                await self._read(reader)
            finally:
                self.broken += not self.ended
        finally:
            writer.transport.abort()

    async def _connect(self, gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(gateway.url)
        if not self._receives_bytes:
            return await asyncio.open_connection(url.hostname, url.port)
        # The window is settled when the connection is made.
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receives_bytes)
        narrow.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(narrow, (url.hostname, url.port))
            return await asyncio.open_connection(sock=narrow, limit=self._receives_bytes)
        except BaseException:
            narrow.close()
            raise

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        host, port = writer.get_extra_info("peername")
        lines = [
            f"GET {self._path} HTTP/1.1",
            f"Host: {host}:{port}",
            f"Authorization: Bearer {self._api_key}",
            "Accept: text/event-stream",
        ]
        if self.last_id:
            lines.append(f"Last-Event-ID: {self.last_id}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        parser = sse.Parser(last_event_id=self.last_id)
        while not self.ended:
            await self._reads.wait()
            async with asyncio.timeout(SILENT_FOR_S):
                size = int(await reader.readuntil(b"\r\n"), 16)
                chunk = await reader.readexactly(size + 2)
            if not size:
                raise EOFError("the stream broke off")
            now = time.monotonic()
            for event in parser.feed(chunk[:-2]):
                assert isinstance(event, sse.Event), "the product bounds its events"
                self.seen.append(self.note(event, now))
                self.ended = self.ended or event.type == events.END
            self.last_id = parser.last_event_id
            if parser.retry_ms is not None:
                self._retry_s = parser.retry_ms / 1000


class Watcher(StreamWatcher[Seen]):
    """A watcher of a run."""

    def __init__(
        self,
        name: str,
        run: str,
        api_key: str,
        gateways: Sequence[Gateway],
        *,
        first: int = 0,
        receives_bytes: int = 0,
    ) -> None:
        """As `StreamWatcher`."""
        path = f"/v1/runs/{run}/events"
        super().__init__(name, path, api_key, gateways, first=first, receives_bytes=receives_bytes)
        self._run = run

    def note(self, event: sse.Event, now: float) -> Seen:
        return _seen(self._run, event, now)


def stream_of(run: str, source: str) -> str:
    """Name of the agent's stream behind a source: watchers take what any other says for a stray."""
    return f"{run}.{source}"


def _seen(run: str, event: sse.Event, now: float) -> Seen:
    if event.type in (events.GAP, events.END):
        return Seen(event.type, "", 0, at=now, state=_own.decode(event.data).state)
    body, event_id = _body.decode(event.data), event.id or ""
    if events.is_own(event.type):
        told = _own.decode(body.data)
        return Seen(event.type, body.source or told.source, 0, event_id, now, told.state)
    said = _upstream.decode(body.data)
    is_ours = said.stream == stream_of(run, body.source)
    return Seen(event.type, body.source if is_ours else said.stream, said.n, event_id, now)
