"""Faults of the stores under the whole product: the door says 503, and each job runs once and ends once all the same.

Each test has jobs under way at every stage, makes the fault, sees that it is there, ends it, and counts. Restarts, a
flush and standstills are drills (`test_store_drills.py`); a fail-over is in `test_store_fail_over.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import psycopg
import pytest
from faulty_stores import CONNECTIONS_MAX, USER, World, refused, under_way
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError
from support import eventually

from common.store import keys
from harness.runner import temporary_directory

LOADED_KEYS = 30_000
# Fewer than the tries of a statement.
WAVES = 8
TRIES_MAX = 3
# Longer than it takes to take all connections of Postgres, on a busy machine.
TOOL_S = 8.0


@pytest.fixture(scope="module")
async def world() -> AsyncIterator[World]:
    with temporary_directory() as directory:
        async with World(directory).running() as world:
            yield world


# ---- Redis


@contextlib.asynccontextmanager
async def read_only(world: World) -> AsyncIterator[None]:
    """It is a replica of a primary that is away."""
    await world.client.replicaof("127.0.0.1", 1)
    with pytest.raises(ReadOnlyError):
        await world.client.set("x", "y")
    try:
        yield
    finally:
        await world.client.replicaof("NO", "ONE")


@contextlib.asynccontextmanager
async def out_of_memory(world: World) -> AsyncIterator[None]:
    await world.client.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        await world.client.set("x", "y")
    try:
        yield
    finally:
        await world.client.config_set("maxmemory", 0)


@contextlib.asynccontextmanager
async def loading(world: World) -> AsyncIterator[None]:
    """It was killed, and takes seconds to load what it had."""
    async with world.client.pipeline(transaction=False) as pipeline:
        for n in range(LOADED_KEYS):
            pipeline.set(f"ballast:{n}", "x")
        await pipeline.execute()
    world.valkey.kill()
    start = asyncio.create_task(world.valkey.start())

    async def is_loading() -> bool:
        try:
            await world.client.ping()
        except BusyLoadingError:
            return True
        except RedisError:
            pass
        return False

    await eventually(is_loading)
    try:
        yield
    finally:
        await start


@pytest.mark.parametrize("fault", [read_only, out_of_memory, loading], ids=lambda fault: fault.__name__)
async def test_redis_refuses(world: World, fault: Callable[[World], AbstractAsyncContextManager[None]]) -> None:
    """Connections stand, or come back at once; it is the answers that say no."""
    name = fault.__name__
    calls = await under_way(world, name)
    async with fault(world):
        calls |= await refused(world, name)
    await world.ended_once(name, calls, time.monotonic())


async def test_redis_forgets_scripts_and_groups(world: World) -> None:
    """Nothing is away, and nobody is refused; what a session holds is in no group any more, nor is what waits."""
    calls = await under_way(world, "forgets", seconds=1.5)
    await world.client.script_flush()
    assert await world.client.xgroup_destroy(keys.jobs(USER), keys.GROUP) == 1
    await world.ended_once("scripts and groups forgotten", calls, time.monotonic())
    assert not world.refusals.keys() & calls.keys()


# ---- Postgres


async def test_postgres_loses_its_backends_again_and_again(world: World) -> None:
    """Each statement is repeated on another connection, more often than it can be struck here: nobody hears of it."""
    calls = await under_way(world, "killed")
    killed = 0
    for n in range(WAVES):
        calls[f"killed-{n}"] = world.start(f"killed-{n}")
        killed += len(await kill_backends(world))
        await asyncio.sleep(0.1)  # the next wave meets other statements
    assert killed >= WAVES
    await world.ended_once("backends killed", calls, time.monotonic())
    assert not world.refusals.keys() & calls.keys()


async def test_postgres_has_no_connection_left(world: World) -> None:
    """Others hold all of them. A tool that ends meanwhile is not answered before its outcome is durable."""
    calls = await under_way(world, "exhausted", seconds=TOOL_S)
    ends_at = time.monotonic() + TOOL_S
    async with all_connections(world):
        calls |= await refused(world, "exhausted", callers=4)
        await asyncio.sleep(max(0.0, ends_at + 0.5 - time.monotonic()))  # the tool has ended by then
        assert not any(call.done() for call in calls.values())
    await world.ended_once("connections exhausted", calls, time.monotonic())


@contextlib.asynccontextmanager
async def all_connections(world: World) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(await psycopg.AsyncConnection.connect(world.postgres.url))
        await first.set_autocommit(True)
        taken = 1
        while taken < CONNECTIONS_MAX:
            try:
                more = await psycopg.AsyncConnection.connect(world.postgres.url)
            except psycopg.OperationalError:
                await first.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^towline'"
                )
            else:
                await stack.enter_async_context(more)
                taken += 1
        ours = await first.execute("select 1 from pg_stat_activity where application_name ~ '^towline'")
        assert await ours.fetchall() == []
        yield


async def kill_backends(world: World) -> list[Any]:
    return await world.rows(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^towline'"
    )


async def test_the_answer_to_a_commit_is_lost(world: World) -> None:
    """At acceptance, at the begin mark, and at the outcome: each is repeated, and finds what is there."""
    for n in range(TRIES_MAX):
        key, ahead = f"commit-{n}", f"commit-ahead-{n}"
        calls = {ahead: world.start(ahead, seconds=1.5)}
        await world.began(ahead)
        accept = world.to_postgres.cut_after(key.encode())
        answer = await world.ask(key, wait_s=0)
        assert accept.happened.is_set()
        assert answer.status_code == 202
        # Nobody waits for it, so that it is named next by the worker: in its mark, and then with its outcome.
        mark = world.to_postgres.cut_after(answer.json()["job"].encode())
        outcome = world.to_postgres.cut_after(f"clicked {key}".encode())
        await eventually(outcome.happened.is_set)
        assert mark.happened.is_set()
        calls[key] = world.start(key)
        await world.ended_once("answers to commits lost", calls, time.monotonic())
        if await world.rows("select attempts from requests where key = %s", key) == [(2,)]:
            return  # marked, and marked again
        # On a slow machine the sweeper asks for what comes after this job before it is its turn.
    pytest.fail("no mark lost its answer")
