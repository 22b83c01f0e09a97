"""Stores for tests: real servers once per session, and for each test a database of its own.

The servers are those of `harness.servers`: from `DATABASE_URL` and `REDIS_URL`, containers, or embedded. A Redis given
by URL is used up to database 15 by each process that runs tests side by side (`pytest -n`: 31 by the second, and so
on), and what is in there is deleted.

Beside them stands the file in which tools count their executions.
"""

import contextlib
import itertools
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import redis.asyncio
from hypothesis import settings
from psycopg import sql
from support import redis_database

from common.store.postgres import migrate
from harness import ports
from harness.runner import temporary_directory
from harness.servers import Servers, open_servers

# The same examples each time: a gate rolls no dice. To look for new ones: `pytest --hypothesis-profile=default`.
settings.register_profile("gate", derandomize=True)
settings.load_profile("gate")

# A script's background job ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A server that a test stops keeps its ports: tests beside it take theirs from elsewhere, or they would be gone.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    size = len(ports.PORTS) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    begin = ports.PORTS.start + size * int(worker.removeprefix("gw"))
    ports.PORTS = range(begin, begin + size)

# Every Redis has 16 databases unless told otherwise; 0 is left to whoever shares the server with us, 14 and 15 to
# services that several tests share (`integration/conftest.py`).
_redis_numbers = itertools.cycle(range(1, 14))


@pytest.fixture(scope="session")
def state_directory() -> Iterator[Path]:
    """One for the session, removed at its end."""
    with temporary_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
async def servers(state_directory: Path) -> AsyncIterator[Servers]:
    """Both servers, as they came: no schema, nothing flushed."""
    async with open_servers(state_directory / "servers") as running:
        yield running


@pytest.fixture(scope="session")
async def migrated_template(servers: Servers) -> AsyncIterator[str]:
    """Name of a database with the current schema and no rows, to be copied."""
    async with _new_database(servers.postgres_url, template="template1") as url:
        await migrate(url)
        yield urlsplit(url).path.removeprefix("/")


@pytest.fixture(scope="module")
async def postgres_url(servers: Servers, migrated_template: str) -> AsyncIterator[str]:
    """A database with the current schema, of this test module alone."""
    async with _new_database(servers.postgres_url, template=migrated_template) as url:
        yield url


@pytest.fixture
async def redis_url(servers: Servers) -> str:
    """An empty Redis database, of this test alone."""
    url = redis_database(servers.redis_url, next(_redis_numbers))
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushdb()
    return url


@pytest.fixture
def executions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which `sidecar_tools` write a line per execution; a sidecar's process has it by its directory."""
    file = tmp_path / "executions"
    file.touch()
    monkeypatch.setenv("EXECUTIONS", str(file))
    return file


@contextlib.asynccontextmanager
async def _new_database(server_url: str, *, template: str) -> AsyncIterator[str]:
    name = f"towline_test_{uuid.uuid4().hex[:12]}"
    async with await psycopg.AsyncConnection.connect(server_url, autocommit=True) as connection:
        await connection.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )
    try:
        yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    finally:
        async with await psycopg.AsyncConnection.connect(server_url, autocommit=True) as connection:
            # A process that was killed in the test may still have its connections open.
            await connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
