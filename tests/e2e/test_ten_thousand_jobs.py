"""Two rounds of ten thousand jobs over fifty users: each runs once, nothing is left behind, memory does not grow."""

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import psycopg
import pytest
import redis.asyncio as redis
from support import eventually

from common.store import keys
from harness.bench.load import Load, Plan
from harness.stack import Stack
from towline.sidecar import Sidecar, tool

USERS = [f"user-{number}" for number in range(50)]
JOBS = 10_000
IN_FLIGHT = 64


@pytest.mark.timeout(300)
async def test_ten_thousand_jobs_run_once_each_and_leave_nothing(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    executions: Counter[str] = Counter()

    @tool(read_only=True)
    async def look() -> str:
        executions["look"] += 1
        return "seen"

    @tool
    async def act() -> str:
        executions["act"] += 1
        return "done"

    async with Stack(tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url) as stack:
        for _ in range(2):
            await stack.add_gateway()
            await stack.add_worker()
        services = [psutil.Process(service.pid) for service in (*stack.gateways, *stack.workers)]
        sidecars = [
            Sidecar(
                url=stack.bridge_url,
                token=await stack.mint_machine_token(user),
                state_dir=tmp_path / user,
                tools=[look, act],
            )
            for user in USERS
        ]
        async with asyncio.TaskGroup() as group, redis.Redis.from_url(redis_url) as store:
            for sidecar in sidecars:
                group.create_task(sidecar.run())

            async def all_present() -> bool:
                return await store.exists(*map(keys.presence, USERS)) == len(USERS)

            await eventually(all_present, within_s=30)
            rss = []
            for number in (1, 2):
                # One in ten has side effects: a begin mark and two fsyncs each.
                await _load(stack, f"round-{number}-look", "look", JOBS * 9 // 10)
                await _load(stack, f"round-{number}-act", "act", JOBS // 10)
                await eventually(lambda: _is_empty(store), within_s=10)
                rss.append(sum(service.memory_info().rss for service in services))
            for user in USERS:
                (info,) = await store.xinfo_groups(keys.jobs(user))
                assert info["pending"] == 0
                assert info["consumers"] <= 2
            for sidecar in sidecars:
                sidecar.stop()

    assert executions.total() == 2 * JOBS
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        cursor = await connection.execute("select state, count(*), count(distinct key) from requests group by state")
        assert await cursor.fetchall() == [("completed", 2 * JOBS, 2 * JOBS)]
    assert rss[1] <= 1.05 * rss[0]


async def _load(stack: Stack, prefix: str, name: str, jobs: int) -> None:
    plan = Plan(
        ports=[gateway.port for gateway in stack.gateways],
        method="POST",
        paths=[f"/v1/users/{user}/jobs" for user in USERS],
        headers=[f"Authorization: Bearer {stack.api_key}", "Content-Type: application/json", "Prefer: wait=60"],
        body=f'{{"name":"{name}"}}',
        key_prefix=f"{prefix}-",
        in_flight=IN_FLIGHT,
        requests=jobs,
        seconds=120,
        within_s=130,
        expects='"state":"completed"',
    )
    load = Load(plan)
    await load.run()
    assert len(load.latencies_ms) == jobs


async def _is_empty(store: redis.Redis) -> bool:
    lengths = [await store.xlen(keys.jobs(user)) for user in USERS]
    return not any(lengths)
