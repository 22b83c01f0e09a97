"""The Postgres client: a pool made inside the running loop, named statements, migrations.

Promises: every statement runs in a transaction of its own and is safe to repeat (its outcome is unknown when the
connection dies between commit and answer, and then it is repeated); waiting for a connection has a limit; every
failure to get an answer is `StoreUnavailable`.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg.rows import namedtuple_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from common.errors import OtherMigrations, StoreUnavailable

CONNECTIONS_MAX = 8
# The door gives up on a store after five seconds: longer, and callers' own timeouts answer first.
DOOR_TIMEOUT_S = 5.0
POOL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 15
# A server that is frozen, or behind a dead link, does not even say that a statement took too long.
ANSWER_TIMEOUT_S = POOL_TIMEOUT_S + STATEMENT_TIMEOUT_S
# What each session of the pool is set to. A prepared statement keeps its plan until autovacuum has looked at the table:
# planned while that is empty, it would read all of it, and cost more with every row. Ours all have an index to go by.
SESSION = {
    "statement_timeout": STATEMENT_TIMEOUT_S * 1000,
    "timezone": "UTC",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
MIGRATION_LOCK = 0x70_77_6C_6E  # advisory lock: one migration at a time, whatever runs it
MIGRATION_LOCK_WAIT_S = 60

_BROKEN = (psycopg.OperationalError, psycopg.InterfaceError)
# FeatureNotSupported: a statement was prepared before a migration gave its view or table another column.
_REPEAT = (pg.DeadlockDetected, pg.SerializationFailure, pg.FeatureNotSupported)
_REFUSED = (
    pg.ReadOnlySqlTransaction,
    pg.DiskFull,
    pg.TooManyConnections,
    pg.CannotConnectNow,
    pg.OutOfMemory,
    pg.QueryCanceled,  # the statement timeout: whoever waits has waited long enough
)


@cache
def statement(name: str) -> str:
    """Load `sql/{name}.sql`, once."""
    return resources.files("common.store").joinpath("sql", f"{name}.sql").read_text()


class Postgres:
    """What the stores use: one statement, one transaction, its rows."""

    def __init__(self, url: str, *, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.url = url
        self._answer_timeout_s = answer_timeout_s
        self._attempts: set[asyncio.Task[list[Any]]] = set()
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] = AsyncConnectionPool(
            url,
            min_size=1,
            max_size=CONNECTIONS_MAX,
            open=False,
            timeout=POOL_TIMEOUT_S,
            reconnect_timeout=0,
            kwargs={
                "autocommit": True,
                "row_factory": namedtuple_row,
                "prepare_threshold": 3,
                "connect_timeout": CONNECT_TIMEOUT_S,
                "application_name": "towline",
                "options": " ".join(f"-c {name}={value}" for name, value in SESSION.items()),
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 20_000,
            },
        )

    async def open(self) -> None:
        """Start the pool; does not wait for the server."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close(timeout=2)

    async def fetch(self, name: str, params: Sequence[Any] | dict[str, Any] = ()) -> list[Any]:
        """Run the statement `sql/{name}.sql` and return its rows (named tuples; empty if it returns none).

        Cancelling the wait does not take the statement back.

        Raises:
            StoreUnavailable: no answer, after repetitions; the statement may have run.
        """
        # Every pooled connection may have died while it lay idle; one failure more than there are is an outage.
        for tries_left in reversed(range(CONNECTIONS_MAX + 1)):
            try:
                return await self._attempt(name, params)
            except TimeoutError as error:
                raise StoreUnavailable("Postgres does not answer in time") from error
            except PoolTimeout as error:
                raise StoreUnavailable("Postgres gives no connection") from error
            except _REPEAT as error:
                if not tries_left:
                    raise StoreUnavailable(f"Postgres refuses ({type(error).__name__})") from error
            except _REFUSED as error:
                raise StoreUnavailable(f"Postgres refuses ({type(error).__name__})") from error
            except _BROKEN as error:
                if not tries_left:
                    raise StoreUnavailable(f"Postgres does not answer ({type(error).__name__})") from error
        raise AssertionError("unreachable")

    async def _attempt(self, name: str, params: Sequence[Any] | dict[str, Any]) -> list[Any]:
        # In a task that callers do not cancel: the pool loses a connection for good when whoever waits for one is
        # cancelled as it comes (or, on Python 3.11, loses the cancellation). Callers that leave and runs that end would
        # use up all connections. See tests/integration/test_postgres_cancellation.py.
        attempt = asyncio.create_task(self._fetch_once(name, params), name=f"sql:{name}")
        self._attempts.add(attempt)
        attempt.add_done_callback(self._note_done)
        async with asyncio.timeout(self._answer_timeout_s):
            return await asyncio.shield(attempt)

    def _note_done(self, attempt: asyncio.Task[list[Any]]) -> None:
        self._attempts.discard(attempt)
        if not attempt.cancelled():
            attempt.exception()  # looked at here: whoever asked may have left, and the loop would report it

    async def _fetch_once(self, name: str, params: Sequence[Any] | dict[str, Any]) -> list[Any]:
        async with self._pool.connection() as connection:
            # The pool's own waits are left out: it keeps their time.
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                try:
                    cursor = await connection.execute(statement(name), params)
                except (pg.ReadOnlySqlTransaction, pg.FeatureNotSupported):
                    await connection.close()  # a session pinned to a demoted primary, or to an outdated plan
                    raise
                # Not `description`: it describes every column anew, which cost a gateway a sixth of its time.
                result = cursor.pgresult
                return await cursor.fetchall() if result is not None and result.nfields else []

    async def check(self) -> None:
        """Ask whether this Postgres will do: reachable, and migrated by our files.

        Raises: StoreUnavailable, OtherMigrations, ValueError.
        """
        try:
            applied = dict(await self.fetch("applied_migrations"))
        except pg.UndefinedTable:
            applied = {}
        _refuse_others(applied)
        newest = max(number for number, _ in _migrations())
        found = max(applied, default=0)
        if found < newest:
            raise ValueError(
                f"DATABASE_URL: the schema is at version {found}, {newest} is needed: run `towline migrate`"
            )


