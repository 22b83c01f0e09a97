"""The publisher of the fan-out rows: puts events where a system takes them from, one by one or all at once.

    python -m harness.bench.publish PLAN

Says `READY` on standard output when everything is prepared. Each line on standard input then is for one event or, if
they are to go at once, for all. An event's data says when it left.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import redis

from harness.bench.payload import EVENT_TYPE, STREAM_HEAD, chunk, event_data, event_frame

READY = "publisher ready"
LISTENING = "publisher listens"
# Nobody comes any more: whoever started this has been killed.
READER_WITHIN_S = 60.0


class ToStream(msgspec.Struct, frozen=True, tag=True):
    """XADD to a Redis stream; `REDIS_URL` says where."""

    stream: str


class ToReader(msgspec.Struct, frozen=True, tag=True):
    """Be an upstream, listen, and send to the one who comes to read; `LISTENING` in the log says when they may."""

    port: int


class ToHttp(msgspec.Struct, frozen=True, tag=True):
    """POST to a path on the loopback address, over one connection.

    Attributes:
        takes_many: whether events of one moment go into one body, a line each, or each into a request of its own.
    """

    port: int
    path: str
    takes_many: bool = False


class Plan(msgspec.Struct, frozen=True):
    """What to publish, and whether one by one."""

    target: ToStream | ToReader | ToHttp
    events: int
    one_by_one: bool


class Publisher(Protocol):
    """Somewhere to put events."""

    def publish(self, numbers: Sequence[int]) -> None:
        """Put some at once, and return when they are there."""


class StreamPublisher:
    """One pipeline of XADD."""

    def __init__(self, target: ToStream) -> None:
        self._stream = target.stream
        self._client = redis.Redis.from_url(os.environ["REDIS_URL"])
        self._client.ping()

    def publish(self, numbers: Sequence[int]) -> None:
        """See `Publisher`."""
        pipeline = self._client.pipeline(transaction=False)
        for number in numbers:
            pipeline.xadd(self._stream, {"type": EVENT_TYPE, "uid": str(number), "data": event_data(number, _now_us())})
        pipeline.execute()


class ReaderPublisher:
    """An upstream with one reader: each event a chunk of its own, those of one moment in one write."""

    def __init__(self, target: ToReader) -> None:
        with socket.create_server(("127.0.0.1", target.port)) as listener:
            listener.settimeout(READER_WITHIN_S)
            print(LISTENING, file=sys.stderr, flush=True)
            self._reader, _ = listener.accept()
        self._reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = b""
        while b"\r\n\r\n" not in request:
            request += self._reader.recv(65536)
        self._reader.sendall(STREAM_HEAD)

    def publish(self, numbers: Sequence[int]) -> None:
        """See `Publisher`."""
        now_us = _now_us()
        self._reader.sendall(b"".join(chunk(event_frame(number, now_us)) for number in numbers))


class HttpPublisher:
    """Requests of one moment are sent one after the other, without waiting for answers in between."""

    def __init__(self, target: ToHttp) -> None:
        self._head = f"POST {target.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._takes_many = target.takes_many
        self._connection = socket.create_connection(("127.0.0.1", target.port))
        self._answers = self._connection.makefile("rb")

    def publish(self, numbers: Sequence[int]) -> None:
        """See `Publisher`. Raises: RuntimeError, when one is refused."""
        bodies = [event_data(number, _now_us()) for number in numbers]
        if self._takes_many:
            bodies = ["\n".join(bodies)]
        self._connection.sendall("".join(map(self._request, bodies)).encode())
        for _ in bodies:
            self._read_answer()

    def _request(self, body: str) -> str:
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n{body}"

    def _read_answer(self) -> None:
        status, length = self._answers.readline(), 0
        while (line := self._answers.readline().lower().strip()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        body = self._answers.read(length)
        if not status.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"an event was refused: {status!r} {body!r}")


def open_publisher(target: ToStream | ToReader | ToHttp) -> Publisher:
    """Connect to where events are to go."""
    match target:
        case ToStream():
            return StreamPublisher(target)
        case ToReader():
            return ReaderPublisher(target)
        case ToHttp():
            return HttpPublisher(target)


def _now_us() -> int:
    return time.time_ns() // 1000


def main(plan_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    publisher = open_publisher(plan.target)
    print(READY, flush=True)
    at_a_time = 1 if plan.one_by_one else plan.events
    for first in range(0, plan.events, at_a_time):
        if not sys.stdin.readline():
            return  # whoever asked is gone
        publisher.publish(range(first, first + at_a_time))


if __name__ == "__main__":
    main(*sys.argv[1:])
