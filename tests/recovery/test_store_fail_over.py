"""Redis fails over to a replica that lagged: what the primary had acknowledged last is gone, or is there again."""

import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
from faulty_stores import USER, World, under_way
from support import eventually

from common.store import keys
from harness.embedded import EmbeddedValkey
from harness.faults import TcpProxy
from harness.runner import temporary_directory


async def test_redis_fails_over_to_a_replica_that_lags() -> None:
    """What the primary acknowledged last is lost: an entry, and a settle, whose entry is there again."""
    with temporary_directory() as directory:
        async with World(directory).running() as world, replica_of(world.valkey) as (replica, link, client):
            settled = world.start("settled", seconds=1)
            await world.began("settled")
            assert await world.client.wait(1, 5000) == 1
            link.stall("to_client")
            await settled
            await eventually(world.is_clear)
            calls = await under_way(world, "fail-over")
            world.valkey.kill()
            link.cut()
            (entry,) = await client.xrange(keys.jobs(USER))
            assert entry[1]["job"] == (await settled)["job"]

            await client.replicaof("NO", "ONE")
            world.to_redis.lead_to(replica.url)
            world.to_redis.cut()
            world.client = client
            calls["fail-over-late"] = world.start("fail-over-late")
            # The replica does not know who waits: they are registered anew.
            await world.ended_once("fail-over", calls | {"settled": settled}, time.monotonic())


@contextlib.asynccontextmanager
async def replica_of(primary: EmbeddedValkey) -> AsyncIterator[tuple[EmbeddedValkey, TcpProxy, redis.asyncio.Redis]]:
    """A replica that has caught up, the link over which it follows, and a client of it."""
    link = TcpProxy(primary.url)
    await link.start()
    with temporary_directory() as directory:
        replica = EmbeddedValkey(directory)
        own_url = await replica.start()
        try:
            password = urlsplit(primary.url).password
            async with World.plain_client(own_url) as client:
                await client.config_set("masterauth", password)
                await client.replicaof("127.0.0.1", link.port)

                async def follows() -> bool:
                    return bool((await client.info("replication"))["master_link_status"] == "up")

                await eventually(follows, within_s=30)
                await client.config_set("requirepass", password)
            url = urlunsplit(urlsplit(primary.url)._replace(netloc=f":{password}@127.0.0.1:{urlsplit(own_url).port}"))
            async with World.plain_client(url) as client:
                yield replica, link, client
        finally:
            await link.stop()
            await replica.stop()
