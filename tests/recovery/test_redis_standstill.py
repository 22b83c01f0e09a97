"""Redis stands still and goes on, connections and all: what has lapsed in it meanwhile must not read as `offline`.

The door tells `offline` only when Redis has answered this process without a break for two heartbeats. A standstill that
is shorter than a command's timeout breaks no connection, so a slow answer, or a blocking read that comes back late,
must count as a break.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from support import eventually

from common.store.redis import BLOCK_MS, SLOW_ANSWER_S, Redis, open_redis
from harness.faults import TcpProxy

STANDSTILL_S = SLOW_ANSWER_S + 0.5


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(redis_url)
    await proxy.start()
    yield proxy
    await proxy.stop()


async def answering(redis: Redis) -> None:
    """Redis answers, and has done so for longer than the standstill will last."""
    await redis.send_many([("PING",)])
    await eventually(lambda: redis.answering_for_s() > STANDSTILL_S + 0.5)


async def test_a_slow_answer_counts_as_a_break(proxy):
    async with open_redis(proxy.url) as redis:
        await answering(redis)
        proxy.stall("to_client")
        ask = asyncio.create_task(redis.send_many([("PING",)]))
        await asyncio.sleep(STANDSTILL_S)  # this is the standstill, not a wait for something
        await proxy.heal()

        assert await ask == [b"PONG"]
        assert redis.answering_for_s() < STANDSTILL_S


async def test_a_process_that_asks_for_nothing_learns_of_it_from_its_blocking_read(proxy):
    async with open_redis(proxy.url) as redis:
        reader = redis.reader()
        await answering(redis)
        read = asyncio.create_task(reader.read({"nothing-here": "0"}))
        began = time.monotonic()
        await eventually(lambda: time.monotonic() - began > BLOCK_MS / 1000 - 0.5)
        proxy.stall("to_client")
        await asyncio.sleep(0.5 + STANDSTILL_S)
        await proxy.heal()

        assert await read == []
        assert redis.answering_for_s() == 0.0


async def test_a_read_that_comes_back_in_time_breaks_nothing(proxy):
    async with open_redis(proxy.url) as redis:
        reader = redis.reader()
        await answering(redis)
        await redis.send_many([("XADD", "something", "*", "a", "b")])

        assert len(await reader.read({"something": "0"})) == 1
        assert redis.answering_for_s() > STANDSTILL_S
