"""Threads over HTTP: posting once per key whatever happens, one order, whose threads one sees, what is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_door import Door, open_door
from gateway_threads import Product
from support import eventually
from turn_stores import Stores

from common.ids import UserId, new_id
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.threadlog import ThreadLog
from common.store.threads import Threads
from common.store.tokens import Tokens
from common.store.turns import Turns, cancelled, completed, failed
from gateway.announcements import Announcements
from gateway.auth import Auth
from gateway.request import Request
from gateway.stream_tokens import StreamTokens
from gateway.threads import ThreadRoutes
from harness.faults import TcpProxy
from harness.servers import Servers
from towline.wire import events, json

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """Two gateways, the second one strict about keys."""
    async with open_door(servers, postgres_url, state_directory / "threads") as opened:
        await opened.add_gateway({"TOWLINE_IDEMPOTENCY": "strict"})
        yield opened


@pytest.fixture
async def product(door: Door) -> AsyncIterator[Product]:
    async with Product(door) as opened:
        yield opened


@pytest.fixture
async def strict(door: Door) -> AsyncIterator[Product]:
    async with Product(door, door.stack.gateways[1]) as opened:
        yield opened


async def count_of(door: Door, thread: str) -> tuple[int, int, int]:
    """How many entries, turns and tasks a thread has."""
    (row,) = await door.rows(
        "select (select count(*) from entries where thread = %s) as entries,"
        " (select count(*) from turns where thread = %s) as turns,"
        " (select count(*) from absurd.t_turns k join turns t on t.task = k.task_id where t.thread = %s) as tasks",
        thread,
        thread,
        thread,
    )
    return row.entries, row.turns, row.tasks


# ---- threads


async def test_a_thread_is_begun_read_and_listed(product: Product) -> None:
    """Without an entry yet; newest first in the list, by agent and by user."""
    agent = await product.new_agent()
    made = []
    for user in ("alice", "alice", "bob"):
        body = {"agent": agent, "user": user, "model": "small"}
        answer = await product.client.post("/v1/threads", json=body)
        assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/threads/{answer.json()['thread']}")
        made.append(answer.json())
    view = (await product.client.get(f"/v1/threads/{made[0]['thread']}")).json()
    assert view == made[0] | {"entries": [], "turns": []}
    assert (view["agent"], view["user"], view["model"]) == (agent, "alice", "small")
    listed = (await product.client.get("/v1/threads", params={"agent": agent, "limit": "2"})).json()
    assert listed["items"] == [made[2], made[1]]
    params = {"agent": agent, "limit": "2", "cursor": listed["next_cursor"]}
    assert (await product.client.get("/v1/threads", params=params)).json()["items"] == [made[0]]
    params = {"agent": agent, "user": "bob"}
    assert (await product.client.get("/v1/threads", params=params)).json()["items"] == [made[2]]


@pytest.mark.parametrize(
    ("body", "status", "place"),
    [
        ({"agent": "nobody"}, 422, "$.agent"),
        ({"agent": "-"}, 400, "$.agent"),
        ({}, 400, "$"),
        ({"agent": "nobody", "user": ""}, 400, "$.user"),
        ({"agent": "nobody", "model": "a\x00"}, 400, "$.model"),
        ({"agent": "nobody", "more": 1}, 400, "$"),
    ],
    ids=["no such agent", "no id", "nothing", "no user", "NUL", "an unknown member"],
)
async def test_what_is_no_thread_is_refused(product: Product, body: dict[str, Any], status: int, place: str) -> None:
    """Readably, with the place."""
    answer = await product.client.post("/v1/threads", json=body)
    assert (answer.status_code, answer.json()["place"]) == (status, place)


# ---- posting


async def test_a_post_is_an_entry_a_turn_and_a_task(door: Door, product: Product) -> None:
    """All there with the answer, which says where to read on; the entry is in the thread's stream at once."""
    thread = await product.new_thread()
    headers = {"idempotency-key": "first", "traceparent": TRACEPARENT}
    async with product.watch(thread) as watcher:
        answer = await product.client.post(f"/v1/threads/{thread}/entries", json={"text": "héllo"}, headers=headers)
        entry, turn = answer.json()["entry"], answer.json()["turn"]
        assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/turns/{turn['turn']}")
        assert "idempotent-replayed" not in answer.headers
        assert await count_of(door, thread) == (1, 1, 1)
        (said,) = await watcher.has(1)
    assert (entry["position"], entry["role"], entry["text"], entry["turn"]) == (1, "user", "héllo", turn["turn"])
    assert (turn["entry"], turn["state"], turn["attempts"], turn["replayed"]) == (entry["entry"], "queued", 0, False)
    assert watcher.frames[0].type == events.MESSAGE
    assert watcher.frames[0].data["source"] == turn["turn"]
    assert said == f'{{"entry":"{entry["entry"]}","turn":"{turn["turn"]}","role":"user","text":"héllo"}}'
    assert (await product.record(turn["turn"])).traceparent == TRACEPARENT