@contextlib.asynccontextmanager
async def open_postgres(url: str, *, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> AsyncIterator[Postgres]:
    """Open the pool inside the running loop and close it at the end.

    Args:
        answer_timeout_s: how long a statement and the wait for its connection may take together.
    """
    postgres = Postgres(url, answer_timeout_s=answer_timeout_s)
    await postgres.open()
    try:
        yield postgres
    finally:
        await postgres.close()


async def migrate(url: str) -> list[str]:
    """Apply what is missing, in order, each file in one transaction; returns the names of the applied files.

    Absurd's schema comes first, in its own release's version, unless a newer one is there; `absurd VERSION` says so.

    Safe to run from several places at once: an advisory lock lets one go first, the others find nothing to do.

    Raises:
        StoreUnavailable: no connection, or the lock was not free in time.
        OtherMigrations: nothing was changed.
    """
    try:
        async with await psycopg.AsyncConnection.connect(
            url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, application_name="towline-migrate"
        ) as connection:
            # In seconds a dead holder's session is gone: its TCP keepalive is short, as ours is here.
            await connection.execute(f"set lock_timeout = '{MIGRATION_LOCK_WAIT_S}s'")
            await connection.execute("set tcp_keepalives_idle = 10")
            await connection.execute("select pg_advisory_lock(%s)", [MIGRATION_LOCK])
            await connection.execute(
                "create table if not exists schema_migrations"
                " (version integer primary key, name text not null, applied_at timestamptz not null default now())"
            )
            cursor = await connection.execute("select version, name from schema_migrations")
            done: dict[int, str] = dict(await cursor.fetchall())
            _refuse_others(done)
            absurd = await _bring_absurd_up_to_date(connection)
            applied = []
            for number, path in _migrations():
                if number in done:
                    continue
                async with connection.transaction():
                    await connection.execute(path.read_text())
                    await connection.execute(
                        "insert into schema_migrations (version, name) values (%s, %s)", [number, path.name]
                    )
                applied.append(path.name)
            return applied + absurd
    # ProgrammingError: an option in the URL that libpq does not know.
    except (psycopg.OperationalError, psycopg.ProgrammingError, pg.LockNotAvailable) as error:
        raise StoreUnavailable(f"cannot migrate: {str(error).splitlines()[0]}") from error


async def _bring_absurd_up_to_date(connection: psycopg.AsyncConnection[Any]) -> list[str]:
    """Put Absurd's schema in place, or take it from an older version to ours; returns what was done."""
    import absurdctl  # noqa: PLC0415  (only where migrations run: no service needs it)

    target = absurdctl.ABSURD_SCHEMA_TARGET_VERSION
    cursor = await connection.execute("select to_regprocedure('absurd.get_schema_version()') is not null")
    ((is_there,),) = await cursor.fetchall()
    if not is_there:
        async with connection.transaction():
            await connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
        return [f"absurd {target}"]
    cursor = await connection.execute("select absurd.get_schema_version()")
    ((found,),) = await cursor.fetchall()
    steps = absurd_steps(found, target, absurdctl.BUNDLED_MIGRATIONS)
    for name in steps:
        async with connection.transaction():
            await connection.execute(absurdctl.BUNDLED_MIGRATIONS[name])
    return [f"absurd {target}"] if steps else []


def absurd_steps(found: str, target: str, names: Iterable[str]) -> list[str]:
    """Which of Absurd's migrations (`FROM-TO.sql`) lead from one version to another, in order (PURE).

    None of them where `found` is newer: a later release of ours was here, and its schema serves this one too.
    """
    ranges = [name.removesuffix(".sql").split("-", 1) for name in names]
    steps = [(source, to) for source, to in ranges if _version(found) < _version(to) <= _version(target)]
    return [f"{source}-{to}.sql" for source, to in sorted(steps, key=lambda step: _version(step[0]))]


def _version(text: str) -> tuple[float, ...]:
    """Numbers to compare by; what is none, a development version, is newer than all."""
    return tuple(float(part) if part.isdecimal() else math.inf for part in text.split("."))


def _refuse_others(applied: Mapping[int, str]) -> None:
    for number, path in _migrations():
        if applied.get(number, path.name) != path.name:
            raise OtherMigrations(
                f"DATABASE_URL: migration {number} was {applied[number]} there, not {path.name}: use another database"
            )


def _migrations() -> list[tuple[int, Any]]:
    folder = resources.files("common.store").joinpath("migrations")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [(int(f.name.split("_", 1)[0]), f) for f in files]
