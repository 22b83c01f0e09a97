"""One user's full queue does not keep another user waiting: the same gateway, worker, Redis and Postgres serve both.

The goal is 50 ms more at the 95th percentile. Here the machine may be busy with other things, so that the best of a few
rounds counts and the bound is a wide one; were one user served behind the other, it would be seconds.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest
import redis.asyncio
import sidecar_tools
from support import eventually

from common.ids import UserId, new_id
from common.store import keys
from harness.servers import Servers
from harness.sidecars import Sidecar
from harness.stack import Stack

ROUNDS_MAX = 3
GOAL_MS = 50.0
ADDED_MS_MAX = 200.0
# What a job of the busy user takes: the whole queue takes five seconds and more.
BUSY_SECONDS = 0.01
TIMED_JOBS = 60
BUSY, OTHER = UserId("busy"), UserId("other")


@dataclass
class World:
    """Two users' machines on one stack."""

    stack: Stack
    client: redis.asyncio.Redis
    http: httpx.AsyncClient
    env: dict[str, str]

    async def machine(self, user: UserId) -> Sidecar:
        return await self.stack.add_sidecar(user, tools=[sidecar_tools.__file__], env=self.env)

    async def submit(self, user: UserId, *, seconds: float = 0, wait_s: int = 0) -> httpx.Response:
        return await self.http.post(
            f"/v1/users/{user}/jobs",
            json={"name": "look", "args": {"seconds": seconds}, "if_offline": "queue"},
            headers={"idempotency-key": new_id(), "prefer": f"wait={wait_s}"},
        )

    async def timed_ms(self) -> float:
        """How long one job of the other user takes, from the caller's side."""
        began = time.perf_counter()
        answer = await self.submit(OTHER, wait_s=20)
        assert answer.status_code == 200
        return (time.perf_counter() - began) * 1000

    async def left(self) -> int:
        return int(await self.client.xlen(keys.jobs(BUSY)))

    async def fill(self) -> None:
        """Fill the busy user's queue, until the door says so."""
        answers = [202]
        while 429 not in answers:
            answers = [
                a.status_code
                for a in await asyncio.gather(*(self.submit(BUSY, seconds=BUSY_SECONDS) for _ in range(50)))
            ]
            assert set(answers) <= {202, 429}
        assert await self.left() >= keys.QUEUE_ENTRIES_MAX


@pytest.fixture
async def world(servers: Servers, state_directory: Path, postgres_url: str) -> AsyncIterator[World]:
    redis_url = urlunsplit(urlsplit(servers.redis_url)._replace(path="/13"))
    directory = state_directory / "fairness"
    directory.mkdir()
    async with (
        redis.asyncio.Redis.from_url(redis_url) as client,
        Stack(directory / "stack", postgres_url=postgres_url, redis_url=redis_url) as stack,
    ):
        await client.flushdb()
        gateway, _ = await asyncio.gather(stack.add_gateway(), stack.add_worker())
        headers = {"authorization": f"Bearer {stack.api_key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as http:
            yield World(stack, client, http, {"EXECUTIONS": str(directory / "executions")})


def p95(times_ms: list[float]) -> float:
    return statistics.quantiles(times_ms, n=20)[-1]


async def test_a_full_queue_of_one_user_adds_little_to_anothers_jobs(world: World) -> None:
    await world.machine(OTHER)
    added_ms = []
    for _ in range(ROUNDS_MAX):
        await world.fill()
        alone = [await world.timed_ms() for _ in range(TIMED_JOBS)]
        assert await world.left() >= keys.QUEUE_ENTRIES_MAX
        machine = await world.machine(BUSY)

        async def is_under_way() -> bool:
            return await world.left() < keys.QUEUE_ENTRIES_MAX

        await eventually(is_under_way)
        beside = [await world.timed_ms() for _ in range(TIMED_JOBS)]
        left = await world.left()
        assert left > 0
        await machine.stop()
        added_ms.append(p95(beside) - p95(alone))
        print(
            f"p95 alone {p95(alone):.1f} ms, beside a full queue {p95(beside):.1f} ms: {added_ms[-1]:+.1f} ms"
            f" ({left} of the queue left)"
        )
        if added_ms[-1] <= GOAL_MS:
            break
    assert min(added_ms) <= ADDED_MS_MAX