async def test_concurrent_duplicates_on_two_replicas_are_one_turn(
    door: Door, product: Product, strict: Product
) -> None:
    """Ten callers per key, at both gateways, at once: one entry and one turn each, and everyone is told which."""
    thread = await product.new_thread()
    keys = [f"key-{n}" for n in range(5)]
    answers = await asyncio.gather(
        *(caller.try_post(thread, key=key) for key in keys for caller in (product, strict) for _ in range(5))
    )
    assert {answer.status_code for answer in answers} == {201}
    told = [(answer.json()["entry"]["entry"], answer.json()["turn"]["turn"]) for answer in answers]
    assert sorted(told.count(one) for one in set(told)) == [10] * 5
    fresh = [answer for answer in answers if "idempotent-replayed" not in answer.headers]
    assert len(fresh) == 5
    assert [not answer.json()["turn"]["replayed"] for answer in answers].count(True) == 5
    assert await count_of(door, thread) == (5, 5, 1)
    async with product.watch(thread) as watcher:
        assert len(await watcher.has(5)) == 5
        last = await product.post(thread, "done")
        await watcher.has(6)
    assert watcher.frames[5].data["source"] == last["turn"]  # and none of the others twice


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (completed("42"), {"text": "42"}),
        (failed("agent-refused", "HTTP 403"), {"error": {"code": "agent-refused", "message": "HTTP 403"}}),
        (cancelled(), {"error": {"code": "cancelled", "message": "the turn was cancelled"}}),
    ],
    ids=["completed", "failed", "cancelled"],
)
async def test_a_key_is_answered_with_its_turn_for_ever(
    product: Product, strict: Product, end: Any, outcome: dict[str, Any]
) -> None:
    """While it runs, and once it has ended, however it did: the same entry and turn, on every replica, run once."""
    thread = await product.new_thread()
    first = (await product.try_post(thread, key="k")).json()
    claim = await product.begin(first["turn"]["turn"])
    running = await strict.try_post(thread, key="k")
    assert (running.status_code, running.json()["turn"]["state"]) == (201, "running")
    await product.end(claim, end)
    for caller in (product, strict):
        replay = await caller.try_post(thread, key="k")
        assert (replay.status_code, replay.headers["idempotent-replayed"]) == (200, "true")
        turn = replay.json()["turn"]
        assert replay.json()["entry"] == first["entry"]
        assert (turn["turn"], turn["replayed"], turn["attempts"]) == (first["turn"]["turn"], True, 1)
        told = dict(turn["outcome"])
        assert bool(told.pop("entry", None)) == ("text" in outcome)
        assert told == outcome
    assert turn["replays"] == 3


async def test_a_key_with_another_text(door: Door, product: Product, strict: Product) -> None:
    """Marked, or refused where the installation is strict; white space in JSON and `on_busy` are no other text."""
    thread = await product.new_thread()
    first = (await product.try_post(thread, "A", key="k")).json()
    other = await product.try_post(thread, "B", key="k")
    assert (other.status_code, other.json()["entry"]) == (201, first["entry"])
    assert other.json()["turn"]["payload_matches"] is False
    refused = await strict.try_post(thread, "B", key="k")
    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/idempotency-key-reused")
    same = await strict.client.post(
        f"/v1/threads/{thread}/entries",
        content='{ "on_busy": "reject",\n "text": "\\u0041" }',
        headers={"idempotency-key": '"k"', "content-type": "application/json"},
    )
    assert (same.status_code, same.json()["entry"]) == (201, first["entry"])
    assert "payload_matches" not in same.json()["turn"]
    elsewhere = await strict.try_post(await product.new_thread(), "B", key="k")
    assert "idempotent-replayed" not in elsewhere.headers
    assert await count_of(door, thread) == (1, 1, 1)


