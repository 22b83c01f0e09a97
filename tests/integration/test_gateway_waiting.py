"""Waiting for an outcome: told at once, told of a lapse, never told wrongly, and let go when the gateway leaves."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_door import HEARTBEAT_S, Door, Machine, open_door
from support import eventually

from common.ids import JobId
from common.store import keys
from common.store.replies import REREAD_EVERY_S
from harness.faults import TcpProxy
from harness.servers import Servers
from harness.stack import Gateway

# A reply is a few milliseconds; the net under it comes round every five seconds. In between lies neither.
AT_ONCE_S = 2.0


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway with three places to wait."""
    env = {"TOWLINE_WAITERS_MAX": "3"}
    async with open_door(servers, postgres_url, state_directory / "waiting", env=env) as opened:
        yield opened


def waiting(client: httpx.AsyncClient, user: str, key: str = "k", *, wait_s: int = 20, **members: Any) -> Any:
    """A submission that waits, under way."""
    call = client.post(
        f"/v1/users/{user}/jobs",
        json={"name": "write", **members},
        headers={"idempotency-key": key, "prefer": f"respond-async, wait={wait_s}"},
    )
    return asyncio.create_task(call)


async def outstanding(machine: Machine) -> JobId:
    """Take the job of a waiting caller and mark it begun; returns its id."""
    taken = await machine.take()
    await machine.begin(taken.entry.job)
    return taken.entry.job


async def test_the_submitter_a_joiner_and_a_reader_are_told_at_once(door: Door) -> None:
    """Each gets the outcome by the reply, long before any record is read again."""
    async with door.machine("told") as machine, door.client() as client:
        first = waiting(client, "told")
        job = await outstanding(machine)
        joined = waiting(client, "told")
        read = asyncio.create_task(client.get(f"/v1/jobs/{job}", headers={"prefer": "wait=20"}))
        await eventually(lambda: _waits(door, 3))
        began = time.monotonic()
        await machine.finish(job, {"result": "x"})
        answers = await asyncio.gather(first, joined, read)
    assert time.monotonic() - began < AT_ONCE_S
    assert [answer.status_code for answer in answers] == [200] * 3
    assert {answer.headers["preference-applied"] for answer in answers} == {"wait=20"}
    assert [answer.json()["replayed"] for answer in answers] == [False, True, False]
    assert {str(answer.json()["outcome"]) for answer in answers} == {"{'result': 'x'}"}
    assert answers[0].json()["attempts"] == 1
    assert answers[0].json()["ended_at"] == answers[2].json()["ended_at"]


async def test_an_outcome_too_large_for_a_reply_is_read_from_the_record(door: Door) -> None:
    """The reply is a reference then; the caller notices nothing."""
    result = "r" * (keys.REPLY_INLINE_BYTES_MAX + 1)
    async with door.machine("large") as machine, door.client() as client:
        call = waiting(client, "large")
        job = await outstanding(machine)
        began = time.monotonic()
        await machine.finish(job, {"result": result})
        answer = await call
    assert time.monotonic() - began < AT_ONCE_S
    assert answer.json()["outcome"] == {"result": result}


async def test_a_lost_reply_costs_seconds_and_not_the_answer(door: Door) -> None:
    """The outcome is durable and nobody was told: one slow statement finds it for all waiters."""
    async with door.machine("lost") as machine, door.client() as client:
        call = waiting(client, "lost")
        job = await outstanding(machine)
        began = time.monotonic()
        await machine.finish(job, {"result": 1}, settle=False)
        answer = await call
    assert answer.status_code == 200
    assert time.monotonic() - began < REREAD_EVERY_S + AT_ONCE_S


async def test_a_timeout_reads_once_more_before_it_says_not_yet(door: Door) -> None:
    """The outcome became durable without a reply, just before the caller's time was over."""
    async with door.machine("late") as machine, door.client() as client:
        call = waiting(client, "late", wait_s=2)
        job = await outstanding(machine)
        await machine.finish(job, {"result": 1}, settle=False)
        answer = await call
    assert answer.status_code == 200


