"""Migrations: applied once, whoever applies them and however many at once."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import absurdctl
import psycopg
import pytest
from psycopg import sql

from common.errors import OtherMigrations, StoreUnavailable
from common.ids import new_id
from common.store import postgres as postgres_module
from common.store.postgres import CONNECTIONS_MAX, absurd_steps, migrate, open_postgres
from harness.servers import Servers

ABSURD_VERSION = "create or replace function absurd.get_schema_version() returns text language sql as $$ select '{}' $$"


@pytest.fixture
async def empty_url(servers: Servers) -> AsyncIterator[str]:
    """A database with nothing in it."""
    name = f"towline_test_empty_{new_id()[-12:]}"
    async with await psycopg.AsyncConnection.connect(servers.postgres_url, autocommit=True) as connection:
        await connection.execute(sql.SQL("create database {} template template1").format(sql.Identifier(name)))
        yield urlunsplit(urlsplit(servers.postgres_url)._replace(path=f"/{name}"))
        await connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


async def test_a_second_migration_finds_nothing_to_do(empty_url: str) -> None:
    """The first one names what it applied, in order."""
    applied = await migrate(empty_url)
    assert applied == sorted(applied)
    assert applied[0] == "0001_jobs.sql"
    assert await migrate(empty_url) == []
    async with open_postgres(empty_url) as postgres:
        await postgres.check()


async def test_four_processes_at_once_apply_each_file_once(empty_url: str) -> None:
    """As four pods of one deployment do."""
    program = "import asyncio, os; from common.store.postgres import migrate;"
    program += "print(','.join(asyncio.run(migrate(os.environ['DATABASE_URL']))))"
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            env={**os.environ, "DATABASE_URL": empty_url},
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(4)
    ]
    outputs = [(await process.communicate())[0].decode().strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    applied = [output for output in outputs if output]
    assert len(applied) == 1, outputs
    async with await psycopg.AsyncConnection.connect(empty_url) as connection:
        cursor = await connection.execute("select name from schema_migrations order by version")
        files = [row[0] for row in await cursor.fetchall()]
        assert applied[0].split(",") == [*files, f"absurd {absurdctl.ABSURD_SCHEMA_TARGET_VERSION}"]


async def test_a_database_that_was_not_migrated_is_refused_with_advice(empty_url: str) -> None:
    """The process waits and says what to do."""
    async with open_postgres(empty_url) as postgres:
        with pytest.raises(ValueError, match="run `towline migrate`"):
            await postgres.check()


async def test_a_migration_that_has_just_begun_is_waited_for(empty_url: str) -> None:
    """Its table of versions is there and empty while Absurd's schema is made: seen in pods of a first deployment."""
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        await connection.execute("create table schema_migrations (version integer primary key, name text)")
    async with open_postgres(empty_url) as postgres:
        with pytest.raises(ValueError, match=r"version 0, .* run `towline migrate`"):
            await postgres.check()


async def test_a_migration_that_fails_leaves_nothing_of_itself(empty_url: str) -> None:
    """Each file is one transaction: what stands in its way is not half gone round."""
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        # The last table that the first file makes.
        await connection.execute("create table machine_token_values (x integer)")
        with pytest.raises((StoreUnavailable, psycopg.errors.DuplicateTable), match="machine_token_values"):
            await migrate(empty_url)
        cursor = await connection.execute("select to_regclass('requests') is null, count(*) from schema_migrations")
        assert await cursor.fetchall() == [(True, 0)]
        await connection.execute("drop table machine_token_values")
    assert "0001_jobs.sql" in await migrate(empty_url)


