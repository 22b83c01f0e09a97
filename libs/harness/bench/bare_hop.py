"""The second peer: the least that durable work from one process to another can cost.

    python -m harness.bench.bare_hop near PLAN RESULT
    python -m harness.bench.bare_hop far

The near process inserts a row and appends to a stream; the far one, blocked on that stream, updates the row and appends
to another; the near one, blocked on that, goes on. Each write to Postgres is a commit. No HTTP, no WebSocket, no
machine, no second attempt, no batches: one job at a time. Both take `DATABASE_URL` and `REDIS_URL`.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psycopg
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from harness.bench.load import Measured

TABLE = "create table if not exists bench_hop (id text primary key, body text not null, state text, outcome text)"
INSERT = "insert into bench_hop (id, body, state) values (%s, %s, 'queued')"
FINISH = "update bench_hop set state = 'completed', outcome = %s where id = %s and state = 'queued'"
OUT, BACK = "bench:hop:out", "bench:hop:back"
ENTRIES_MAX = 1000
FAR_READY = "far ready"
BODY = '{"name":"echo","args":{"value":"hello"}}'


class Plan(msgspec.Struct, frozen=True):
    """How many jobs at most, one after the other; for how long; and by when the last one must be answered."""

    jobs: int
    seconds: float
    within_s: float


Connections = tuple["psycopg.AsyncConnection[Any]", "redis.asyncio.Redis"]


@contextlib.asynccontextmanager
async def _open() -> AsyncIterator[Connections]:
    client = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], socket_timeout=None, retry=Retry(NoBackoff(), 0))
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as connection, client:
        yield connection, client


async def _read(client: "redis.asyncio.Redis", stream: str, after: str) -> tuple[str, bytes]:
    """Wait for the next entry of a stream; returns its id and its job."""
    answer: Any = await client.xread({stream: after}, count=1, block=0)
    ((_, entries),) = answer.items() if isinstance(answer, dict) else answer
    entry_id, fields = (entries[0] if isinstance(entries[0], list) else entries)[0]
    return entry_id.decode(), fields[b"job"]


async def _newest(client: "redis.asyncio.Redis", stream: str) -> str:
    entries: Any = await client.xrevrange(stream, count=1)
    return entries[0][0].decode() if entries else "0"


async def run_far() -> None:
    """Finish jobs until killed."""
    async with _open() as (connection, client):
        last = await _newest(client, OUT)
        print(FAR_READY, flush=True)
        while True:
            last, job = await _read(client, OUT, last)
            await connection.execute(FINISH, ['{"result":"hello"}', job.decode()])
            await client.xadd(BACK, {"job": job}, maxlen=ENTRIES_MAX)


async def run_near(plan: Plan) -> Measured:
    """Send jobs, one at a time. Raises: TimeoutError."""
    async with _open() as (connection, client), asyncio.timeout(plan.within_s):
        await connection.execute(TABLE)
        last = await _newest(client, BACK)
        latencies_ms = []
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(plan.jobs):
            asked_at = time.perf_counter()
            if asked_at >= began + plan.seconds:
                break
            job = str(uuid4())
            await connection.execute(INSERT, [job, BODY])
            await client.xadd(OUT, {"job": job}, maxlen=ENTRIES_MAX)
            last, answered = await _read(client, BACK, last)
            latencies_ms.append((time.perf_counter() - asked_at) * 1000)
            if answered.decode() != job:
                raise RuntimeError(f"the answer to {job} names {answered!r}")
        return Measured(time.perf_counter() - began, time.process_time() - cpu, latencies_ms)


def main(role: str, plan_path: str = "", result_path: str = "") -> None:
    """Play one of the two."""
    if role == "far":
        asyncio.run(run_far())
    else:
        plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
        Path(result_path).write_bytes(msgspec.json.encode(asyncio.run(run_near(plan))))


if __name__ == "__main__":
    main(*sys.argv[1:])
