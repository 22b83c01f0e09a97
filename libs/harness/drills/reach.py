"""Reaching an installation from outside: by which port and URL, whether what is there answers, and waiting for that.

Used by:  the targets that attach to an installation that is up.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit, urlunsplit

import psycopg
import redis.asyncio
import redis.exceptions

from harness.drills.target import DrillFailed
from harness.ports import is_http_ready

POLL_EVERY_S = 0.1
# A start takes some seconds; on a busy machine, with the probes that it has to pass, much more.
READY_WITHIN_S = 120.0
CONNECTS_WITHIN_S = 2.0

# What serves where inside; the stand-ins: agent, model, endpoint.
GATEWAY_PORT, WORKER_PORT, ADMIN_PORT = 8080, 8081, 9090
AGENT_PORT, MODEL_PORT, ENDPOINT_PORT = 9100, 9101, 9102
REDIS_PORT, POSTGRES_PORT = 6379, 5432


def led_by(url: str, port: int) -> str:
    """A store's URL as the installation has it, by way of a loopback port."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{port}"))


async def wait_until(what: str, condition: Callable[[], Awaitable[bool]], *, within_s: float = READY_WITHIN_S) -> None:
    """Wait until `condition` says yes. Raises: DrillFailed: not within that time."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            raise DrillFailed(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(POLL_EVERY_S)


async def wait_ready(name: str, admin_port: Callable[[], int]) -> None:
    """Wait until a service says on its admin port that it is ready. Raises: DrillFailed."""
    await wait_until(f"{name} is ready", lambda: is_http_ready(admin_port()))


async def does_redis_answer(url: str) -> bool:
    """Whether Redis answers there, and has read its data."""
    try:
        async with asyncio.timeout(CONNECTS_WITHIN_S), redis.asyncio.Redis.from_url(url) as client:
            await client.ping()
    except (redis.exceptions.RedisError, OSError, TimeoutError):
        return False
    return True


async def does_postgres_answer(url: str) -> bool:
    """Whether PostgreSQL takes connections there."""
    try:
        async with (
            asyncio.timeout(CONNECTS_WITHIN_S),
            await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
        ):
            await connection.execute("select 1")
    except (psycopg.OperationalError, TimeoutError):
        return False
    return True


async def flush(url: str) -> None:
    """Have Redis lose everything."""
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushall()
