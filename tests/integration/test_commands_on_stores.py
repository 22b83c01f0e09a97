"""`towline migrate`, `keys`, `queues` and `config`: what an operator does to the stores themselves."""

import asyncio

import psycopg
import pytest
from command import towline

from common.ids import JobId, SessionId, UserId, new_id
from common.store import keys
from common.store.jobs import Jobs, take_call
from common.store.postgres import open_postgres
from common.store.records import Begin, NewJob, scope_of_user
from common.store.redis import open_redis
from common.store.requests import Requests
from common.store.tokens import Tokens
from towline.wire.api import SCOPES

NO_POSTGRES = "postgresql://nobody:secret@127.0.0.1:1/none"
NO_REDIS = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
async def empty_postgres_url(postgres_url: str) -> str:
    """The module's database as a new installation finds it: without a schema."""
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute("drop schema if exists absurd cascade")
        await connection.execute("drop schema public cascade")
        await connection.execute("create schema public")
    return postgres_url


@pytest.fixture
async def database(empty_postgres_url: str) -> dict[str, str]:
    """The variables of a shell that may use a database with the schema and nothing else."""
    variables = {"DATABASE_URL": empty_postgres_url}
    assert (await towline("migrate", **variables)).code == 0
    return variables


async def test_migrate_applies_everything_once_whoever_runs_it(empty_postgres_url: str) -> None:
    """Pods of a rolling deploy start it at the same time; all of them may go on afterwards."""
    variables = {"DATABASE_URL": empty_postgres_url}
    runs = await asyncio.gather(*(towline("migrate", "--json", **variables) for _ in range(2)))
    assert [run.code for run in runs] == [0, 0]
    applied = sorted((run.document()["applied"] for run in runs), key=len)
    assert applied[0] == []
    assert applied[1][0] == "0001_jobs.sql"
    assert "up to date" in (await towline("migrate", **variables)).err


async def test_commands_on_a_database_without_the_schema_say_what_to_do(empty_postgres_url: str) -> None:
    for arguments in (("keys", "bootstrap"), ("queues", "show")):
        ended = await towline(*arguments, DATABASE_URL=empty_postgres_url)
        assert (ended.code, ended.out) == (2, "")
        assert "towline migrate" in ended.err


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "says"),
    [
        (("migrate",), {}, 2, "DATABASE_URL is not set"),
        (("migrate",), {"DATABASE_URL": "mysql://:secret@h/d"}, 2, "DATABASE_URL is not a"),
        (("migrate",), {"DATABASE_URL": "postgresql://:secret@h:port/d"}, 2, "DATABASE_URL is not a"),
        (("migrate",), {"DATABASE_URL": NO_POSTGRES}, 4, "Connection refused"),
        (("keys", "list"), {"DATABASE_URL": NO_POSTGRES}, 4, "Connection refused"),
    ],
)
async def test_a_store_that_cannot_be_used_is_one_line(
    arguments: tuple[str, ...], variables: dict[str, str], code: int, says: str
) -> None:
    """With the reason, and never with the password."""
    ended = await towline(*arguments, **variables)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (code, "", 1), ended
    assert says in ended.err
    assert "secret" not in ended.err


async def test_keys_bootstrap_makes_the_first_key_and_no_second(database: dict[str, str]) -> None:
    """Only the value is on standard output: `export TOWLINE_API_KEY=$(towline keys bootstrap)`."""
    runs = await asyncio.gather(*(towline("keys", "bootstrap", **database) for _ in range(2)))
    assert sorted(run.code for run in runs) == [0, 3]
    refused, first = sorted(runs, key=lambda run: len(run.out))
    assert (refused.code, refused.out) == (3, "")
    async with open_postgres(database["DATABASE_URL"]) as postgres:
        key = await Tokens(postgres).find_api_key(first.out.removesuffix("\n"))
    assert key is not None
    assert (key.scopes, key.users) == (frozenset(SCOPES), None)


async def test_keys_are_created_listed_and_revoked(database: dict[str, str]) -> None:
    arguments = ("--name", "demo", "--scope", "jobs", "--scope", "admin", "--user", "alice", "--user", "bob")
    made = (await towline("keys", "create", *arguments, "--json", **database)).document()
    async with open_postgres(database["DATABASE_URL"]) as postgres:
        tokens = Tokens(postgres)
        key = await tokens.find_api_key(made["api_key"])
        assert key is not None
        assert (key.scopes, key.users) == ({"jobs", "admin"}, {"alice", "bob"})
        listed = await towline("keys", "list", **database)
        assert [word in listed.out for word in (made["key_id"], "jobs, admin", "alice, bob")] == [True] * 3
        assert made["api_key"] not in listed.out
        assert (await towline("keys", "revoke", made["key_id"], **database)).code == 0
        assert await tokens.find_api_key(made["api_key"]) is None
    (row,) = (await towline("keys", "list", "--json", **database)).lines()
    assert row["revoked_at"] is not None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("revoke", "01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11"), 3),
        (("revoke", "x"), 2),
        (("create", "--name", "x", "--scope", "root"), 2),
        (("create", "--name", "x", "--scope", "jobs", "--user", "a b"), 2),
    ],
)
async def test_wrong_keys_are_refused_by_name(database: dict[str, str], arguments: tuple[str, ...], code: int) -> None:
    ended = await towline("keys", *arguments, **database)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (code, "", 1)
    assert (await towline("keys", "list", "--json", **database)).out == ""


