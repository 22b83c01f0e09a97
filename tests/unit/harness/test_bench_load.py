"""The load generator, as a process against a small real server: right answers are counted, wrong ones end the run."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from harness.bench.load import Measured, Plan

GOOD = b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"ok":true}'


class Server:
    """Answers each request with what `answer` makes of its head and body."""

    def __init__(self, answer: Callable[[bytes, int], bytes]) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answer(head, len(self.requests))
                # In two pieces: the generator must wait for the whole answer.
                writer.write(answer[:20])
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(answer[20:])
        writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Callable[[bytes, int], bytes]) -> AsyncIterator[Server]:
    server = Server(answer)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        server.port = listener.sockets[0].getsockname()[1]
        yield server


async def drive(
    directory: Path, server: Server, *, requests: int = 20, seconds: float = 20.0, within_s: float = 20.0
) -> tuple[int, str, Measured | None]:
    plan = Plan(
        ports=[server.port],
        method="POST",
        paths=["/a", "/b"],
        headers=["Content-Type: application/json"],
        body='{"x":1}',
        key_prefix="key-",
        in_flight=3,
        requests=requests,
        seconds=seconds,
        within_s=within_s,
        expects='"ok":true',
    )
    plan_path, result_path = directory / "plan.json", directory / "measured.json"
    plan_path.write_bytes(msgspec.json.encode(plan))
    words = ["-m", "harness.bench.load", str(plan_path), str(result_path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    _, errors = await process.communicate()
    assert process.returncode is not None
    measured = msgspec.json.decode(result_path.read_bytes(), type=Measured) if result_path.exists() else None
    return process.returncode, errors.decode(), measured


async def test_every_request_is_sent_once_over_kept_connections(tmp_path):
    async with serving(lambda _head, _number: GOOD) as server:
        code, _, measured = await drive(tmp_path, server)

    assert code == 0
    assert measured is not None
    assert len(measured.latencies_ms) == 20
    assert all(0 < latency < measured.wall_s * 1000 for latency in measured.latencies_ms)
    assert server.connections == 3
    keys = [line for request in server.requests for line in request.split(b"\r\n") if line.startswith(b"Idempotency-")]
    assert sorted(keys) == sorted(b"Idempotency-Key: key-%d" % number for number in range(1, 21))
    assert sum(request.startswith(b"POST /a ") for request in server.requests) == 10
    assert all(request.endswith(b'\r\n\r\n{"x":1}') for request in server.requests)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b'HTTP/1.1 202 Accepted\r\ncontent-length: 11\r\n\r\n{"ok":true}', "202 Accepted"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"ok":false}', '{"ok":false}'),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "closed a connection"),
    ],
    ids=["another status", "another body", "no length"],
)
async def test_one_wrong_answer_ends_the_run_and_is_shown(tmp_path, bad, why):
    async with serving(lambda _head, number: bad if number == 7 else GOOD) as server:
        code, errors, measured = await drive(tmp_path, server)

    assert (code, measured) == (1, None)
    assert why in errors


async def test_a_server_that_does_not_answer_ends_the_run(tmp_path):
    async with serving(lambda _head, number: b"" if number == 7 else GOOD) as server:
        code, errors, measured = await drive(tmp_path, server, within_s=0.3)

    assert (code, measured) == (1, None)
    assert "TimeoutError" in errors


async def test_when_the_seconds_are_over_no_further_request_leaves_and_all_are_answered(tmp_path):
    async with serving(lambda _head, _number: GOOD) as server:
        code, _, measured = await drive(tmp_path, server, requests=10**9, seconds=0.2)

    assert code == 0
    assert measured is not None
    assert 0 < len(measured.latencies_ms) == len(server.requests)
    assert measured.wall_s >= 0.2