@pytest.mark.parametrize(
    "key",
    [None, "", '""', "k" * 256, "clé", "k\x7f"],
    ids=["none", "empty", "quoted", "long", "é", "DEL"],
)
async def test_odd_keys_are_refused(door: Door, product: Product, key: str | None) -> None:
    """By name, and nothing is recorded."""
    thread = await product.new_thread()
    headers = {} if key is None else {"idempotency-key": key.encode()}
    answer = await product.client.post(f"/v1/threads/{thread}/entries", json={"text": "x"}, headers=headers)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-idempotency-key")
    assert await count_of(door, thread) == (0, 0, 0)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(b'{"text":"a\\u0000b"}', 400, id="NUL"),
        pytest.param(b'{"text":"a\x00b"}', 400, id="raw NUL"),
        pytest.param(b'{"text":"\\ud800"}', 400, id="lone surrogate"),
        pytest.param(b'{"text":"\xff"}', 400, id="no UTF-8"),
        pytest.param(b'{"text":""}', 400, id="empty text"),
        pytest.param(b'{"text":7}', 400, id="no text"),
        pytest.param(b'{"text":"a","text":"b"}', 400, id="twice"),
        pytest.param(b'{"text":"a","on_busy":"wait"}', 400, id="on_busy"),
        pytest.param(b'{"text":"a","more":1}', 400, id="unknown member"),
        pytest.param(b'{"text":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, id="deep"),
        pytest.param(b'{"text":"' + b"x" * 300_000 + b'"}', 413, id="too large"),
    ],
)
async def test_hostile_bodies_are_refused_and_leave_nothing(
    door: Door, product: Product, content: bytes, status: int
) -> None:
    """The key is still unused afterwards."""
    thread = await product.new_thread()
    headers = {"idempotency-key": "k", "content-type": "application/json"}
    answer = await product.client.post(f"/v1/threads/{thread}/entries", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert await count_of(door, thread) == (0, 0, 0)
    assert "idempotent-replayed" not in (await product.try_post(thread, key="k")).headers


@pytest.mark.parametrize(
    "text", ["\u2028 é 👩‍👩‍👧 \r\n\t", "x" * 250_000, "data: x\n\nid: 1-1\n\n"], ids=["odd", "long", "frames"]
)
async def test_what_was_said_comes_back_as_it_was(product: Product, text: str) -> None:
    """In the answer, the list and the stream."""
    thread = await product.new_thread()
    async with product.watch(thread) as watcher:
        answer = await product.try_post(thread, text)
        assert answer.json()["entry"]["text"] == text
        await watcher.has(1)
        assert f'"role":"user","text":{_quoted(text)}}}' in watcher.frames[0].text
    listed = (await product.client.get(f"/v1/threads/{thread}/entries")).json()
    assert [entry["text"] for entry in listed["items"]] == [text]


async def test_a_busy_thread_queues_rejects_or_interrupts(door: Door, product: Product) -> None:
    """Rejected: nothing recorded, but a key that has a turn is answered. Interrupted: that turn is told to end."""
    thread = await product.new_thread()
    first = await product.post(thread, key="first", on_busy="reject")
    await product.begin(first["turn"])
    rejected = await product.try_post(thread, key="second", on_busy="reject")
    assert (rejected.status_code, rejected.json()["type"]) == (409, "/problems/thread-busy")
    assert first["turn"] in rejected.json()["detail"]
    assert await count_of(door, thread) == (1, 1, 1)
    assert (await product.try_post(thread, key="first", on_busy="reject")).status_code == 201
    queued = await product.post(thread, key="second")
    assert queued["state"] == "queued"
    assert (await product.record(first["turn"])).cancel_requested is False
    await product.post(thread, key="third", on_busy="interrupt")
    assert (await product.record(first["turn"])).cancel_requested is True
    assert await count_of(door, thread) == (3, 3, 1)


async def test_entries_have_one_order(product: Product, strict: Product) -> None:
    """Posted at once at two gateways while turns end: positions without holes, pages without repetitions, the same in
    the thread's view; an answer stands where its turn ended."""
    thread = await product.new_thread()
    await asyncio.gather(*(caller.try_post(thread, f"{n}") for n in range(4) for caller in (product, strict)))
    view = (await product.client.get(f"/v1/threads/{thread}")).json()
    await product.answer(view["turns"][0]["turn"], "reply")
    seen: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        params = {"limit": "4"} | ({"cursor": cursor} if cursor else {})
        page = (await product.client.get(f"/v1/threads/{thread}/entries", params=params)).json()
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [entry["position"] for entry in seen] == list(range(1, 10))
    assert [entry["created_at"] for entry in seen] == sorted(entry["created_at"] for entry in seen)
    assert (seen[8]["role"], seen[8]["text"], seen[8]["turn"]) == ("agent", "reply", seen[0]["turn"])
    view = (await product.client.get(f"/v1/threads/{thread}")).json()
    assert view["entries"] == seen
    assert [turn["turn"] for turn in view["turns"]] == [entry["turn"] for entry in seen[:8]]
    assert view["turns"][0]["outcome"] == {"entry": seen[8]["entry"], "text": "reply"}
    assert (await product.client.get(f"/v1/threads/{thread}/entries", params={"cursor": "0"})).status_code == 400


async def test_a_long_thread_shows_its_newest_entries(product: Product) -> None:
    """As many as an answer holds, with the turns of exactly these."""
    thread = await product.new_thread()
    for n in range(60):
        await product.post(thread, f"{n}")
    view = (await product.client.get(f"/v1/threads/{thread}")).json()
    assert [entry["position"] for entry in view["entries"]] == list(range(11, 61))
    assert [turn["turn"] for turn in view["turns"]] == [entry["turn"] for entry in view["entries"]]


# ---- whose


async def test_a_bound_key_sees_its_users_threads_and_no_others(door: Door, product: Product) -> None:
    """What lies outside is as if it did not exist, and cannot be made."""
    threads = {user: await product.new_thread(user=user) for user in ("alice", "bob")}
    threads["nobody"] = await product.new_thread()
    turns = {user: (await product.post(thread))["turn"] for user, thread in threads.items()}
    agent = await product.new_agent()
    async with Product(door, key=await product.api_key(users=["alice", "carol"])) as bound:
        for user, thread in threads.items():
            allowed = user == "alice"
            for path in (
                f"/v1/threads/{thread}",
                f"/v1/threads/{thread}/entries",
                f"/v1/turns/{turns[user]}",
                f"/v1/threads/{thread}/events",
            ):
                answer = await bound.client.get(path, headers={"accept": "application/json"})
                assert (answer.status_code == 404) is not allowed, path
            assert (await bound.try_post(thread)).status_code == (201 if allowed else 404)
            assert (await bound.client.delete(f"/v1/turns/{turns[user]}")).status_code == (200 if allowed else 404)
        listed = (await bound.client.get("/v1/threads")).json()["items"]
        assert {thread["user"] for thread in listed} <= {"alice", "carol"}
        assert threads["alice"] in {thread["thread"] for thread in listed}
        assert (await bound.client.get("/v1/threads", params={"user": "bob"})).status_code == 404
        for body, status in (({"user": "bob"}, 404), ({}, 400), ({"user": "carol"}, 201)):
            answer = await bound.client.post("/v1/threads", json={"agent": agent} | body)
            assert answer.status_code == status
    for user in ("bob", "nobody"):
        assert (await product.record(turns[user])).terminal is False


async def test_keys_without_the_scope_reach_no_thread(door: Door, product: Product) -> None:
    """Nor does what is no thread's id."""
    thread = await product.new_thread()
    async with Product(door, key=await product.api_key(scopes=["jobs", "runs"])) as other:
        assert (await other.client.get(f"/v1/threads/{thread}")).status_code == 403
        assert (await other.client.get(f"/v1/threads/{thread}/events")).status_code == 403
        assert (await other.try_post(thread)).status_code == 403
    for path in (f"/v1/threads/{new_id()}", "/v1/threads/x", f"/v1/threads/{thread.upper()}x", "/v1/turns/x"):
        assert (await product.client.get(path)).status_code == 404
    assert (await product.try_post(new_id())).status_code == 404


# ---- stores


async def test_a_post_is_one_statement(postgres: Postgres, redis_store: Redis) -> None:
    """The budget: one round trip to Postgres, and the answer waits for nothing of Redis."""
    stores = Stores(postgres)
    thread = await stores.new_thread(user=UserId("alice"))
    threads = Threads(postgres, key_retention_s=60)
    announcements = Announcements(ThreadLog(redis_store), Turns(postgres))  # whose loop does not run
    added = await Tokens(postgres).add_api_key("test", ["threads"], None)
    assert added is not None
    routes = ThreadRoutes(
        auth=Auth(Tokens(postgres), StreamTokens(())),
        threads=threads,
        turns=Turns(postgres),
        announcements=announcements,
        is_strict=False,
    )
    statements: list[str] = []
    fetch = postgres.fetch

    async def counted(name: str, *args: Any) -> Any:
        statements.append(name)
        return await fetch(name, *args)

    async def body() -> Any:
        return {"type": "http.request", "body": b'{"text":"hello"}'}

    async def post(key: str) -> int:
        headers = {
            b"authorization": f"Bearer {added[1]}".encode(),
            b"content-type": b"application/json",
            b"idempotency-key": key.encode(),
        }
        request = Request(list(headers.items()), body, params={"thread": thread.thread}, query={}, body_bytes_max=1024)
        return (await routes.post_entry(request)).status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres, "fetch", counted)
        assert await post("first") == 201  # the key is looked up, and remembered
        del statements[:]
        assert await post("second") == 201
    assert statements == ["post_entry"]


