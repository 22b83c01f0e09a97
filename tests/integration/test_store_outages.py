"""Stores that are away: every call says `StoreUnavailable` in time, nothing is half done, and all is well afterwards.

The servers here are this module's own, for they are killed, frozen and started again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from job_stores import Holder, accepted, finished, names, new_job, new_user, queued
from support import eventually

from common.errors import StoreUnavailable
from common.ids import GatewayId, JobId, MachineId, WorkerId, new_id
from common.store import control, keys
from common.store.jobs import Jobs
from common.store.postgres import Postgres, migrate, open_postgres
from common.store.presence import leave
from common.store.records import Begin, Finish
from common.store.redis import Redis, open_redis
from common.store.requests import Requests
from common.store.tokens import Held, Tokens
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.faults import TcpProxy
from harness.runner import temporary_directory

GATEWAY = GatewayId("gateway-1")
# No call may keep its caller longer: two tries of a connection, or a timeout of a command.
ANSWERED_WITHIN_S = 15.0


@pytest.fixture(scope="module")
async def directory() -> AsyncIterator[Path]:
    with temporary_directory() as path:
        yield path


@pytest.fixture(scope="module")
async def valkey(directory: Path) -> AsyncIterator[EmbeddedValkey]:
    server = EmbeddedValkey(directory)
    await server.start()
    yield server
    server.thaw()
    await server.stop()


@pytest.fixture(scope="module")
async def postgres_server(directory: Path) -> AsyncIterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(directory)
    await migrate(await server.start())
    yield server
    await server.stop()


@pytest.fixture
async def redis_store(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    async with open_redis(valkey.url) as store:
        yield store


@pytest.fixture
async def postgres(postgres_server: EmbeddedPostgres) -> AsyncIterator[Postgres]:
    async with open_postgres(postgres_server.url) as store:
        yield store


async def unavailable(call: Callable[[], Awaitable[object]]) -> None:
    """The call says so, in time."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await call()
    assert time.monotonic() - began < ANSWERED_WITHIN_S


async def test_a_redis_that_refuses_the_handshake_is_waited_for(valkey: EmbeddedValkey) -> None:
    """Wrong password, database or network: a service says why and waits, and nothing of it ends in a traceback."""
    address = urlsplit(valkey.url)
    wrong_password = address._replace(netloc=f":wrong@{address.hostname}:{address.port}").geturl()
    for url, reason in ((address._replace(path="/99999").geturl(), "refuses"), (wrong_password, "does not answer")):
        async with open_redis(url) as refused:
            with pytest.raises(StoreUnavailable, match=reason):
                await refused.check()
            with pytest.raises(StoreUnavailable):
                await refused.reader().read({"stream": "0-0"})


async def test_every_call_on_a_killed_redis_is_unavailable_and_works_again_after(
    valkey: EmbeddedValkey, redis_store: Redis, postgres: Postgres
) -> None:
    """Idle connections died with it; the first call afterwards may not fail for that for long."""
    jobs, requests, user = Jobs(redis_store), Requests(postgres, retention_s=3600), new_user()
    holder = Holder(redis_store, user, epoch=1)
    await holder.serve()
    record = await queued(requests, jobs, user)
    ended = await finished(requests, await accepted(requests, user))
    inbox = control.control_inbox(redis_store, WorkerId("worker-1"))
    assert redis_store.answering_for_s() > 0
    valkey.kill()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: jobs.ask(user, "echo"),
        lambda: jobs.enqueue(record, "{}", GATEWAY),
        lambda: jobs.enqueue_many([(record, "{}")]),
        lambda: jobs.register_waiter([record.job], GATEWAY),
        lambda: jobs.settle(ended),
        holder.serve,
        holder.take,
        lambda: leave(redis_store, user, 1, grace_ms=None),
        lambda: control.tell_worker(redis_store, WorkerId("worker-1"), {"note": "work", "user": user}),
        lambda: control.tell_gateway(redis_store, GATEWAY, {"x": "y"}),
        inbox.read,
        inbox.keep_alive,
        inbox.remove,
        redis_store.check,
    ]
    await asyncio.gather(*(unavailable(call) for call in calls))
    assert redis_store.answering_for_s() == 0
    await valkey.start()

    async def works() -> bool:
        try:
            return await jobs.enqueue(record, "{}", GATEWAY)
        except StoreUnavailable:
            return False

    await eventually(works)
    # It kept what it had acknowledged.
    served = await holder.serve()
    assert names(served.taken) == [record.job]
    await jobs.settle(ended)
    assert (await inbox.read())[0]["note"] == "work"
    assert redis_store.answering_for_s() > 0


