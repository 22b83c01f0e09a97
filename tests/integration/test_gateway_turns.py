"""Turns over HTTP: read, waited for, cancelled; and what they used."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_door import Door, open_door
from gateway_streams import metric
from gateway_threads import Product
from support import eventually

from common.ids import new_id
from common.store import keys
from common.store.turns import cancelled, completed, failed
from common.store.usage import Used
from gateway.turn_waiters import REREAD_EVERY_S
from harness.faults import TcpProxy
from harness.servers import Servers
from towline.wire import events


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """Two gateways."""
    async with open_door(servers, postgres_url, state_directory / "turns", gateways=2) as opened:
        yield opened


@pytest.fixture
async def product(door: Door) -> AsyncIterator[Product]:
    async with Product(door) as opened:
        yield opened


async def is_waiting(door: Door, count: int = 1) -> None:
    await eventually(lambda: _is(door, "towline_waiters", count))


async def _is(door: Door, sample: str, wanted: float) -> bool:
    return await metric(door, sample) == wanted


async def wait_for(product: Product, turn: str, wait_s: int = 30) -> httpx.Response:
    return await product.client.get(f"/v1/turns/{turn}", headers={"prefer": f"wait={wait_s}"}, timeout=60)


# ---- reading and waiting


async def test_a_turn_says_where_it_stands(product: Product) -> None:
    """Queued, running with its attempt, ended: the same outcome for ever, and 200 only then."""
    turn = await product.post(await product.new_thread())
    path = f"/v1/turns/{turn['turn']}"
    queued = await product.client.get(path)
    assert (queued.status_code, queued.headers["location"]) == (202, path)
    assert queued.json() == turn
    claim = await product.begin(turn["turn"])
    running = await product.client.get(path)
    assert (running.status_code, running.json()["state"], running.json()["attempts"]) == (202, "running", 1)
    assert running.json()["started_at"]
    await product.end(claim, failed("agent-silent", "no answer within 595 s"))
    ended = await product.client.get(path)
    assert (ended.status_code, ended.json()["state"]) == (200, "failed")
    assert ended.json()["outcome"] == {"error": {"code": "agent-silent", "message": "no answer within 595 s"}}
    assert "location" not in ended.headers
    assert (await wait_for(product, turn["turn"])).json() == ended.json()


async def test_who_waits_is_woken_by_the_end(door: Door, product: Product) -> None:
    """Told by the thread's stream, not found by the slow look: six ends in a row cost less than two looks."""
    thread = await product.new_thread()
    began = time.monotonic()
    for n in range(6):
        turn = await product.post(thread)
        claim = await product.begin(turn["turn"])
        waiting = asyncio.create_task(wait_for(product, turn["turn"]))
        await is_waiting(door)
        await product.end(claim, completed(f"answer {n}"))
        answer = await waiting
        assert (answer.status_code, answer.json()["outcome"]["text"]) == (200, f"answer {n}")
        assert answer.headers["preference-applied"] == "wait=30"
    assert time.monotonic() - began < 2 * REREAD_EVERY_S
    await is_waiting(door, 0)


async def test_all_who_wait_are_woken_and_no_others(door: Door, product: Product) -> None:
    """Many callers of one turn, one of another turn of the same thread."""
    thread = await product.new_thread()
    turn, later = [(await product.post(thread))["turn"] for _ in range(2)]
    claim = await product.begin(turn)
    waiting = [asyncio.create_task(wait_for(product, turn)) for _ in range(20)]
    other = asyncio.create_task(wait_for(product, later))
    await is_waiting(door, 21)
    await product.end(claim)
    assert {answer.json()["state"] for answer in await asyncio.gather(*waiting)} == {"completed"}
    await is_waiting(door, 1)
    assert not other.done()
    await product.answer(later, "the second")
    assert (await other).json()["outcome"]["text"] == "the second"