async def test_queues_show_what_is_open_and_who_holds_it(database: dict[str, str], redis_url: str) -> None:
    """Three jobs of alice, one taken and begun; one of bob. Ended ones are not counted."""
    variables = {**database, "REDIS_URL": redis_url}
    async with open_postgres(database["DATABASE_URL"]) as postgres, open_redis(redis_url) as redis:
        requests, jobs = Requests(postgres, retention_s=3600), Jobs(redis)
        records = []
        for user in ("alice", "alice", "alice", "bob", "carol"):
            records.append((await requests.accept(new_job(UserId(user)))).record)
            await jobs.enqueue(records[-1], "{}", None)
        cancelled = await requests.cancel(records[-1].job, UserId("carol"))
        assert cancelled is not None
        await jobs.settle(cancelled)
        await redis.send_many([("SET", keys.epoch(UserId("alice")), 7)])
        (answer,) = await redis.run_many([take_call(UserId("alice"), 7, SessionId("session-1"), 1)])
        assert answer[0] == b"ok"
        assert await requests.begin(Begin(records[0].job, "m", "j")) == 1

    everyone = (await towline("queues", "show", "--json", **variables)).document()
    assert {row["state"]: row["jobs"] for row in everyone["open"]} == {"queued": 3, "processing": 1}
    assert everyone["stream"] is None
    alice = (await towline("queues", "show", "alice", "--json", **variables)).document()
    assert {row["state"]: row["jobs"] for row in alice["open"]} == {"queued": 2, "processing": 1}
    assert all(row["oldest_s"] >= 0 for row in alice["open"])
    stream = alice["stream"]
    assert (stream["entries"], stream["pending"], stream["bytes"] > 0) == (3, 1, True)
    assert [(c["session"], c["pending"]) for c in stream["consumers"]] == [("session-1", 1)]
    shown = await towline("queues", "show", "alice", **variables)
    assert (shown.code, "session-1 holds 1" in shown.out) == (0, True)

    nobody = (await towline("queues", "show", "nobody", "--json", **variables)).document()
    assert nobody == {"open": [], "stream": {"entries": 0, "bytes": 0, "pending": 0, "consumers": []}}
    assert (await towline("queues", "show", "a b", **variables)).code == 2
    away = await towline("queues", "show", "alice", **{**variables, "REDIS_URL": NO_REDIS})
    assert (away.code, len(away.err.splitlines()), "secret" in away.err) == (4, 1, False)


async def test_config_lists_every_setting_and_whose_it_is() -> None:
    rows = {row["name"]: row for row in (await towline("config", "--json")).lines()}
    assert rows["DATABASE_URL"]["services"] == ["gateway", "worker", "relay"]
    assert rows["TOWLINE_HTTP_PORT"]["services"] == ["gateway"]
    assert rows["TOWLINE_BRIDGE_PORT"]["services"] == ["worker"]
    assert all(row["reason"] and row["accepted"] for row in rows.values())
    table = await towline("config")
    assert [name for name in rows if name not in table.out] == []


async def test_config_checks_an_environment() -> None:
    """Every wrong value at once, no secret in the text, and a hint at what is probably misspelt."""
    good = {"DATABASE_URL": NO_POSTGRES, "REDIS_URL": NO_REDIS}
    assert (await towline("config", "--check", "gateway", **good)).code == 0
    bad = {"DATABASE_URL": "mysql://:secret@h/d", "TOWLINE_HTTP_PORT": "x", "TOWLINE_LOG_LEVLE": "debug"}
    checked = await towline("config", "--check", "gateway", **bad)
    assert checked.code == 2
    for word in ("DATABASE_URL", "REDIS_URL", "TOWLINE_HTTP_PORT", "TOWLINE_LOG_LEVEL"):
        assert word in checked.err
    assert "secret" not in checked.err
    document = (await towline("config", "--check", "worker", "--json", **bad)).document()
    assert len(document["problems"]) == 2
    assert (await towline("config", "--check", "nothing")).code == 2


def new_job(user: UserId) -> NewJob:
    return NewJob(
        job=JobId(new_id()),
        user=user,
        scope=scope_of_user(user),
        key=new_id(),
        name="echo",
        args="{}",
        fingerprint=b"f",
        timeout_s=60.0,
        deadline_s=300.0,
        hinted=True,
        on_machine_change="unknown",
        traceparent="",
    )
