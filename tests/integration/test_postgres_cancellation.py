"""Whoever waits for Postgres may be cancelled at any point: it ends, and costs the process nothing."""

import asyncio
import random

import psycopg
from support import eventually

from common.errors import StoreUnavailable
from common.store.postgres import CONNECTIONS_MAX, POOL_TIMEOUT_S, Postgres, open_postgres

STEPS_MAX = 60
CANCELS = 400
TIMEOUTS = 1500


async def test_a_cancellation_is_never_lost_while_connections_are_waited_for(postgres_url: str) -> None:
    """On Python 3.11 the pool loses some: it waits in `asyncio.wait_for`. A relay whose runs end at the same moment
    waits for ever then, for the loop that writes their records.
    """

    async def ask_for_ever() -> None:
        while True:
            await postgres.fetch("applied_migrations")

    async with open_postgres(postgres_url) as postgres:
        for steps in range(STEPS_MAX):
            tasks = [asyncio.create_task(ask_for_ever()) for _ in range(2 * CONNECTIONS_MAX)]
            for _ in range(steps):
                await asyncio.sleep(0)  # one step of the loop: all points of waiting are met in the end
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5.0)
            assert all(task.cancelled() for task in tasks), f"after {steps} steps"


async def test_callers_that_leave_take_no_connection_with_them(postgres_url: str) -> None:
    """The pool gives a connection to whoever is being cancelled at that moment, and never sees it again: a gateway
    whose callers hang up, or a relay whose runs end, would be without Postgres until it is started anew.
    """

    async def ask_for_ever() -> None:
        while True:
            await postgres.fetch("applied_migrations")

    chance = random.Random(1)
    async with (
        open_postgres(postgres_url) as postgres,
        await psycopg.AsyncConnection.connect(postgres_url) as other,
    ):
        tasks = [asyncio.create_task(ask_for_ever()) for _ in range(3 * CONNECTIONS_MAX)]
        for _ in range(CANCELS):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            leaving = chance.randrange(len(tasks))
            tasks[leaving].cancel()
            await asyncio.wait([tasks[leaving]], timeout=0.001)
            tasks[leaving] = asyncio.create_task(ask_for_ever())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _use_all(postgres, other)


async def test_callers_whose_time_is_over_take_no_connection_with_them(postgres_url: str) -> None:
    """A connection comes at the moment at which its caller has waited for long enough: somebody else has it then."""
    answers = {"given": 0, "refused": 0}

    async def ask_for_ever() -> None:
        while True:
            try:
                await postgres.fetch("applied_migrations")
                answers["given"] += 1
            except StoreUnavailable:
                answers["refused"] += 1

    chance = random.Random(1)
    async with (
        open_postgres(postgres_url) as postgres,
        await psycopg.AsyncConnection.connect(postgres_url) as other,
    ):
        tasks = [asyncio.create_task(ask_for_ever()) for _ in range(6 * CONNECTIONS_MAX)]
        while answers["given"] < TIMEOUTS or answers["refused"] < TIMEOUTS:
            postgres._pool.timeout = chance.uniform(0.002, 0.06)
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        postgres._pool.timeout = POOL_TIMEOUT_S
        await _use_all(postgres, other)


async def _use_all(postgres: Postgres, other: psycopg.AsyncConnection) -> None:
    """See that all connections can be used at once still: so many statements wait for a lock."""
    await other.execute("lock table schema_migrations")
    asking = [asyncio.create_task(postgres.fetch("applied_migrations")) for _ in range(CONNECTIONS_MAX)]
    await eventually(lambda: _all_wait(other))
    await other.rollback()
    await asyncio.gather(*asking)


async def _all_wait(holder: psycopg.AsyncConnection) -> bool:
    """Whether as many statements as there are connections wait for the lock that `holder` has."""
    cursor = await holder.execute(
        "select count(*) from pg_locks where relation = 'schema_migrations'::regclass and not granted"
    )
    return await cursor.fetchone() == (CONNECTIONS_MAX,)
