"""One answer per key: on every replica, at the same instant or later, whatever else is refused."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_door import Door, open_door
from support import eventually

from harness.faults import TcpProxy
from harness.servers import Servers
from towline.wire.frames import Hints


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """Two gateways."""
    async with open_door(servers, postgres_url, state_directory / "idempotency", gateways=2) as opened:
        yield opened


async def submit(
    client: httpx.AsyncClient, user: str, key: str, *, wait_s: int | None = None, **members: Any
) -> httpx.Response:
    """Submit `write` with a key."""
    headers = {"idempotency-key": key} | ({} if wait_s is None else {"prefer": f"wait={wait_s}"})
    return await client.post(f"/v1/users/{user}/jobs", json={"name": "write", **members}, headers=headers)


async def test_concurrent_duplicates_on_two_replicas_are_one_job(door: Door) -> None:
    """Ten callers per key, spread over both gateways, all waiting: one record, one execution, one outcome."""
    keys = [f"order-{n}" for n in range(10)]
    async with door.machine("crowd") as machine, door.client() as a, door.client(door.stack.gateways[1]) as b:
        machine.serve()
        calls = [submit(client, "crowd", key, wait_s=20) for key in keys for client in (a, b) for _ in range(5)]
        answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200}
    seen = Counter((answer.json()["job"], str(answer.json()["outcome"])) for answer in answers)
    assert sorted(seen.values()) == [10] * 10
    assert sum(not answer.json()["replayed"] for answer in answers) == 10
    assert Counter(machine.executed) == Counter(job for job, _ in seen)
    assert await door.count("crowd") == 10


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("completed", {"result": {"z": 1, "a": [1.0, "é", None]}}),
        ("completed", {"result": None}),
        ("failed", {"error": {"code": "boom", "message": "no", "retryable": False}}),
        ("unknown", {"error": {"code": "cut-off", "message": "may have run", "retryable": False}}),
    ],
)
async def test_a_replay_is_the_same_bytes_on_every_replica(door: Door, state: str, outcome: Any) -> None:
    """Whatever the outcome, it is 200 and not run again; the replay says that it is one."""
    user = f"replay-{state}-{len(str(outcome))}"
    async with door.machine(user) as machine, door.client() as a, door.client(door.stack.gateways[1]) as b:
        first = asyncio.create_task(submit(a, user, "k", wait_s=20))
        taken = await machine.take()
        await machine.begin(taken.entry.job)
        await machine.finish(taken.entry.job, outcome, state=state)
        original = await first
        replays = [await submit(client, user, "k", wait_s=wait_s) for client in (a, b) for wait_s in (None, 20)]
    assert original.status_code == 200
    assert original.json()["outcome"] == outcome
    assert (original.json()["replayed"], "idempotent-replayed" in original.headers) == (False, False)
    expected = original.text.replace('"replayed":false', '"replayed":true')
    for replay in replays:
        assert replay.status_code == 200
        assert replay.text == expected
        assert replay.headers["idempotent-replayed"] == "true"
    assert await door.count(user) == 1


async def test_another_payload_is_marked_and_not_run(door: Door) -> None:
    """While the first runs and after it: the first one's answer, and the caller is told that it asked for other work.

    White space and the order of members are not other work; `1.0` for `1` is; `timeout_s` is not part of it.
    """
    async with door.machine("payload") as machine, door.client() as client:
        await submit(client, "payload", "k", args={"a": 1, "b": [2]})

        async def answers() -> list[Any]:
            variants = ({"b": [2], "a": 1}, {"a": 1.0, "b": [2]}, {"a": 1}, {"a": 1, "b": [2], "c": None})
            given = [await submit(client, "payload", "k", args=args, timeout_s=9) for args in variants]
            assert {answer.headers["idempotent-replayed"] for answer in given} == {"true"}
            return [answer.json().get("payload_matches", True) for answer in given]

        assert await answers() == [True, False, False, False]
        await machine.run_next()
        assert await answers() == [True, False, False, False]
    assert await door.count("payload") == 1


async def test_the_key_of_another_user_is_another_key(door: Door) -> None:
    """Scope: the user."""
    async with door.client() as client:
        jobs = [
            (await submit(client, user, "same", if_offline="queue")).json()["job"] for user in ("scope-a", "scope-b")
        ]
    assert jobs[0] != jobs[1]


async def test_a_strict_installation_refuses_another_payload(
    servers: Servers, postgres_url: str, state_directory: Path
) -> None:
    """422 while the first runs and after it; nothing new is recorded."""
    env = {"TOWLINE_IDEMPOTENCY": "strict"}
    async with (
        open_door(servers, postgres_url, state_directory / "strict", env=env) as door,
        door.machine("strict") as machine,
        door.client() as client,
    ):
        await submit(client, "strict", "k", args={"a": 1})
        for _ in range(2):
            refused = await submit(client, "strict", "k", args={"a": 2}, wait_s=5)
            assert refused.status_code == 422
            assert refused.json()["type"] == "/problems/idempotency-key-reused"
            if not machine.executed:
                await machine.run_next()
        assert (await submit(client, "strict", "k", args={"a": 1})).status_code == 200
        assert await door.count("strict") == 1


async def test_what_was_refused_at_the_door_may_be_tried_again(door: Door) -> None:
    """Nothing was recorded, so the key is free: offline first, then done."""
    async with door.client() as client:
        refused = await submit(client, "retry", "k")
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/machine-offline")
        async with door.machine("retry") as machine:
            machine.serve()
            done = await submit(client, "retry", "k", wait_s=20)
    assert (done.status_code, done.json()["replayed"]) == (200, False)


async def test_a_record_is_the_answer_whatever_the_door_would_refuse(door: Door) -> None:
    """Machine offline, tool unknown, queue full: a key that has a record is joined or replayed all the same."""
    async with door.client() as client:
        async with door.machine("before") as machine:
            await submit(client, "before", "done")
            await machine.run_next()
            await submit(client, "before", "open")
            await machine.leave(grace_ms=None)
        for key, status in (("done", 200), ("open", 202), ("new", 409)):
            assert (await submit(client, "before", key)).status_code == status
        async with door.machine("before", other=Hints()):
            for key, status in (("done", 200), ("open", 202), ("new", 422)):
                assert (await submit(client, "before", key)).status_code == status
            await door.redis.send_many([("HSET", "bridge:jobs_index:before", "bytes", 8 * 1024 * 1024)])
            for key, status in (("done", 200), ("open", 202), ("new", 429)):
                answer = await client.post(
                    "/v1/users/before/jobs", json={"name": "other"}, headers={"idempotency-key": key}
                )
                assert answer.status_code == status
            assert (answer.json()["type"], answer.headers["retry-after"]) == ("/problems/queue-full", "5")
    assert await door.count("before") == 2


async def test_a_replay_needs_no_redis(door: Door, state_directory: Path) -> None:
    """Redis out of reach: 503 with Retry-After for new work, the record for known work, `unknown` for presence."""
    async with door.machine("away") as machine, door.client() as client:
        await submit(client, "away", "done")
        await machine.run_next()
        await submit(client, "away", "open")
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start()})
    try:
        proxy.refuse()
        proxy.cut()
        async with door.client(gateway) as client:
            for key, status in (("done", 200), ("open", 202), ("new", 503)):
                answer = await submit(client, "away", key, wait_s=1)
                assert answer.status_code == status, key
            assert answer.json()["type"] == "/problems/store-unavailable"
            assert 1 <= int(answer.headers["retry-after"]) <= 3
            presence = (await client.get("/v1/users/away/presence?probe=true")).json()
            assert (presence["state"], presence["queued"], presence["probed"]) == ("unknown", None, False)
            await proxy.heal()

            async def recovered() -> bool:
                return (await submit(client, "away", "new", if_offline="queue")).status_code == 202

            await eventually(recovered)
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()
    assert await door.count("away") == 3


async def test_a_failed_enqueue_is_no_refusal(door: Door) -> None:
    """The record is durable and Redis is lost before it says that it has the job: 202, and the job is not lost."""
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start()})
    try:
        async with door.machine("enqueue") as machine, door.client(gateway) as client:
            cut = proxy.cut_after(b"needle-in-the-entry")
            answer = await submit(client, "enqueue", "k", args={"x": "needle-in-the-entry"})
            assert cut.happened.is_set()
            assert answer.status_code == 202
            again = await submit(client, "enqueue", "k", args={"x": "needle-in-the-entry"})
            assert again.json()["job"] == answer.json()["job"]
            await machine.run_next()
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def test_a_key_is_new_after_its_retention(door: Door) -> None:
    """Seven days after the end; the time is moved in the record."""
    async with door.machine("retention") as machine, door.client() as client:
        machine.serve()
        first = await submit(client, "retention", "k", wait_s=20)
        for days, is_new in ((6, False), (8, True)):
            await door.rows(
                "update requests set accepted_at = now() - %s * interval '1 day',"
                " ended_at = now() - %s * interval '1 day' where user_id = 'retention'",
                days,
                days,
            )
            again = await submit(client, "retention", "k", wait_s=20)
            assert again.status_code == 200
            assert (again.json()["job"] != first.json()["job"]) is is_new
            assert again.json()["replayed"] is not is_new
