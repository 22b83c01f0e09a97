"""Waiters: what one user's broken keys must not do to all that wait in a process."""

import asyncio
import contextlib

import redis.asyncio
from job_stores import accepted, new_user

from common.ids import GatewayId
from common.store import keys
from common.store.jobs import Jobs
from common.store.redis import Redis
from common.store.replies import Cut, Waiters
from common.store.requests import Requests


async def test_a_user_whose_presence_is_broken_hides_nobody_elses_lapse(
    redis_store: Redis, redis_client: redis.asyncio.Redis, jobs: Jobs, requests: Requests
) -> None:
    """The others are told that their machine went offline; whoever waits for the broken one waits on."""
    timing = keys.Timing(heartbeat_s=0.05)
    waiters = Waiters(redis_store, jobs, requests, gateway=GatewayId("gateway-1"), timing=timing)
    records = [await accepted(requests, new_user()) for _ in range(2)]
    broken, sound = [waiters.add(record.job, record.user, online=True) for record in records]
    await redis_client.set(keys.presence(broken.user), "no hash")
    serving = asyncio.create_task(waiters.run())
    try:
        assert await sound.wait(10) is Cut.OFFLINE
        await asyncio.sleep(4 * timing.heartbeat_s)
        assert not broken.future.done()
        assert not serving.done()
        await redis_client.delete(keys.presence(broken.user))
        assert await broken.wait(10) is Cut.OFFLINE
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
