"""A loop that uses Redis ends when it is cancelled, at whatever point that happens, and takes nothing with it."""

import asyncio
import random

import pytest
import redis.asyncio
from support import eventually

from common.store.redis import open_redis

STEPS_MAX = 60
STUCK_S = 4.0


async def test_a_cancellation_is_never_lost_inside_a_command(redis_url: str) -> None:
    """On Python 3.11 redis-py loses some when it has a socket timeout: it sends through `asyncio.wait_for`. A process
    that ends its loops by cancelling them would hang then.
    """

    async def ask_for_ever() -> None:
        while True:
            await store.send_many([("PING",)])

    async with open_redis(redis_url) as store:
        for _ in range(300):
            task = asyncio.create_task(ask_for_ever())
            for _ in range(random.randrange(STEPS_MAX)):
                await asyncio.sleep(0)  # one step of the loop: all points of a command are met in the end
            task.cancel()
            await asyncio.wait({task}, timeout=2.0)
            assert task.cancelled()


async def test_a_cancelled_call_gives_its_connection_back(
    redis_url: str, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More callers than connections: one is cancelled at each step of waiting for one, having it and returning it.

    Whoever takes a connection next gets the answers that are its own, and in the end both connections can be had.
    """
    monkeypatch.setattr("common.store.redis.CONNECTIONS_MAX", 2)

    async def ask(name: str) -> None:
        for _ in range(2):
            assert await store.send_many([("ECHO", name)]) == [name.encode()]

    async def blocked() -> int:
        mine = redis_client.connection_pool.connection_kwargs["db"]
        clients = await redis_client.client_list()
        return sum(client["cmd"] == "blpop" and int(client["db"]) == mine for client in clients)

    async def both() -> bool:
        return await blocked() == 2

    async with open_redis(redis_url) as store:
        for steps in range(STEPS_MAX):
            for victim in range(5):
                tasks = [asyncio.create_task(ask(f"{steps}-{victim}-{n}")) for n in range(5)]
                for _ in range(steps):
                    await asyncio.sleep(0)
                tasks[victim].cancel()
                done, waiting = await asyncio.wait(tasks, timeout=STUCK_S)
                assert not waiting
                assert [error for task in done if not task.cancelled() and (error := task.exception())] == []
        pops = [asyncio.create_task(store.send_many([("BLPOP", f"list-{n}", STUCK_S)])) for n in range(2)]
        await eventually(both, within_s=STUCK_S / 2)
        for n in range(2):
            await redis_client.rpush(f"list-{n}", "x")
        assert await asyncio.gather(*pops) == [[[f"list-{n}".encode(), b"x"]] for n in range(2)]