async def test_a_wait_that_is_over_is_202(door: Door) -> None:
    """With where to read on, and the wait that was applied; more than the maximum is cut to it."""
    async with door.machine("over"), door.client() as client:
        began = time.monotonic()
        answer = await waiting(client, "over", wait_s=1)
        assert 0.9 < time.monotonic() - began < 1 + AT_ONCE_S
        assert answer.status_code == 202
        assert answer.headers["preference-applied"] == "wait=1"
        job = (await client.get(answer.headers["location"])).json()
        assert (job["state"], "machine" in job) == ("queued", False)
        await client.delete(answer.headers["location"])
        ended = await client.get(answer.headers["location"], headers={"prefer": "wait=301"})
        assert ended.status_code == 200


async def test_who_waits_for_a_machine_that_lapses_is_told(door: Door) -> None:
    """The lid is closed in mid-job: 202 and `machine: offline` within a TTL and a heartbeat, not after the wait."""
    async with door.machine("lid") as machine, door.client() as client:
        call = waiting(client, "lid")
        job = await outstanding(machine)
        read = asyncio.create_task(client.get(f"/v1/jobs/{job}", headers={"prefer": "wait=20"}))
        await eventually(lambda: _waits(door, 2))
        closed_at = time.monotonic()
        await machine.vanish()
        answers = await asyncio.gather(call, read)
        assert time.monotonic() - closed_at < 4 * HEARTBEAT_S + AT_ONCE_S
        for answer in answers:
            assert (answer.status_code, answer.json()["machine"]) == (202, "offline")
            assert answer.json()["state"] == "processing"
        # The caller comes back with its key while the machine is away, and is told again.
        again = await waiting(client, "lid")
        assert (again.status_code, again.json()["machine"], again.json()["job"]) == (202, "offline", job)


async def test_who_queues_for_an_absent_machine_is_not_told_that_it_is_absent(door: Door) -> None:
    """Its caller knows. When it comes, works and goes again, that is news."""
    async with door.client() as client:
        call = waiting(client, "queued", if_offline="queue")
        await eventually(lambda: _waits(door, 1))
        await asyncio.sleep(3 * HEARTBEAT_S)  # looks at presence that find nobody
        assert not call.done()
        async with door.machine("queued") as machine:
            await outstanding(machine)
            await asyncio.sleep(2 * HEARTBEAT_S)  # a look that finds it
            await machine.leave(grace_ms=None)
        answer = await call
    assert (answer.status_code, answer.json()["machine"]) == (202, "offline")


async def test_when_no_more_may_wait_nothing_is_accepted_that_would(door: Door) -> None:
    """503 before anything is recorded; whoever does not wait, or joins what is recorded, is served."""
    async with door.machine("many") as machine, door.client() as client:
        calls = [waiting(client, "many", key) for key in "abc"]
        await eventually(lambda: _waits(door, 3))
        refused = await waiting(client, "many", "d")
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/too-many-waiters")
        assert int(refused.headers["retry-after"]) >= 1
        joined = await waiting(client, "many", "a")
        assert (joined.status_code, joined.headers["preference-applied"]) == (202, "wait=0")
        assert (await waiting(client, "many", "d", wait_s=0)).status_code == 202
        machine.serve()
        assert [(await call).status_code for call in calls] == [200] * 3
    assert await door.count("many") == 4


async def test_who_waits_for_a_turn_takes_such_a_place(door: Door) -> None:
    """There are so many in all, whatever is waited for."""
    async with door.machine("shared"), door.client() as client:
        await client.put("/v1/agents/clerk", json={"kind": "echo"})
        thread = (await client.post("/v1/threads", json={"agent": "clerk"})).json()["thread"]
        headers = {"idempotency-key": "k"}
        posted = await client.post(f"/v1/threads/{thread}/entries", json={"text": "hello"}, headers=headers)
        turn = posted.json()["turn"]["turn"]
        calls = [asyncio.create_task(client.get(f"/v1/turns/{turn}", headers={"prefer": "wait=20"})) for _ in range(3)]
        await eventually(lambda: _waits(door, 3))
        refused = await waiting(client, "shared", wait_s=1)
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/too-many-waiters")
        await client.delete(f"/v1/turns/{turn}")
        assert [(await call).json()["state"] for call in calls] == ["cancelled"] * 3


