"""The stream of a thread: what a watcher sees of it, resumes and is told to be missing; and the tokens for browsers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_door import Door, open_door
from gateway_streams import PlayedRun, Watcher
from gateway_threads import Product
from support import eventually

from common.ids import TurnId, new_id
from common.store import keys
from common.store.eventlog import NewEvent
from common.store.turn_events import event_of
from harness.servers import Servers
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta

TS = 1_790_000_000_000


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway that makes stream tokens."""
    env = {"TOWLINE_TOKEN_KEYS": "k" * 32, "TOWLINE_SSE_KEEPALIVE_S": "0.5"}
    async with open_door(servers, postgres_url, state_directory / "thread-events", env=env) as opened:
        yield opened


@pytest.fixture
async def product(door: Door) -> AsyncIterator[Product]:
    async with Product(door) as opened:
        yield opened


def started(turn: str, attempt: int = 1) -> NewEvent:
    kind = events.TURN_STARTED if attempt == 1 else events.TURN_RESTARTED
    return event_of(TurnId(turn), "", kind, Attempt(turn, attempt), TS)


def deltas(turn: str, first: int, last: int) -> list[NewEvent]:
    return [
        event_of(TurnId(turn), "", events.MESSAGE_DELTA, Delta(turn, 1, n, f"{n} "), TS) for n in range(first, last + 1)
    ]


async def test_a_watcher_sees_a_turn_from_its_entry_to_its_end(product: Product) -> None:
    """In order, whoever said it; one who comes late sees the same, one who comes back the rest."""
    thread = await product.new_thread()
    async with product.watch(thread) as watcher:
        turn = (await product.post(thread, "hello"))["turn"]
        claim = await product.begin(turn)
        writer = product.writer(await product.record(turn))
        await writer.append([started(turn)])
        await writer.append(deltas(turn, 1, 3))
        await product.end(claim)
        await watcher.has(7)
        kinds = [frame.type for frame in watcher.frames]
        assert kinds == [
            events.MESSAGE,
            events.TURN_STARTED,
            *[events.MESSAGE_DELTA] * 3,
            events.MESSAGE,
            events.TURN_COMPLETED,
        ]
        assert {frame.data["source"] for frame in watcher.frames} == {turn}
        assert watcher.frames[0].data["uid"].startswith("entry:")
        async with product.watch(thread) as late:
            assert await late.has(7) == watcher.texts
        async with product.watch(thread, watcher.frames[3].id) as resumed:
            assert await resumed.has(3) == watcher.texts[4:]
        assert not watcher.is_over


async def test_many_threads_are_one_read_and_ids_of_runs_are_not_theirs(door: Door, product: Product) -> None:
    """A run may bear a thread's id: their streams are two."""
    thread = await product.new_thread()
    run = await (await PlayedRun(door, thread).put()).begin()  # type: ignore[arg-type]
    await run.add(1)
    async with product.watch(thread) as watcher, Watcher(product.client, f"/v1/runs/{thread}/events") as other:
        await product.post(thread, "said")
        await run.add(2)
        assert "said" in (await watcher.has(1))[0]
        assert await other.has(2) == ["coder 1", "coder 2"]
        assert len(watcher.frames) == 1


async def test_pages_are_the_same_stream(product: Product) -> None:
    """Oldest first, on from where the page before ended; without an end."""
    thread = await product.new_thread()
    assert (await page(product, thread)) == {"items": [], "last_event_id": None}
    for n in range(5):
        await product.post(thread, f"{n}")
    async with product.watch(thread) as watcher:
        await watcher.has(5)
    first = await page(product, thread, limit="3")
    second = await page(product, thread, limit="3", last_event_id=first["last_event_id"])
    assert [item["id"] for item in first["items"] + second["items"]] == [frame.id for frame in watcher.frames]
    assert (await page(product, thread, last_event_id=second["last_event_id"]))["items"] == []


