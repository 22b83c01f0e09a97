"""What Redis has room for: it keeps no outcome of an ended job, and no note that was read."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from job_stores import accepted, finished, new_user

from common.ids import GatewayId, new_id
from common.store import keys
from common.store.control import Inbox, replies_inbox, tell_gateway
from common.store.jobs import Jobs
from common.store.redis import Redis
from common.store.requests import Requests
from towline.wire import json

OUTCOME_BYTES = 1024 * 1024


@pytest.fixture
def gateway() -> GatewayId:
    return GatewayId(f"gateway-{new_id()}")


@pytest.fixture
async def inbox(redis_store: Redis, gateway: GatewayId) -> AsyncIterator[Inbox]:
    """One with 200 notes that were read, and two that were not."""
    inbox = replies_inbox(redis_store, gateway)
    for number in range(200):
        await tell_gateway(redis_store, gateway, {"number": str(number)})
    assert len(await inbox.read()) == 200
    for number in (200, 201):
        await tell_gateway(redis_store, gateway, {"number": str(number)})
    yield inbox
    await inbox.remove()


async def test_an_ended_job_takes_no_room_for_its_outcome(
    jobs: Jobs, requests: Requests, gateway: GatewayId, redis_client: redis.asyncio.Redis
) -> None:
    """Some hundred jobs in five minutes would fill Redis, and then nobody's job ends. That it has ended is known."""
    record = await accepted(requests, new_user())
    await jobs.enqueue(record, "{}", gateway)
    await jobs.settle(await finished(requests, record, json.dumps({"result": "x" * OUTCOME_BYTES}).decode()))
    sizes = [await redis_client.memory_usage(key) for key in await redis_client.keys()]
    assert sum(size for size in sizes if size) < OUTCOME_BYTES / 4
    assert not await jobs.enqueue(record, "{}", gateway)
    assert 0 < await redis_client.ttl(keys.result(record.job)) <= keys.RESULT_TTL_S


async def test_what_was_read_goes_and_what_was_not_stays(
    inbox: Inbox, gateway: GatewayId, redis_client: redis.asyncio.Redis
) -> None:
    """The last one read stays, too, as the mark of this stream. A second time finds nothing to remove."""
    for _ in range(2):
        await inbox.keep_alive()
        assert await redis_client.xlen(keys.replies(gateway)) == 3
    assert [note["number"] for note in await inbox.read()] == ["200", "201"]
    await inbox.keep_alive()
    assert await redis_client.xlen(keys.replies(gateway)) == 1
    assert 0 < await redis_client.ttl(keys.replies(gateway)) <= keys.STREAM_TTL_S


async def test_what_a_new_redis_was_told_before_anybody_noticed_stays(
    inbox: Inbox, gateway: GatewayId, redis_client: redis.asyncio.Redis
) -> None:
    """Redis is lost, and the next one's clock is behind: what comes in has ids below those that were read."""
    await redis_client.delete(keys.replies(gateway))
    await redis_client.xadd(keys.replies(gateway), {"number": "first"}, id="1-1")
    await inbox.keep_alive()
    inbox.rewind()
    await inbox.keep_alive()
    assert [note["number"] for note in await inbox.read()] == ["first"]


async def test_keeping_alive_makes_no_stream(redis_store: Redis, redis_client: redis.asyncio.Redis) -> None:
    """Of a process that nobody has told anything."""
    silent = GatewayId(f"gateway-{new_id()}")
    await replies_inbox(redis_store, silent).keep_alive()
    assert not await redis_client.exists(keys.replies(silent))