async def test_a_caller_who_hangs_up_frees_its_place(door: Door) -> None:
    """Long before its wait is over."""
    async with door.machine("hangup"), door.client() as client:
        calls = [waiting(client, "hangup", key, wait_s=300) for key in "abc"]
        await eventually(lambda: _waits(door, 3))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

        async def is_free() -> bool:
            return (await waiting(client, "hangup", "d", wait_s=1)).status_code == 202

        await eventually(is_free, within_s=5)


async def test_a_gateway_that_leaves_lets_its_waiters_go(door: Door) -> None:
    """SIGTERM: each waiting caller has its 202 and can go on elsewhere; the process ends well within its budgets, and
    takes its replies stream along.
    """
    others = await _replies_streams(door)
    gateway = await door.add_gateway()
    async with door.machine("leaving") as machine, door.client(gateway) as client, door.client() as elsewhere:
        told = waiting(client, "leaving", "told")
        await machine.run_next()
        assert (await told).status_code == 200
        assert await _replies_streams(door) - others
        call = waiting(client, "leaving", wait_s=300)
        job = await outstanding(machine)
        began = time.monotonic()
        gateway.term()
        answer = await call
        assert (answer.status_code, answer.headers["connection"]) == (202, "close")
        assert "machine" not in answer.json()
        assert await gateway.wait(within_s=10) == 0
        assert time.monotonic() - began < 3
        assert not await _replies_streams(door) - others
        joined = waiting(elsewhere, "leaving")
        await eventually(lambda: _waits(door, 1))
        await machine.finish(job, {"result": 1})
        assert (await joined).status_code == 200
    door.stack.gateways.remove(gateway)


@pytest.mark.parametrize("loss", ["connection", "everything"])
async def test_waiters_survive_a_loss_of_redis(door: Door, loss: str) -> None:
    """The connection breaks, or Redis loses all it held, under a waiting caller: it is told of the outcome at once or
    by the next reading of its record, and replies flow again afterwards.
    """
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start()})
    user = f"loss-{loss}"
    try:
        async with door.client(gateway) as client, door.machine(user) as machine:
            call = waiting(client, user)
            job = await outstanding(machine)
            if loss == "everything":
                await door.commands.flushdb()
            proxy.cut()
            await machine.finish(job, {"result": 1})
            assert (await call).status_code == 200
        async with door.client(gateway) as client, door.machine(f"{user}-2") as machine:
            machine.serve()

            async def flows() -> bool:
                began = time.monotonic()
                answer = await waiting(client, f"{user}-2", str(began))
                return answer.status_code == 200 and time.monotonic() - began < AT_ONCE_S

            await eventually(flows, within_s=20)
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def test_waiters_are_registered_again_when_redis_is_back(door: Door) -> None:
    """A replica that took over may never have heard of them: they are told at once all the same, not by the next
    reading of their records."""
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start()})
    try:
        async with door.client(gateway) as client, door.machine("forgotten") as machine:
            call = waiting(client, "forgotten")
            job = await outstanding(machine)
            await door.commands.delete(keys.waiters(job))
            proxy.cut()
            await eventually(lambda: door.commands.exists(keys.waiters(job)), within_s=REREAD_EVERY_S)
            began = time.monotonic()
            await machine.finish(job, {"result": 1})
            assert (await call).status_code == 200
            assert time.monotonic() - began < AT_ONCE_S
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def _replies_streams(door: Door) -> set[bytes]:
    return set(await door.commands.keys(f"{keys.REPLIES_PREFIX}*"))


async def _waits(door: Door, callers: int) -> bool:
    """Whether exactly this many callers wait on the first gateway: one more or less could have been let in."""
    gateway: Gateway = door.stack.gateways[0]
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{gateway.admin_port}/metrics")).text
    return f"towline_waiters {float(callers)}" in text
