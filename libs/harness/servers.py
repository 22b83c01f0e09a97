"""Choose the PostgreSQL and the Redis that tests, demos and benches run on.

In this order: `DATABASE_URL` and `REDIS_URL` from the environment; containers, if `TOWLINE_TEST_SERVERS=containers`
asks for them and a container engine answers; the embedded servers (`harness.embedded`), by the programs that
`harness.carriers` finds.
"""

import asyncio
import contextlib
import os
import secrets
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.runner import hold_directory

# As Compose has them.
POSTGRES_IMAGE = "postgres:17-alpine"
REDIS_IMAGE = "redis:7-alpine"
REDIS_COMMAND = "redis-server --appendonly yes --save '' --maxmemory-policy noeviction --databases 64"


@dataclass(frozen=True, slots=True)
class Servers:
    """URLs of the two stores, as in `DATABASE_URL` and `REDIS_URL`. They hold passwords."""

    postgres_url: str
    redis_url: str


@contextlib.asynccontextmanager
async def open_servers(directory: Path) -> AsyncIterator[Servers]:
    """Run both servers until the block ends; what the environment names is used as it is.

    Args:
        directory: state directory of this harness alone; made if need be, its data are found again the next time.

    Raises:
        DirectoryBusy: another harness uses the directory.
        ProcessFailed, ServerMissing: an embedded server did not start.
    """
    postgres_url = os.environ.get("DATABASE_URL", "")
    redis_url = os.environ.get("REDIS_URL", "")
    async with contextlib.AsyncExitStack() as stack:
        if not (postgres_url and redis_url):
            stack.enter_context(hold_directory(directory))
            use_containers = os.environ.get("TOWLINE_TEST_SERVERS") == "containers" and await _is_engine_answering()
            if use_containers:
                postgres_url = postgres_url or await stack.enter_async_context(_postgres_container())
                redis_url = redis_url or await stack.enter_async_context(_redis_container())
        if not postgres_url:
            postgres = EmbeddedPostgres(directory)
            stack.push_async_callback(postgres.stop)
            postgres_url = await postgres.start()
        if not redis_url:
            valkey = EmbeddedValkey(directory)
            stack.push_async_callback(valkey.stop)
            redis_url = await valkey.start()
        yield Servers(postgres_url, redis_url)


async def _is_engine_answering() -> bool:
    # Imported where containers are asked for: it takes half a second.
    import docker  # type: ignore[import-untyped]  # noqa: PLC0415

    def ping() -> None:
        docker.from_env().ping()

    try:
        await asyncio.to_thread(ping)
    except docker.errors.DockerException as error:
        warnings.warn(f"no container engine answers, embedded servers are used instead: {error}", stacklevel=2)
        return False
    return True


@contextlib.asynccontextmanager
async def _postgres_container() -> AsyncIterator[str]:
    from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415

    container = PostgresContainer(POSTGRES_IMAGE, password=secrets.token_hex(16), driver=None)
    try:
        await asyncio.to_thread(container.start)
        yield container.get_connection_url()
    finally:
        await asyncio.to_thread(container.stop)


@contextlib.asynccontextmanager
async def _redis_container() -> AsyncIterator[str]:
    from testcontainers.community.redis import RedisContainer  # noqa: PLC0415

    # The port is open to this machine's network.
    password = secrets.token_hex(16)
    container = RedisContainer(REDIS_IMAGE, password=password)
    container.with_command(f"{REDIS_COMMAND} --requirepass {password}")
    try:
        await asyncio.to_thread(container.start)
        yield f"redis://:{password}@{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"
    finally:
        await asyncio.to_thread(container.stop)