async def test_a_frozen_redis_is_unavailable_within_the_command_timeout(
    valkey: EmbeddedValkey, redis_store: Redis
) -> None:
    """Its connections stand and nothing is answered."""
    jobs, user = Jobs(redis_store), new_user()
    await jobs.ask(user, "echo")
    valkey.freeze()
    try:
        await asyncio.gather(
            unavailable(lambda: jobs.ask(user, "echo")), unavailable(Holder(redis_store, user, 1).serve)
        )
        assert redis_store.answering_for_s() == 0
    finally:
        valkey.thaw()

    async def works() -> bool:
        try:
            return (await jobs.ask(user, "echo")).entries == 0
        except StoreUnavailable:
            return False

    await eventually(works)


async def test_an_answer_that_is_lost_is_made_good(valkey: EmbeddedValkey, postgres: Postgres) -> None:
    """Enqueue, take and settle ran, and nobody heard: the repetition changes nothing, the claim brings the entry."""
    proxy = TcpProxy(valkey.url)
    await proxy.start()
    try:
        async with open_redis(proxy.url) as lossy:
            jobs, requests, user = Jobs(lossy), Requests(postgres, retention_s=3600), new_user()
            holder = Holder(lossy, user, epoch=1)
            await holder.serve()
            # Every script is known to the server from here on: the answers that are lost are not those that say no.
            await jobs.settle(await finished(requests, await queued(requests, jobs, user)))
            assert await holder.take() == []
            record = await accepted(requests, user)

            cut = proxy.cut_after(record.job.encode())
            await unavailable(lambda: jobs.enqueue(record, "{}", GATEWAY))
            assert cut.happened.is_set()
            assert await jobs.enqueue(record, "{}", GATEWAY)
            assert (await jobs.ask(user, "echo")).entries == 1

            cut = proxy.cut_after(holder.session.encode())
            await unavailable(holder.take)
            assert cut.happened.is_set()
            assert await holder.take() == []  # it was taken, only the answer was lost
            (taken,) = (await holder.serve()).taken
            assert (taken.entry.job, taken.claimed) == (record.job, True)

            ended = await finished(requests, record)
            cut = proxy.cut_after(record.job.encode())
            await unavailable(lambda: jobs.settle(ended))
            assert cut.happened.is_set()
            await jobs.settle(ended)
            assert (await jobs.ask(user, "echo")).entries == 0
            replies = await lossy.send_many([("XLEN", keys.replies(GATEWAY))])
            assert replies == [1]
    finally:
        await proxy.stop()


async def test_every_call_on_a_killed_postgres_is_unavailable_and_works_again_after(
    postgres_server: EmbeddedPostgres, postgres: Postgres
) -> None:
    """Nothing half-written: what was accepted before is there, and can be ended."""
    requests, tokens, user = Requests(postgres, retention_s=3600), Tokens(postgres), new_user()
    record = await accepted(requests, user)
    _, value = await tokens.add_machine_token(user, "laptop", None)
    postgres_server.kill()
    finish = Finish(record.job, user, "completed", '{"result":1}', new_id())
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: requests.accept(new_job(user)),
        lambda: requests.find(record.scope, record.key),
        lambda: requests.read([record.job]),
        lambda: requests.begin(Begin(record.job, "m", "j")),
        lambda: requests.finish(finish),
        lambda: requests.give_up([record.job], "m", "j"),
        lambda: requests.expire(limit=1),
        lambda: requests.cancel(record.job, user),
        lambda: requests.open_jobs(older_than_s=0, younger_than_s=1, after=None, limit=1),
        lambda: requests.prune(limit=1),
        requests.depths,
        lambda: requests.list_of_user(user, state=None, key=None, before=None, limit=1),
        lambda: tokens.mint_session(value),
        lambda: tokens.still_valid([Held(new_id(), b"")]),
        lambda: tokens.find_api_key("x"),
        lambda: tokens.catalogue(user),
        lambda: tokens.see_machine(user, MachineId("m"), name="", version="", tools=[], epoch=1),
        postgres.check,
        lambda: migrate(postgres_server.url),
    ]
    await asyncio.gather(*(unavailable(call) for call in calls))
    await postgres_server.start()

    async def works() -> bool:
        try:
            return await requests.find(record.scope, record.key) == record
        except StoreUnavailable:
            return False

    await eventually(works, within_s=20)
    finished_now = await requests.finish(finish)
    assert finished_now is not None
    assert finished_now.won
    assert await tokens.mint_session(value) is not None


