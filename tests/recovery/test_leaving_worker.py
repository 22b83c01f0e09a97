"""A worker is told to leave with jobs in flight at every stage: each caller gets one outcome, nothing runs twice."""

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest
import redis.asyncio
import sidecar_tools
from support import eventually

from common.ids import UserId
from common.store import keys
from harness.balancer import Balancer
from harness.ports import free_port
from harness.stack import Stack
from towline.client import Client
from towline.wire.api import Job

USERS = (UserId("ada"), UserId("ben"))
JOBS_OF_EACH = 10
# A user's jobs run one after the other, so together they take this long, and the signal comes at some point of it.
IN_FLIGHT_S = 2.0
OFFSETS = 8
LEAVES_WITHIN_S = 30.0


@pytest.mark.timeout(240)
async def test_jobs_in_flight_when_their_worker_leaves_end_once(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Sent, running, ended, announced or still in the stream when SIGTERM comes: their machines go on elsewhere."""
    executions = tmp_path / "executions"
    executions.touch()
    env = {"EXECUTIONS": str(executions), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    balancer = Balancer()
    async with (
        Stack(tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url) as stack,
        redis.asyncio.Redis.from_url(redis_url) as store,
    ):
        gateway = await stack.add_gateway()
        leaving, staying = [await stack.add_worker({"TOWLINE_DRAIN_S": "3"}) for _ in range(2)]
        await balancer.start(free_port())
        balancer.backends = [("127.0.0.1", leaving.port)]
        url = f"ws://127.0.0.1:{balancer.port}"
        sidecars = [
            await stack.add_sidecar(user, tools=[sidecar_tools.__file__], bridge_url=url, env=env) for user in USERS
        ]
        expected: Counter[str] = Counter()
        async with Client(gateway.url, stack.api_key) as client:

            async def ask(user: UserId, tool: str, mark: str) -> Job:
                argument = {"click": "button", "look": "at"}[tool]
                expected[f"{tool} {mark}"] = 1
                return await client.submit(
                    user,
                    tool,
                    {argument: mark, "seconds": IN_FLIGHT_S / JOBS_OF_EACH},
                    idempotency_key=mark,
                    wait_s=60,
                )

            for offset in range(OFFSETS):
                asked = [
                    asyncio.create_task(ask(user, ("click", "look")[n % 2], f"{user}-{offset}-{n}"))
                    for user in USERS
                    for n in range(JOBS_OF_EACH)
                ]
                await asyncio.sleep(IN_FLIGHT_S * offset / OFFSETS)
                balancer.backends = [("127.0.0.1", staying.port)]
                leaving.term()
                assert await leaving.wait(within_s=LEAVES_WITHIN_S) == 0
                for job in await asyncio.gather(*asked):
                    assert (job.state, job.attempts) in {("completed", 1), ("completed", 2)}, job
                await leaving.start_ready()
                leaving, staying = staying, leaving

        assert Counter(executions.read_text().splitlines()) == expected
        # Each signal met sockets: every machine went elsewhere each time.
        for sidecar in sidecars:
            assert sidecar.read_log().count('"event":"connected"') == OFFSETS + 1

        async def nothing_is_left() -> bool:
            pending = [(await store.xpending(keys.jobs(user), keys.GROUP))["pending"] for user in USERS]
            entries = [await store.xlen(keys.jobs(user)) for user in USERS]
            indexed = [int(await store.hget(keys.jobs_index(user), "bytes") or 0) for user in USERS]
            assert not any((*pending, *entries, *indexed)), (pending, entries, indexed)
            return True

        # Acknowledgements are gathered up to a heartbeat.
        await eventually(nothing_is_left, within_s=30)
    await balancer.stop()
