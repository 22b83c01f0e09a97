"""Many SSE clients in one process that does little but read, so that the clients are not what limits a server.

Promises: each client's deliveries are counted one by one; a client that is refused, closed or told an event twice ends
the run, with the reason.
"""

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.bench.payload import MARK, read_stamps

# Connections that are being opened at a time: fewer than any listener's backlog.
WAVE = 100
# Of every so-manieth client the waits are read as well; of the others deliveries are only counted. Not of the first
# ones alone: a server that goes through its clients in the order of their coming tells those first.
OBSERVE_EVERY = 50
RECEIVE_BYTES = 1 << 18


class Failed(Exception):
    """A client was not served as it should be."""


@dataclass(slots=True)
class Client:
    """One connection. `head`: what came of the response's head; `counted`: deliveries so far."""

    socket: socket.socket
    is_observer: bool
    head: bytes = b""
    is_streaming: bool = False
    counted: int = 0
    rest: bytes = b""


@dataclass(slots=True)
class Crowd:
    """Clients of one stream.

    Attributes:
        request: the whole HTTP request that each of them sends.
        waits_ms: from an event's sending to an observer's reading it.
        connect_ms: from dialling until the head of the response was there.
        delivered: events that they have been told, all together.
    """

    port: int
    request: bytes
    clients: list[Client] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    connect_ms: list[float] = field(default_factory=list)
    delivered: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _buffer: bytearray = field(default_factory=lambda: bytearray(RECEIVE_BYTES))

    def connect(self, count: int, *, deadline: float) -> None:
        """Open `count` streams more. Raises: Failed, OSError."""
        for left in range(count, 0, -WAVE):
            began = time.perf_counter()
            waiting = [self._dial() for _ in range(min(left, WAVE))]
            while waiting := [client for client in waiting if not client.is_streaming]:
                before = len(waiting)
                self.read(deadline=deadline)
                done = before - sum(not client.is_streaming for client in waiting)
                self.connect_ms += [(time.perf_counter() - began) * 1000] * done

    def deliver(self, each: int, *, deadline: float) -> None:
        """Read until every client has been told `each` events. Raises: Failed."""
        while self.delivered < each * len(self.clients):
            self.read(deadline=deadline)
        if doubled := sum(client.counted > each for client in self.clients):
            raise Failed(f"{doubled} of {len(self.clients)} clients were told more than the {each} events there were")

    def read(self, *, deadline: float) -> None:
        """Wait until something comes, and read what is there, each client once. Raises: Failed."""
        ready = self._selector.select(timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            counts = [client.counted for client in self.clients]
            raise Failed(f"{len(counts)} clients, of whom the last has {min(counts)} events: not in time")
        for key, _ in ready:
            self._read(key.data)

    def drain(self, for_s: float) -> None:
        """Read whatever comes during this time. Raises: Failed."""
        over_at = time.monotonic() + for_s
        while (left := over_at - time.monotonic()) > 0:
            for key, _ in self._selector.select(timeout=left):
                self._read(key.data)

    def close(self) -> None:
        """Hang up, all of them."""
        for client in self.clients:
            client.socket.close()
        self._selector.close()

    def _dial(self) -> Client:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(self.request)
        connection.setblocking(False)
        client = Client(connection, is_observer=len(self.clients) % OBSERVE_EVERY == 0)
        self.clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        return client

    def _read(self, client: Client) -> None:
        length = client.socket.recv_into(self._buffer)
        if not length:
            raise Failed(f"the server closed a stream after {client.counted} events; {client.head[:1000]!r}")
        if client.is_streaming:
            self._count(client, length)
        else:
            self._read_head(client, bytes(self._buffer[:length]))

    def _count(self, client: Client, length: int) -> None:
        found = self._buffer.count(MARK, 0, length)
        client.counted += found
        self.delivered += found
        if client.is_observer:
            received_at_us = time.time_ns() // 1000
            sent_us, client.rest = read_stamps(client.rest + self._buffer[:length])
            self.waits_ms += [(received_at_us - each) / 1000 for each in sent_us]

    def _read_head(self, client: Client, received: bytes) -> None:
        client.head, found, body = (client.head + received).partition(b"\r\n\r\n")
        if not found:
            return
        if not client.head.startswith(b"HTTP/1.1 200"):
            raise Failed(
                f"an unexpected answer: {client.head.decode(errors='replace')} {body.decode(errors='replace')}"
            )
        client.is_streaming = True
        client.counted = body.count(MARK)
        self.delivered += client.counted


@contextlib.contextmanager
def open_crowd(port: int, path: str, headers: dict[str, str]) -> Iterator[Crowd]:
    """A crowd without clients yet; they are hung up on at the end."""
    raise_file_limit()
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Accept": "text/event-stream", **headers}.items())
    crowd = Crowd(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
    try:
        yield crowd
    finally:
        crowd.close()


def raise_file_limit() -> None:
    """Let this process, and those that it starts, have as many files open as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