async def test_a_restart_of_postgres_between_two_calls_costs_no_error(
    postgres_server: EmbeddedPostgres, postgres: Postgres
) -> None:
    """Every pooled connection died while it lay idle; the caller is not to be told of an outage that is over."""
    requests, user = Requests(postgres, retention_s=3600), new_user()
    record = await accepted(requests, user)
    # As many connections as the pool may have.
    await asyncio.gather(*(requests.read([record.job]) for _ in range(50)))
    await postgres_server.restart()
    for _ in range(3):
        assert (await requests.read([record.job]))[record.job] == record


async def test_a_read_only_postgres_is_unavailable(postgres_server: EmbeddedPostgres, postgres: Postgres) -> None:
    """A demoted primary still answers reads; a write there is never reported as done."""
    requests, user = Requests(postgres, retention_s=3600), new_user()
    record = await accepted(requests, user)

    async def set_read_only(value: str) -> None:
        async with await psycopg.AsyncConnection.connect(postgres_server.url, autocommit=True) as connection:
            await connection.execute("set default_transaction_read_only = off")
            await connection.execute(f"alter system set default_transaction_read_only = {value}")
            await connection.execute("select pg_reload_conf()")

    async def is_refused() -> bool:
        try:
            await requests.accept(new_job(user))
        except StoreUnavailable:
            return True
        return False

    async def is_accepted() -> bool:
        return not await is_refused()

    await set_read_only("on")
    try:
        await eventually(is_refused)
        await unavailable(lambda: requests.begin(Begin(record.job, "m", "j")))
        assert (await requests.read([record.job]))[record.job] == record
    finally:
        await set_read_only("off")
    await eventually(is_accepted)


async def test_a_commit_whose_answer_is_lost_is_repeated_safely(postgres_server: EmbeddedPostgres) -> None:
    """The connection dies after the statement went out: the repetition finds the record that is there."""
    proxy = TcpProxy(postgres_server.url)
    await proxy.start()
    try:
        async with open_postgres(proxy.url) as lossy:
            requests, user = Requests(lossy, retention_s=3600), new_user()
            await accepted(requests, user)
            new = new_job(user, "lost-answer")
            cut = proxy.cut_after(b"lost-answer")
            answer = await requests.accept(new)
            assert cut.happened.is_set()
            assert (answer.inserted, answer.record.job) == (True, new.job)
            # The end is this worker's, to be counted by it, and no late answer: also beside another one in its batch.
            cut = proxy.cut_after(b"late_outcome")
            own, other = (Finish(new.job, user, "completed", f'{{"result":{n}}}', new_id()) for n in range(2))
            finished = await requests.finish(own)
            assert cut.happened.is_set()
            again = await asyncio.gather(*(requests.finish(each) for each in (other, own)))
            assert [each and each.won for each in (finished, *again)] == [True, False, True]
            assert {each and each.record.outcome for each in (finished, *again)} == {'{"result":0}'}
    finally:
        await proxy.stop()


async def test_a_postgres_that_falls_silent_is_unavailable_in_time(
    postgres_server: EmbeddedPostgres,
) -> None:
    """The link stands and nothing comes back, not even that the statement took too long."""
    proxy = TcpProxy(postgres_server.url)
    await proxy.start()
    try:
        async with open_postgres(proxy.url, answer_timeout_s=1.0) as silent:
            requests, user = Requests(silent, retention_s=3600), new_user()
            record = await accepted(requests, user)
            proxy.stall()
            began = time.monotonic()
            await unavailable(lambda: requests.read([record.job]))
            assert time.monotonic() - began < 4.0  # and not after psycopg's ten seconds of leaving
            await proxy.heal()
            assert await requests.read([record.job]) == {record.job: record}
    finally:
        await proxy.stop()


async def test_an_exhausted_pool_is_unavailable(postgres_server: EmbeddedPostgres, postgres: Postgres) -> None:
    """Waiting for a connection has a limit; the callers behind a lock get an answer."""
    requests, user = Requests(postgres, retention_s=3600), new_user()
    record = await accepted(requests, user)
    async with await psycopg.AsyncConnection.connect(postgres_server.url) as connection, connection.transaction():
        await connection.execute("select from requests where id = %s for update", [record.job])
        blocked = [asyncio.create_task(requests.cancel(record.job, user)) for _ in range(8)]
        await asyncio.sleep(0)
        await unavailable(lambda: requests.read([JobId(new_id())]))
        await connection.execute("select 1")
    assert sum(cancelled is not None for cancelled in await asyncio.gather(*blocked)) == 1
