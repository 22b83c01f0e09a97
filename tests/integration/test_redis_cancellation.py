"""A loop that uses Redis ends when it is cancelled, at whatever point that happens."""

import asyncio
import random

from common.store.redis import open_redis

STEPS_MAX = 60


async def test_a_cancellation_is_never_lost_inside_a_command(redis_url: str) -> None:
    """On Python 3.11 redis-py loses some when it has a socket timeout: it sends through `asyncio.wait_for`. A process
    that ends its loops by cancelling them would hang then.
    """

    async def ask_for_ever() -> None:
        while True:
            await redis.send_many([("PING",)])

    async with open_redis(redis_url) as redis:
        for _ in range(300):
            task = asyncio.create_task(ask_for_ever())
            for _ in range(random.randrange(STEPS_MAX)):
                await asyncio.sleep(0)  # one step of the loop: all points of a command are met in the end
            task.cancel()
            await asyncio.wait({task}, timeout=2.0)
            assert task.cancelled()
