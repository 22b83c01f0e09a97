"""Connections that lay idle while Redis was restarted fail no call long after it is back."""

import asyncio
from pathlib import Path

from common.errors import StoreUnavailable
from common.store.redis import open_redis
from harness.embedded import EmbeddedValkey

CALLS = 10
PING = [("PING",)]


async def test_one_failure_after_a_restart_clears_every_idle_connection(state_directory: Path) -> None:
    """Ten connections die with Redis. The first call that notices it is the last one that fails."""
    home = state_directory / "idle"
    home.mkdir()
    valkey = EmbeddedValkey(home)
    try:
        async with open_redis(await valkey.start()) as redis:
            await asyncio.gather(*(redis.send_many(PING) for _ in range(CALLS)))
            await valkey.restart()
            failures = 0
            for _ in range(CALLS):
                try:
                    await redis.send_many(PING)
                except StoreUnavailable:
                    failures += 1
            assert failures <= 1
            answers = await asyncio.gather(*(redis.send_many(PING) for _ in range(CALLS)), return_exceptions=True)
            assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    finally:
        await valkey.stop()
