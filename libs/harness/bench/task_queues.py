"""What the benches of task queues (Celery, taskiq, arq) share: the same closed loop, and the same account.

Each queue's module holds its tasks, its settings and a client. It is run as a driver (`python -m MODULE drive PLAN
RESULT`), its workers by the queue's own command. A task does nothing and gives back its argument. No row of Postgres,
no idempotency, no machine: what is measured is submit, execute, result, through Redis.

Imports nothing of the product, and of others only what every queue's environment has (redis, msgspec).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import redis.asyncio

from harness.bench.load import Measured

VALUE = "hello"
READY = "queue ready"


class Plan(msgspec.Struct, frozen=True):
    """How many jobs at most, how many of them at a time, for how many seconds at most, and by when all are answered."""

    jobs: int
    in_flight: int
    seconds: float
    within_s: float


class WrongAnswer(Exception):
    """A job came back with something else."""


def read_plan(path: str) -> Plan:
    """Read what the driver is to do."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Plan)


def write_measured(path: str, measured: Measured) -> None:
    """Leave what came of it."""
    Path(path).write_bytes(msgspec.json.encode(measured))


async def run_closed_loop(plan: Plan, run_job: Callable[[], Awaitable[object]]) -> Measured:
    """Run `plan.in_flight` callers, each with one job at a time. Raises: TimeoutError, WrongAnswer."""
    latencies_ms: list[float] = []
    left = plan.jobs
    over_at = time.monotonic() + plan.seconds

    async def call() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < over_at:
            left -= 1
            asked_at = time.perf_counter()
            answer = await run_job()
            latencies_ms.append((time.perf_counter() - asked_at) * 1000)
            if answer != VALUE:
                raise WrongAnswer(repr(answer))

    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.timeout(plan.within_s), asyncio.TaskGroup() as group:
        for _ in range(plan.in_flight):
            group.create_task(call())
    return Measured(time.perf_counter() - began, time.process_time() - cpu, latencies_ms)


class Announcements:
    """Who waits for which job: results are announced on a channel, so that nobody asks for them again and again."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def expect(self, job: str) -> asyncio.Future[None]:
        """Call before the job is sent; await the result when it has been."""
        future = self._waiting[job] = asyncio.get_running_loop().create_future()
        return future

    async def _read(self, pubsub: redis.asyncio.client.PubSub) -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                future = self._waiting.pop(message["data"].decode(), None)
                if future is not None:
                    future.set_result(None)


@asynccontextmanager
async def open_announcements(url: str, channel: str) -> AsyncIterator[Announcements]:
    """Listen to a channel of job ids until the block ends."""
    announcements = Announcements()
    async with redis.asyncio.Redis.from_url(url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        reader = asyncio.create_task(announcements._read(pubsub), name=f"announcements:{channel}")
        try:
            yield announcements
        finally:
            reader.cancel()