async def page(product: Product, thread: str, **params: str) -> dict[str, Any]:
    answer = await product.client.get(
        f"/v1/threads/{thread}/events", params=params, headers={"accept": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_what_redis_lost_is_a_gap(door: Door, product: Product) -> None:
    """For who watches, for who comes back, for who comes anew; what was said is in the record."""
    thread = await product.new_thread()
    async with product.watch(thread) as watcher:
        await product.post(thread, "lost")
        await watcher.has(1)
        await door.commands.delete(keys.thread_events(thread), keys.thread_state(thread), keys.thread_writers(thread))  # type: ignore[arg-type]
        await product.post(thread, "kept")
        await watcher.has(3)
        assert [frame.type for frame in watcher.frames] == [events.MESSAGE, events.GAP, events.MESSAGE]
        gap = watcher.frames[1]
        assert (gap.has_id, gap.data["thread"], gap.data["after"]) == (False, thread, watcher.frames[0].id)
        assert set(gap.data) == {"thread", "after", "first_available"}
    for last_event_id in (None, watcher.frames[0].id):
        async with product.watch(thread, last_event_id) as other:
            await other.has(2)
            assert [frame.type for frame in other.frames] == [events.GAP, events.MESSAGE]
            assert "kept" in other.texts[1] or "kept" in other.frames[1].text
    shown = await page(product, thread)
    assert (shown["gap"]["thread"], len(shown["items"])) == (thread, 1)
    listed = (await product.client.get(f"/v1/threads/{thread}/entries")).json()["items"]
    assert [entry["text"] for entry in listed] == ["lost", "kept"]


async def test_live_only_states_where_it_reads_on(product: Product) -> None:
    """Broken off before the first event, a reader comes back by the stated id and misses nothing."""
    thread = await product.new_thread()
    async with product.watch(thread, **{"from": "live"}) as empty:
        await eventually(lambda: empty.last_id)
    await product.post(thread, "first")
    async with product.watch(thread, empty.last_id) as resumed:
        assert "first" in (await resumed.has(1))[0]
    async with product.watch(thread, **{"from": "live"}) as watcher:
        await eventually(lambda: watcher.last_id)
        assert watcher.frames == []
    assert watcher.last_id == resumed.frames[0].id
    await product.post(thread, "second")
    async with product.watch(thread, watcher.last_id, **{"from": "live"}) as resumed:
        assert "second" in (await resumed.has(1))[0]
        await product.post(thread, "third")
        assert "third" in (await resumed.has(2))[1]
        assert [frame.type for frame in resumed.frames] == [events.MESSAGE] * 2


async def test_what_is_no_thread_or_no_place_in_it_is_refused(product: Product) -> None:
    """Before the stream starts."""
    thread = await product.new_thread()
    for path in (f"/v1/threads/{new_id()}/events", "/v1/threads/x/events"):
        assert (await product.client.get(path)).status_code == 404
    for last_event_id in ("x", "0-0", "01-1"):
        headers = {"last-event-id": last_event_id}
        assert (await product.client.get(f"/v1/threads/{thread}/events", headers=headers)).status_code == 400


# ---- tokens


async def mint(product: Product, **body: object) -> Any:
    return await product.client.post("/v1/stream-tokens", json=body)


async def test_a_token_opens_its_threads_and_runs_and_nothing_else(door: Door, product: Product) -> None:
    """A browser follows what its page shows: no other thread, no run of a thread's name, nothing that is no stream."""
    thread, other = [await product.new_thread() for _ in range(2)]
    run = await (await PlayedRun(door).put()).begin()
    await run.add(1)
    answer = await mint(product, threads=[thread], runs=[run.run])
    assert (answer.status_code, answer.json()["threads"], answer.json()["runs"]) == (201, [thread], [run.run])
    await product.post(thread, "hello")
    async with door.client(key=answer.json()["token"]) as browser:
        async with Watcher(browser, f"/v1/threads/{thread}/events") as watcher:
            assert "hello" in (await watcher.has(1))[0]
        async with Watcher(browser, f"/v1/runs/{run.run}/events") as watcher:
            assert await watcher.has(1) == ["coder 1"]
        assert (await browser.get(f"/v1/threads/{other}/events")).status_code == 404
        assert (await browser.get(f"/v1/runs/{thread}/events")).status_code == 404
        assert (await browser.get(f"/v1/threads/{thread}")).status_code == 401
        assert (await browser.post(f"/v1/threads/{thread}/entries", json={"text": "x"})).status_code == 401


async def test_who_may_mint_which_tokens(door: Door, product: Product) -> None:
    """What a key does not reach its tokens do not open."""
    threads = {user: await product.new_thread(user=user) for user in ("alice", "bob")}
    scopes = {"bound": ["threads"], "threads": ["threads"], "runs": ["runs"], "jobs": ["jobs"]}
    products = {
        name: Product(door, key=await product.api_key(scopes=scope, users=["alice"] if name == "bound" else None))
        for name, scope in scopes.items()
    }
    alice, bob = threads["alice"], threads["bob"]
    table: list[tuple[str, dict[str, Any], int]] = [
        ("bound", {"threads": [alice]}, 201),
        ("bound", {"threads": [alice, bob]}, 404),
        ("bound", {"threads": [new_id()]}, 404),
        ("threads", {"threads": [alice, bob]}, 201),
        ("threads", {"threads": [alice], "runs": ["r"]}, 403),
        ("runs", {"runs": ["r"]}, 201),
        ("runs", {"threads": [alice]}, 403),
        ("jobs", {"threads": [alice]}, 403),
        ("threads", {}, 400),
        ("threads", {"threads": ["x"]}, 400),
    ]
    got = [(name, body, (await mint(products[name], **body)).status_code) for name, body, _ in table]
    await asyncio.gather(*(one.client.aclose() for one in products.values()))
    assert got == table
