"""A gateway's event streams, played: a small server that closes, repeats, falls silent and refuses on request.

The real one does none of this on demand.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from towline.wire import events, sse
from towline.wire.runs import End, EventData, Gap

RETRY_MS = 50
KEEPALIVE_S = 30.0
SILENT = object()  # leaves the connection open and says nothing more
CUT = object()  # breaks the connection in the middle of the body

# Bytes are sent, an `asyncio.Event` is waited for.
Step = bytes | asyncio.Event | object


def opened(*steps: Step, keepalive_s: float = KEEPALIVE_S) -> list[Step]:
    """A stream: its head and first frame, then these."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [
        head,
        chunk(events.opening(keepalive_s, RETRY_MS)),
        *(chunk(s) if isinstance(s, bytes) else s for s in steps),
    ]


def event(n: int, *, run: str | None = None, event_type: str = "output", text: str | None = None) -> bytes:
    shown = f'{{"n":{n}}}' if text is None else text
    data = EventData("planner", f"u{n}", 1764000000000 + n, event_type, shown, run or msgspec.UNSET)
    return sse.encode(f"7-{n}", event_type, msgspec.json.encode(data))


def gap(run: str = "r") -> bytes:
    return sse.encode(None, events.GAP, msgspec.json.encode(Gap(run, "7-1", "7-9")))


def end(run: str = "r", state: str = "completed") -> bytes:
    return sse.encode(None, events.END, msgspec.json.encode(End(run, state)))


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def document(value: Any, *, status: int = 200, headers: str = "") -> list[Step]:
    """An answer with a JSON document."""
    body = json.dumps(value)
    head = f"HTTP/1.1 {status} Reason\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return [f"{head}Connection: close\r\n{headers}\r\n{body}".encode()]


def refusal(status: int, slug: str, headers: str = "") -> list[Step]:
    problem = {"type": f"/problems/{slug}", "title": "T", "status": status, "detail": "why"}
    return document(problem, status=status, headers=headers)


NO_CONTENT: list[Step] = [b"HTTP/1.1 204 No Content\r\n\r\n"]


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    at_s: float

    @property
    def last_event_id(self) -> str | None:
        return self.headers.get("last-event-id")


@dataclass
class PlayedGateway:
    """Answers each connection with the next of `answers`, the last one for ever; afterwards it closes."""

    answers: Sequence[Sequence[Step]]
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, *answers: Sequence[Step]) -> AsyncIterator[Self]:
        gateway = cls(answers)
        server = await asyncio.start_server(gateway._serve, "127.0.0.1", 0)
        gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield gateway
        finally:
            server.close()
            for writer in gateway._open:
                writer.transport.abort()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    def send(self, frames: bytes) -> None:
        """Send more to whoever waits at `SILENT`."""
        for writer in self._open:
            writer.write(chunk(frames))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(method, target, headers, body, asyncio.get_running_loop().time())
            self.requests.append(request)
            await self._play(self._answer(request), reader, writer)
        self._open.discard(writer)
        writer.close()

    def _answer(self, request: Request) -> Sequence[Step]:
        """What to answer to the newest request."""
        return self.answers[min(len(self.requests), len(self.answers)) - 1]

    async def _play(self, steps: Sequence[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for step in steps:
            if step is SILENT:
                await reader.read()  # until the client gives it up
                return
            if step is CUT:
                return
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            assert isinstance(step, bytes)
            writer.write(step)
            await writer.drain()
        if isinstance(steps[0], bytes) and b"chunked" in steps[0]:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