async def test_a_database_that_went_another_way_is_left_alone(empty_url: str) -> None:
    """A migration of the same number and another name: what is in there is not what the next ones expect."""
    await migrate(empty_url)
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        await connection.execute("update schema_migrations set name = '0002_other.sql' where version = 2")
        await connection.execute("delete from schema_migrations where version > 2")
        await connection.execute(ABSURD_VERSION.format("0.5.0"))
        with pytest.raises(OtherMigrations, match=r"migration 2 was 0002_other\.sql there, not 0002_runs\.sql"):
            await migrate(empty_url)
        cursor = await connection.execute("select max(version), absurd.get_schema_version() from schema_migrations")
        assert await cursor.fetchall() == [(2, "0.5.0")]
    async with open_postgres(empty_url) as postgres:
        with pytest.raises(OtherMigrations, match="use another database"):
            await postgres.check()


async def test_an_older_schema_of_absurd_is_brought_up_to_date(empty_url: str) -> None:
    """As after an upgrade of ours that brings a newer one: its steps are applied once, in order."""
    await migrate(empty_url)
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        await connection.execute(ABSURD_VERSION.format("0.5.0"))
        assert await migrate(empty_url) == [f"absurd {absurdctl.ABSURD_SCHEMA_TARGET_VERSION}"]
        cursor = await connection.execute("select absurd.get_schema_version()")
        assert await cursor.fetchall() == [(absurdctl.ABSURD_SCHEMA_TARGET_VERSION,)]
    assert await migrate(empty_url) == []


async def test_a_newer_schema_of_absurd_is_left_alone(empty_url: str) -> None:
    """A later release of ours was here; this one, rolled back to, lets it be."""
    await migrate(empty_url)
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        await connection.execute(ABSURD_VERSION.format("0.6.0"))
    assert await migrate(empty_url) == []


async def test_an_absurd_that_was_there_before_us_is_used(empty_url: str) -> None:
    """Its own queues stay."""
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        await connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
        await connection.execute("select absurd.create_queue('theirs')")
        assert "0003_turns.sql" in await migrate(empty_url)
        cursor = await connection.execute("select queue_name from absurd.list_queues()")
        assert await cursor.fetchall() == [("theirs",), ("turns",)]


@pytest.mark.parametrize(
    ("found", "steps"),
    [("0.0.3", 5), ("0.1.0", 2), ("0.1.5", 2), ("0.9.0", 1), ("0.10.0", 0), ("1.0.0", 0), ("main", 0)],
)
def test_steps_are_those_between_the_versions(found: str, steps: int) -> None:
    """By number and not by letter; in order; not beyond the target."""
    names = ["0.2.0-0.10.0.sql", "0.0.3-0.0.4.sql", "0.0.5-0.1.0.sql", "0.10.0-0.11.0.sql"]
    names += ["0.1.0-0.2.0.sql", "0.0.4-0.0.5.sql"]
    in_order = ["0.0.3-0.0.4.sql", "0.0.4-0.0.5.sql", "0.0.5-0.1.0.sql", "0.1.0-0.2.0.sql", "0.2.0-0.10.0.sql"]
    assert absurd_steps(found, "0.10.0", names) == (in_order[-steps:] if steps else [])


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    """One clear line, without the password."""
    with pytest.raises(StoreUnavailable) as caught:
        await migrate("postgresql://postgres:secret-word@127.0.0.1:1/postgres")
    assert "secret-word" not in str(caught.value)


async def test_a_running_process_outlives_a_migration_that_adds_a_column(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has prepared does not fit the table any more: Postgres refuses that on each of its connections, once."""
    monkeypatch.setattr(postgres_module, "statement", lambda _: "select * from things, pg_sleep(0.05)")
    async with (
        await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as admin,
        open_postgres(empty_url) as postgres,
    ):
        await admin.execute("create table things as select 1 as one")

        async def ask() -> set[int]:
            rows = await asyncio.gather(*(postgres.fetch("things") for _ in range(4 * CONNECTIONS_MAX)))
            return {len(found[0]) for found in rows}

        for _ in range(4):  # until every connection has prepared it
            assert await ask() == {2}
        await admin.execute("alter table things add column two integer")
        assert await ask() == {3}