@pytest.mark.parametrize("lost", ["never said", "flushed", "redis away"])
async def test_an_end_that_no_stream_tells_costs_seconds(door: Door, lost: str) -> None:
    """The slow look finds it in the record."""
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start()})
    try:
        async with Product(door, gateway) as product:
            turn = await product.post(await product.new_thread())
            claim = await product.begin(turn["turn"])
            if lost == "redis away":
                proxy.refuse()
                proxy.cut()
            waiting = asyncio.create_task(wait_for(product, turn["turn"]))
            await eventually(lambda: _waits_at(door, gateway))
            if lost == "flushed":
                await door.commands.delete(keys.thread_events(turn["thread"]))
            await product.end(claim, announce=False)
            answer = await asyncio.wait_for(waiting, REREAD_EVERY_S + 20)
            assert (answer.status_code, answer.json()["state"]) == (200, "completed")
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def _waits_at(door: Door, gateway: Any) -> bool:
    return await metric(door, "towline_waiters", gateway) == 1


async def test_a_wait_that_passes_is_answered_with_what_is(product: Product) -> None:
    """202, and where to read on."""
    turn = await product.post(await product.new_thread())
    answer = await wait_for(product, turn["turn"], 1)
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert answer.headers["preference-applied"] == "wait=1"


async def test_who_hangs_up_is_forgotten(door: Door, product: Product) -> None:
    """No waiter, no reader of the thread's stream."""
    turn = await product.post(await product.new_thread())
    waiting = asyncio.create_task(wait_for(product, turn["turn"]))
    await is_waiting(door)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await is_waiting(door, 0)


async def test_a_gateway_that_leaves_lets_its_callers_go(door: Door) -> None:
    """They are answered 202 at once, and ask another one."""
    gateway = await door.add_gateway()
    async with Product(door, gateway) as product:
        turn = await product.post(await product.new_thread())
        waiting = asyncio.create_task(wait_for(product, turn["turn"], 60))
        await eventually(lambda: _waits_at(door, gateway))
        door.stack.gateways.remove(gateway)
        await gateway.stop()
        assert (await waiting).status_code == 202


# ---- cancelling


async def test_a_turn_that_nobody_runs_is_cancelled_at_once(door: Door, product: Product) -> None:
    """Ended, said in the stream once, noted as said; the thread's next turn can be taken; twice is no error."""
    thread = await product.new_thread()
    first, second = [await product.post(thread) for _ in range(2)]
    before = await metric(door, 'towline_turns_total{outcome="cancelled"}')
    async with product.watch(thread) as watcher:
        await watcher.has(2)
        path = f"/v1/turns/{first['turn']}"
        answers = await asyncio.gather(*(product.client.delete(path) for _ in range(5)))
        assert {(answer.status_code, answer.json()["state"]) for answer in answers} == {(200, "cancelled")}
        assert answers[0].json()["outcome"]["error"]["code"] == "cancelled"
        await watcher.has(3)
        await product.answer(second["turn"])
        await watcher.has(5)
    assert [frame.type for frame in watcher.frames[2:]] == [
        events.TURN_CANCELLED,
        events.MESSAGE,
        events.TURN_COMPLETED,
    ]

    async def is_noted() -> bool:
        (row,) = await door.rows("select announced_at from turns where turn = %s", first["turn"])
        return row.announced_at is not None

    await eventually(is_noted)
    assert await metric(door, 'towline_turns_total{outcome="cancelled"}') == before + 1


async def test_a_turn_that_waits_for_another_is_cancelled_at_once(product: Product) -> None:
    """The one before it goes on, the one after it comes next."""
    thread = await product.new_thread()
    turns = [(await product.post(thread))["turn"] for _ in range(3)]
    claim = await product.begin(turns[0])
    assert (await product.client.delete(f"/v1/turns/{turns[1]}")).status_code == 200
    await product.end(claim)
    await product.answer(turns[2])
    states = [(await product.record(turn)).state for turn in turns]
    assert states == ["completed", "cancelled", "completed"]


