"""Jobs over HTTP: the happy path, reading, listing, cancelling; and what it costs."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_door import HEARTBEAT_S, Door, open_door
from support import eventually

from harness.servers import Servers
from towline.wire.frames import Hints

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway."""
    async with open_door(servers, postgres_url, state_directory / "jobs") as opened:
        yield opened


async def submit(
    client: httpx.AsyncClient, user: str, key: str, *, headers: dict[str, str] | None = None, **members: Any
) -> httpx.Response:
    """Submit a job with a key."""
    body = {"name": "write", **members}
    return await client.post(f"/v1/users/{user}/jobs", json=body, headers={"idempotency-key": key, **(headers or {})})


async def test_a_job_reaches_its_machine_as_it_was_accepted(door: Door) -> None:
    """What the session takes: the caller's key, canonical args, times by the server's clock, the trace, the hint."""
    async with door.machine("path") as machine, door.client() as client:
        answer = await submit(
            client,
            "path",
            "k",
            name="read",
            args={"b": [1, 1.0, "é"], "a": {}},
            timeout_s=7,
            deadline_s=60.5,
            headers={"traceparent": TRACEPARENT},
        )
        accepted = answer.json()
        entry = (await machine.take()).entry
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{accepted['job']}"
    assert "preference-applied" not in answer.headers
    assert (accepted["state"], accepted["attempts"], accepted["replayed"]) == ("queued", 0, False)
    assert set(accepted) == {"job", "user", "name", "state", "attempts", "accepted_at", "deadline_at", "replayed"}
    assert (entry.job, entry.key, entry.name) == (accepted["job"], "k", "read")
    assert bytes(entry.args) == '{"a":{},"b":[1,1.0,"é"]}'.encode()
    assert (entry.timeout_s, entry.deadline_ms - entry.accepted_ms) == (7, 60_500)
    assert (entry.hinted, entry.traceparent) == (True, TRACEPARENT)
    accepted_at = datetime.fromisoformat(accepted["accepted_at"])
    assert accepted_at == datetime.fromtimestamp(entry.accepted_ms / 1000, UTC)
    assert abs((datetime.now(UTC) - accepted_at).total_seconds()) < 60


async def test_the_worker_that_holds_the_socket_is_told(door: Door) -> None:
    """One note per job, by the presence that the door saw."""
    async with door.machine("note") as machine, door.client() as client:
        await submit(client, "note", "k")
        await eventually(lambda: machine.notes)
    assert machine.notes[0]["note"] == "work"
    assert machine.notes[0]["user"] == "note"


async def test_a_broken_traceparent_is_dropped_and_fails_nothing(door: Door) -> None:
    """As W3C Trace Context says."""
    async with door.machine("trace") as machine, door.client() as client:
        for n, value in enumerate(("", "ff-1", TRACEPARENT.upper(), TRACEPARENT + "-x", "00-" + "0" * 32 + "-1-01")):
            assert (await submit(client, "trace", str(n), headers={"traceparent": value})).status_code == 202
            assert (await machine.take()).entry.traceparent == ""


async def test_unknown_tools_are_refused_only_of_a_machine_that_is_there(door: Door) -> None:
    """422 while it is connected; for one that is away the job is kept and counts as one with side effects."""
    async with door.client() as client:
        async with door.machine("tools", read=Hints(read_only=True)):
            answer = await submit(client, "tools", "k", name="other")
            assert (answer.status_code, answer.json()["type"]) == (422, "/problems/unknown-tool")
            answer = await submit(client, "tools", "k", name="other", if_offline="queue")
            assert answer.status_code == 422
        assert (await submit(client, "tools2", "k", name="read", if_offline="queue")).status_code == 202
    assert await door.rows("select user_id, hinted from requests where user_id like 'tools%%'") == [("tools2", False)]


async def test_a_lost_catalogue_is_looked_up_where_it_is_durable(door: Door) -> None:
    """After a Redis loss presence is back a heartbeat before the catalogue: nobody is told `unknown-tool` for that."""
    async with door.machine("catalogue") as machine, door.client() as client:
        await door.commands.delete("bridge:tools:catalogue")
        assert (await submit(client, "catalogue", "a", name="read")).status_code == 202
        assert (await submit(client, "catalogue", "b", name="write")).status_code == 202
        assert (await submit(client, "catalogue", "c", name="none")).status_code == 422
        assert [(await machine.take()).entry.hinted for _ in range(2)] == [True, False]


async def test_a_job_is_read_in_every_state(door: Door) -> None:
    """202 until it has ended, 200 then; a GET replays nothing."""
    async with door.machine("read") as machine, door.client() as client:
        path = (await submit(client, "read", "k")).headers["location"]

        async def state() -> tuple[int, str, bool]:
            answer = await client.get(path)
            return answer.status_code, answer.json()["state"], answer.json()["replayed"]

        assert await state() == (202, "queued", False)
        job = (await machine.take()).entry.job
        await machine.begin(job)
        assert await state() == (202, "processing", False)
        await machine.finish(job, {"result": [1]})
        assert await state() == (200, "completed", False)
        head = await client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len((await client.get(path)).content))


