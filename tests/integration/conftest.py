"""Stores on real servers, for the tests of one store or one service."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import redis.asyncio
from bridge import Bridge, open_bridge
from followed_runs import FollowedRun, Relay, open_module_relay, open_run
from job_stores import new_user
from support import redis_database

from common import turn_times
from common.ids import UserId, new_id
from common.store.jobs import Jobs
from common.store.postgres import Postgres, open_postgres
from common.store.redis import Redis, open_redis
from common.store.requests import Requests
from common.store.tokens import Tokens
from harness.servers import Servers

RETENTION_S = 3600.0


@pytest.fixture
async def redis_store(redis_url: str) -> AsyncIterator[Redis]:
    """The client under test."""
    async with open_redis(redis_url) as store:
        yield store


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain client, to look at what is there and to break it."""
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def jobs(redis_store: Redis) -> Jobs:
    """The job streams."""
    return Jobs(redis_store)


@pytest.fixture(scope="module")
async def postgres(postgres_url: str) -> AsyncIterator[Postgres]:
    """The pool under test."""
    async with open_postgres(postgres_url) as store:
        yield store


@pytest.fixture
def user() -> UserId:
    """A user of this test alone: the databases are shared by a module."""
    return new_user()


@pytest.fixture
def tokens(postgres: Postgres) -> Tokens:
    """Tokens and API keys."""
    return Tokens(postgres)


@pytest.fixture(scope="module")
async def requests(postgres: Postgres) -> Requests:
    """The records, with an hour of retention."""
    return Requests(postgres, retention_s=RETENTION_S)


@pytest.fixture(scope="module")
async def bridge(servers: Servers, state_directory: Path, postgres_url: str) -> AsyncIterator[Bridge]:
    """A worker of this module, with the usual heartbeat. Its tests use users of their own, and no `redis_url`."""
    async with _bridge(servers, state_directory, postgres_url) as running:
        yield running


@pytest.fixture(scope="module")
async def brisk_bridge(servers: Servers, state_directory: Path, postgres_url: str) -> AsyncIterator[Bridge]:
    """The same with short times and few places, for tests of what happens when they have passed."""
    env = {"TOWLINE_HANDSHAKE_TIMEOUT_S": "1", "TOWLINE_SOCKETS_MAX": "12"}
    async with _bridge(servers, state_directory, postgres_url, heartbeat_s=1.0, env=env) as running:
        yield running


@pytest.fixture
async def quiet_bridge(state_directory: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Bridge]:
    """A worker of this test, with a heartbeat of a minute: whatever it does in time, no heartbeat made it do."""
    async with open_bridge(
        state_directory / f"bridge-{new_id()}", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=60
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def relay(servers: Servers, postgres_url: str) -> AsyncIterator[Relay]:
    """A relay of this module, in this process."""
    async with open_module_relay(servers.redis_url, postgres_url) as running:
        yield running


@pytest.fixture
async def run(relay: Relay, postgres: Postgres) -> AsyncIterator[FollowedRun]:
    """A run that the module's relay may follow; stopped at the end."""
    async with open_run(relay, postgres) as opened:
        yield opened


@pytest.fixture
def brisk_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between a turn's attempts that a test can wait for, and no look that would end them."""
    monkeypatch.setattr(turn_times, "NET_POLL_S", 60.0)
    monkeypatch.setattr(turn_times, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(turn_times, "RETRY_CAP_S", 0.1)


@contextlib.asynccontextmanager
async def _bridge(
    servers: Servers,
    directory: Path,
    postgres_url: str,
    *,
    heartbeat_s: float = 10,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Bridge]:
    redis_url = redis_database(servers.redis_url, 15 if env is None else 14)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushdb()
    async with open_bridge(
        directory / f"bridge-{new_id()}",
        postgres_url=postgres_url,
        redis_url=redis_url,
        heartbeat_s=heartbeat_s,
        env=env,
    ) as running:
        yield running