async def test_with_postgres_away_nothing_is_taken(door: Door, postgres_url: str) -> None:
    """503 with `Retry-After`; the same key works once it is back, and there is one entry."""
    proxy = TcpProxy(postgres_url)
    gateway = await door.add_gateway({"DATABASE_URL": await proxy.start()})
    try:
        async with Product(door, gateway) as product:
            thread = await product.new_thread()
            proxy.refuse()
            proxy.cut()
            refused = await product.try_post(thread, key="k")
            assert (refused.status_code, refused.json()["type"]) == (503, "/problems/store-unavailable")
            assert "retry-after" in refused.headers
            assert await count_of(door, thread) == (0, 0, 0)
            await proxy.heal()

            async def is_taken() -> bool:
                return (await product.try_post(thread, key="k")).status_code == 201

            await eventually(is_taken, 20)
            assert await count_of(door, thread) == (1, 1, 1)
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def test_an_answer_of_postgres_that_is_lost_does_no_harm(door: Door, postgres_url: str) -> None:
    """It was committed and nobody was told: the same key finds it, and it is said in the stream once."""
    proxy = TcpProxy(postgres_url)
    gateway = await door.add_gateway({"DATABASE_URL": await proxy.start()})
    try:
        async with Product(door, gateway) as product:
            thread = await product.new_thread()
            cut = proxy.cut_after(b"lost-answer")
            lost = await product.try_post(thread, "lost-answer", key="k")
            assert cut.happened.is_set()
            assert lost.status_code in (201, 503)
            assert await count_of(door, thread) == (1, 1, 1)
            again = await product.try_post(thread, "lost-answer", key="k")
            assert again.status_code == 201
            async with product.watch(thread) as watcher:
                await watcher.has(1)
                await product.post(thread, "next")
                assert ['"lost-answer"' in text for text in await watcher.has(2)] == [True, False]
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def test_with_redis_away_posts_are_taken_and_said_later(door: Door, product: Product) -> None:
    """The record is what counts; what was said meanwhile stands in the stream once Redis is back, once and in order."""
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start()})
    try:
        thread = await product.new_thread()
        async with Product(door, gateway) as cut_off, product.watch(thread) as watcher:
            proxy.refuse()
            proxy.cut()
            for n in range(3):
                await cut_off.post(thread, f"said-{n}")
            assert await count_of(door, thread) == (3, 3, 1)
            assert watcher.frames == []
            await proxy.heal()
            await watcher.has(3, 20)
            await product.post(thread, "last")
            await eventually(lambda: "last" in watcher.texts[-1])
            shown = [text for text in watcher.texts if not text.startswith("towline.")]
            assert [text.rpartition('"text":')[2] for text in shown] == [
                '"said-0"}',
                '"said-1"}',
                '"said-2"}',
                '"last"}',
            ]
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


def _quoted(text: str) -> str:
    return json.dumps(text).decode()
