"""The load generator: a closed loop over keep-alive HTTP/1.1 connections, in a process of its own.

    python -m harness.bench.load PLAN RESULT

Reads a `Plan` (JSON) and writes a `Measured` (JSON). Ends with 1, and one line that says why, at the first answer that
is not the expected one, when a server hangs up, or when the time is over. It parses only what it needs, so that it
takes as little as possible of the cores that it shares with what it measures.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Plan(msgspec.Struct, frozen=True):
    """What to ask, of whom, how often.

    Attributes:
        ports: on the loopback address; the connections are spread over them.
        method, headers, body: of every request; `headers` are whole lines without their ends.
        paths: taken in turn.
        key_prefix: each request's `Idempotency-Key` is this and its number; empty: no key.
        in_flight: connections, each with one request at a time.
        requests: how many in all, at most.
        seconds: after this no further request leaves, so that a slow machine makes fewer and not a longer bench.
        within_s: by when the last one must be answered.
        expects: what the body of each answer must contain; its status must be 200.
    """

    ports: Sequence[int]
    method: str
    paths: Sequence[str]
    headers: Sequence[str]
    body: str
    key_prefix: str
    in_flight: int
    requests: int
    seconds: float
    within_s: float
    expects: str


class Measured(msgspec.Struct, frozen=True):
    """What came of it. `cpu_s`: of this process, from the first request to the last answer."""

    wall_s: float
    cpu_s: float
    latencies_ms: Sequence[float]


class Failed(Exception):
    """The load could not be carried through."""


class Load:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        """Prepare everything that need not be done while it is measured."""
        headers = "".join(f"{line}\r\n" for line in (*plan.headers, f"Content-Length: {len(plan.body.encode())}"))
        heads = [f"{plan.method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}".encode() for path in plan.paths]
        self.expects = plan.expects.encode()
        self.latencies_ms: list[float] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._plan = plan
        self._heads = itertools.cycle(heads)
        self._key = f"Idempotency-Key: {plan.key_prefix}".encode() if plan.key_prefix else b""
        self._body = plan.body.encode()
        self._sent = 0
        self._asking = plan.in_flight
        self._ends_at = 0.0

    async def run(self) -> Measured:
        """Ask until all is answered. Raises: Failed, TimeoutError, OSError."""
        loop = asyncio.get_running_loop()
        callers = []
        for port, _ in zip(itertools.cycle(self._plan.ports), range(self._plan.in_flight), strict=False):
            _, caller = await loop.create_connection(lambda: Caller(self), "127.0.0.1", port)
            callers.append(caller)
        cpu, began = time.process_time(), time.perf_counter()
        self._ends_at = began + self._plan.seconds
        for caller in callers:
            caller.ask()
        async with asyncio.timeout(self._plan.within_s):
            await self.over
        measured = Measured(time.perf_counter() - began, time.process_time() - cpu, self.latencies_ms)
        for caller in callers:
            caller.hang_up()
        return measured

    def next_request(self) -> bytes | None:
        """The next one to send; None when a caller is to ask no more."""
        if self._sent == self._plan.requests or time.perf_counter() >= self._ends_at:
            self._asking -= 1
            if not self._asking and not self.over.done():
                self.over.set_result(None)
            return None
        self._sent += 1
        key = b"%s%d\r\n" % (self._key, self._sent) if self._key else b""
        return b"%s%s\r\n%s" % (next(self._heads), key, self._body)

    def answered(self, latency_s: float) -> None:
        """One right answer more."""
        self.latencies_ms.append(latency_s * 1000)

    def fail(self, why: str) -> None:
        """End the run; the first reason counts."""
        if not self.over.done():
            self.over.set_exception(Failed(why))


class Caller(asyncio.Protocol):
    """One connection: asks, reads the whole answer, asks again."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._asked_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Before the end nobody may hang up."""
        self._load.fail(f"the server closed a connection ({exc})")

    def hang_up(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.close()

    def ask(self) -> None:
        """Send the next request, if there is one."""
        request = self._load.next_request()
        if request is not None:
            assert self._transport is not None
            self._asked_at = time.perf_counter()
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Read on; with the last byte of an answer the next request leaves."""
        self._received = received = self._received + data
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        body_at = head_end + 4
        if len(received) < body_at + _content_length(received[:head_end]):
            return
        if not received.startswith(b"HTTP/1.1 200") or self._load.expects not in received[body_at:]:
            self._load.fail(f"an unexpected answer: {received[:2000].decode(errors='replace')}")
            return
        self._received = b""
        self._load.answered(time.perf_counter() - self._asked_at)
        self.ask()


def _content_length(head: bytes) -> int:
    """Raises: ValueError, for a head without a length (this is a load generator, not a client for everyone)."""
    _, _, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0])


async def _run(plan: Plan) -> Measured:
    return await Load(plan).run()


def main(plan_path: str, result_path: str) -> int:
    """Run the plan of one file, and write what came of it to another."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    try:
        measured = asyncio.run(_run(plan))
    except (Failed, OSError, TimeoutError) as error:
        print(f"load: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    Path(result_path).write_bytes(msgspec.json.encode(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
