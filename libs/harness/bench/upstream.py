"""The driver of relay ingest: an upstream that sends one event per chunk, as fast as it is read.

    python -m harness.bench.upstream PLAN RESULT

Serves one SSE stream, and observes from the first byte of its body until the last event is the newest entry of the
stream in Redis. The connection stays open until then, so that nobody's end is measured. All chunks are made
beforehand, and many are handed to the socket at a time: what a reader gets from it is what its buffer holds, each event
in an HTTP chunk of its own.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from harness.bench.observed import Account, Observed, Watched
from harness.bench.payload import STREAM_HEAD, chunk, event_frame, stamp_of

LISTENING = "upstream listens"
# About as much as a socket buffer takes at once.
CHUNKS_A_WRITE = 250
# Short beside the seconds of a run, and 200 questions a second cost Redis nothing.
LOOK_EVERY_S = 0.005


class Plan(msgspec.Struct, frozen=True):
    """What to send, and where it must arrive.

    Attributes:
        port: where to listen, on the loopback address.
        events: how many.
        stream: the key of the Redis stream that they go into; `REDIS_URL` says where.
        within_s: by when all must be there.
    """

    port: int
    events: int
    stream: str
    watched: Watched
    within_s: float


class Upstream:
    """One stream for one reader."""

    def __init__(self, plan: Plan) -> None:
        """Make everything that need not be made while it is measured."""
        chunks = [chunk(event_frame(number)) for number in range(plan.events)]
        self._writes = [b"".join(chunks[at : at + CHUNKS_A_WRITE]) for at in range(0, len(chunks), CHUNKS_A_WRITE)]
        self._plan = plan
        self._reader_came = asyncio.Event()
        self._all_arrived = asyncio.Event()
        self._account: Account | None = None

    async def run(self) -> Observed:
        """Wait for a reader, feed it, and wait until all is stored. Raises: TimeoutError, OSError."""
        client = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], retry=Retry(NoBackoff(), 0))
        server = await asyncio.start_server(self._serve, "127.0.0.1", self._plan.port)
        print(LISTENING, flush=True)
        async with client, server, asyncio.timeout(self._plan.within_s):
            await self._reader_came.wait()
            last = stamp_of(self._plan.events - 1)
            while not await _is_newest(client, self._plan.stream, last):  # noqa: ASYNC110  # by another process
                await asyncio.sleep(LOOK_EVERY_S)
            assert self._account is not None
            observed = self._account.close(self._plan.events)
            self._all_arrived.set()
        return observed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if self._reader_came.is_set():
                raise RuntimeError("the stream was asked for twice: a reader has lost its place")
            writer.write(STREAM_HEAD)
            self._account = Account(self._plan.watched)
            self._reader_came.set()
            for piece in self._writes:
                writer.write(piece)
                await writer.drain()
            await self._all_arrived.wait()
        writer.close()


async def _is_newest(client: "redis.asyncio.Redis", stream: str, stamp: bytes) -> bool:
    entries: Any = await client.xrevrange(stream, count=1)
    return bool(entries) and any(stamp in value for value in entries[0][1].values())


async def _run(plan: Plan) -> Observed:
    return await Upstream(plan).run()


def main(plan_path: str, result_path: str) -> int:
    """Run the plan of one file, and write what was observed to another."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    try:
        observed = asyncio.run(_run(plan))
    except (OSError, TimeoutError) as error:
        print(f"upstream: {type(error).__name__}: not all events were stored in time {error}", file=sys.stderr)
        return 1
    Path(result_path).write_bytes(msgspec.json.encode(observed))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