async def test_jobs_are_listed_newest_first_page_by_page(door: Door) -> None:
    """Nothing twice, nothing missing; by state and by key too."""
    async with door.machine("list") as machine, door.client() as client:
        jobs = [(await submit(client, "list", f"k{n}")).json()["job"] for n in range(5)]
        await machine.run_next()
        listed: list[str] = []
        cursor = ""
        while cursor is not None:
            page = (await client.get(f"/v1/users/list/jobs?limit=2{cursor and '&cursor=' + cursor}")).json()
            assert len(page["items"]) <= 2
            listed += [item["job"] for item in page["items"]]
            cursor = page["next_cursor"]
        assert listed == jobs[::-1]
        ended = (await client.get("/v1/users/list/jobs?state=completed")).json()["items"]
        assert [(item["job"], item["outcome"]) for item in ended] == [(jobs[0], {"result": "done"})]
        assert (await client.get("/v1/users/list/jobs?idempotency_key=k3")).json()["items"][0]["job"] == jobs[3]
        assert (await client.get("/v1/users/list/jobs?idempotency_key=%F0%9F%94%91")).json()["items"] == []
        assert (await client.get("/v1/users/nobody/jobs")).json() == {"items": [], "next_cursor": None}


async def test_a_queued_job_is_cancelled_and_leaves_nothing_behind(door: Door) -> None:
    """200, whoever waits is told, the queue is empty, and the key answers `cancelled` from now on."""
    async with door.machine("cancel") as machine, door.client() as client:
        call = asyncio.create_task(submit(client, "cancel", "k", headers={"prefer": "wait=20"}))
        listed = await eventually(lambda: _listed(client, "cancel"))
        cancelled = await client.delete(f"/v1/jobs/{listed[0]['job']}")
        assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
        assert cancelled.json()["outcome"]["error"]["code"] == "cancelled"
        assert (await call).json()["state"] == "cancelled"
        assert (await client.delete(f"/v1/jobs/{listed[0]['job']}")).status_code == 200
        assert (await submit(client, "cancel", "k")).json()["state"] == "cancelled"
        assert await door.commands.xlen("bridge:jobs:cancel") == 0
        assert await door.commands.hget("bridge:jobs_index:cancel", "bytes") in (None, b"0")
        assert "cancel" not in [note["note"] for note in machine.notes]


async def test_a_begun_job_is_cancelled_by_its_machine(door: Door) -> None:
    """202: the worker is told, and the job ends as the machine says."""
    async with door.machine("begun") as machine, door.client() as client:
        path = (await submit(client, "begun", "k")).headers["location"]
        job = (await machine.take()).entry.job
        await machine.begin(job)
        answer = await client.delete(path)
        assert (answer.status_code, answer.json()["state"]) == (202, "processing")
        await eventually(lambda: _note(machine, "cancel", job))
        await machine.finish(job, {"result": "too late to stop"})
        assert (await client.delete(path)).json()["state"] == "completed"


async def test_a_hinted_job_that_may_be_out_already_is_stopped_too(door: Door) -> None:
    """Its first delivery leaves no mark, so it still counts as queued: cancelled, and the worker is told."""
    async with door.machine("hinted") as machine, door.client() as client:
        path = (await submit(client, "hinted", "k", name="read")).headers["location"]
        job = (await machine.take()).entry.job
        assert (await client.delete(path)).json()["state"] == "cancelled"
        await eventually(lambda: _note(machine, "cancel", job))
        assert not (await machine.finish(job, {"result": 1})).won


async def test_what_a_job_costs_the_stores(door: Door) -> None:
    """Counted: a script to ask, a commit, a script to enqueue; in flight together they cost no more than singly."""
    async with door.client() as client:
        await submit(client, "cost", "warm", if_offline="queue")  # scripts loaded, API key remembered
        for concurrency, calls in ((1, 20), (64, 64)):
            scripts_before, transactions_before = await _scripts(door), await _transactions(door)
            for first in range(0, calls, concurrency):
                keys = [f"{concurrency}-{n}" for n in range(first, first + concurrency)]
                await asyncio.gather(*(submit(client, "cost", key, if_offline="queue") for key in keys))
            assert await _scripts(door) - scripts_before == 2 * calls
            # A few of the server's own (autovacuum) are not ours.
            assert await _transactions(door) - transactions_before <= calls + 3
    assert await door.count("cost") == 85


async def test_a_wait_costs_the_stores_nothing_but_its_reply(door: Door) -> None:
    """Nobody polls: between acceptance and outcome this caller's gateway runs no script and no statement for it."""
    async with door.machine("quiet") as machine, door.client() as client:
        call = asyncio.create_task(submit(client, "quiet", "k", headers={"prefer": "wait=20"}))
        job = (await machine.take()).entry.job
        await machine.vanish()  # its own heartbeat would be counted
        before, began = await _scripts(door), time.monotonic()
        await asyncio.sleep(HEARTBEAT_S)
        scripts, heartbeats = await _scripts(door) - before, (time.monotonic() - began) / HEARTBEAT_S
        assert scripts <= 1 + heartbeats  # each looks at presence once for all waiters
        await machine.finish(job, {"result": 1})
        assert (await call).status_code == 200


async def _scripts(door: Door) -> int:
    """Scripts that Redis has run."""
    stats = await door.commands.info("commandstats")
    return sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval"))


async def _transactions(door: Door) -> int:
    """Transactions that have written, in the whole cluster."""
    (row,) = await door.rows("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    return int(row[0])


async def _listed(client: httpx.AsyncClient, user: str) -> Any:
    return (await client.get(f"/v1/users/{user}/jobs")).json()["items"]


def _note(machine: Any, kind: str, job: str) -> bool:
    return any(note["note"] == kind and note.get("job") == job for note in machine.notes)