async def test_a_running_turn_is_told_to_stop(product: Product) -> None:
    """202 until its worker has ended it; what it says is what counts."""
    turn = await product.post(await product.new_thread())
    claim = await product.begin(turn["turn"])
    path = f"/v1/turns/{turn['turn']}"
    for _ in range(2):
        told = await product.client.delete(path)
        assert (told.status_code, told.json()["state"], told.json()["cancel_requested"]) == (202, "running", True)
    assert await product.stores.claims.keep([claim]) == {claim.run: True}
    await product.end(claim, cancelled())
    ended = await product.client.delete(path)
    assert (ended.status_code, ended.json()["state"], ended.json()["cancel_requested"]) == (200, "cancelled", False)


async def test_a_turn_that_has_ended_cannot_be_cancelled(product: Product) -> None:
    """It stays as it is, and is not announced again."""
    thread = await product.new_thread()
    turn = await product.post(thread)
    await product.answer(turn["turn"])
    answer = await product.client.delete(f"/v1/turns/{turn['turn']}")
    assert (answer.status_code, answer.json()["state"]) == (200, "completed")
    async with product.watch(thread) as watcher:
        await watcher.has(3)
        await product.post(thread)
        await watcher.has(4)
    assert [frame.type for frame in watcher.frames] == [
        events.MESSAGE,
        events.MESSAGE,
        events.TURN_COMPLETED,
        events.MESSAGE,
    ]


# ---- usage


async def test_usage_is_read_by_thread_agent_and_day(door: Door, product: Product) -> None:
    """Newest first, page by page, each row once; of nobody else's users for a key that is bound."""
    agent = await product.new_agent()
    threads = [await product.new_thread(agent=agent, user=user) for user in ("alice", "bob")]
    turns = []
    for n in range(5):
        turn = await product.post(threads[n % 2])
        claim = await product.begin(turn["turn"])
        used = Used("reply", "small", n, 2 * n, 1, 0, 0.25)
        await product.stores.turns.end(claim, completed("x"), [used])
        turns.append(turn["turn"])

    async def read(**params: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = params | {"limit": "2"} | ({"cursor": cursor} if cursor else {})
            answer = await product.client.get("/v1/usage", params=page)
            assert answer.status_code == 200, answer.text
            found += answer.json()["items"]
            cursor = answer.json()["next_cursor"]
            if not cursor:
                return found

    rows = await read(agent=agent)
    assert [row["turn"] for row in rows] == turns[::-1]
    ended_at = rows[0].pop("ended_at")
    assert rows[0] == {
        "turn": turns[4],
        "thread": threads[0],
        "agent": agent,
        "user": "alice",
        "seam": "reply",
        "model": "small",
        "input_tokens": 4,
        "output_tokens": 8,
        "model_calls": 1,
        "tool_calls": 0,
        "seconds": 0.25,
    }
    assert [row["turn"] for row in await read(thread=threads[1])] == [turns[3], turns[1]]
    assert len(await read(agent=agent, day=ended_at[:10])) >= 1
    assert await read(agent=agent, day="2020-02-29") == []
    assert await read(thread=new_id()) == []
    async with door.client(key=await product.api_key(users=["bob"])) as bound:
        items = (await bound.get("/v1/usage", params={"agent": agent})).json()["items"]
        assert [row["turn"] for row in items] == [turns[3], turns[1]]
    assert datetime.now(UTC).isoformat()[:4] == ended_at[:4]


@pytest.mark.parametrize(
    "params",
    [{"day": "today"}, {"day": "2026-02-30"}, {"day": "20260101"}, {"thread": "x"}, {"agent": "-"}, {"cursor": "x"}],
    ids=str,
)
async def test_odd_questions_about_usage_are_refused(product: Product, params: dict[str, str]) -> None:
    """Rather than answered with everything."""
    assert (await product.client.get("/v1/usage", params=params)).status_code == 400
