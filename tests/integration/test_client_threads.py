"""`client.follow_turn` and the calls about threads, against a server that loses, repeats, refuses and falls silent."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import date
from typing import Any

import pytest
from played_gateway import CUT, SILENT, PlayedGateway, document, opened, refusal
from played_threads import (
    ENTRY,
    EVENTS,
    OTHER_TURN,
    POST,
    REPLY,
    THREAD,
    TURN,
    TURNS,
    VIEW,
    PlayedThreads,
    delta,
    entry,
    event,
    gap,
    route,
    thread,
    turn,
)
from support import eventually

from towline.client import (
    AgentPut,
    ApiProblem,
    Break,
    Client,
    GatewayUnreachable,
    InvalidRequest,
    ThreadEvent,
    ThreadGap,
)
from towline.stream import FIRST_ATTEMPTS_MAX
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, Ended
from towline.wire.threads import Turn, TurnOutcome

KEY = "secret-key"
FAR_S = 30.0

STARTED = event(1, events.TURN_STARTED, attempt=1)
COMPLETED = event(9, events.TURN_COMPLETED, entry=REPLY)


@contextlib.asynccontextmanager
async def connected(gateway: PlayedGateway) -> AsyncIterator[Client]:
    async with asyncio.timeout(FAR_S), Client(gateway.url, KEY) as client:
        yield client


async def follow(gateway: PlayedThreads, **arguments: Any) -> list[ThreadEvent | ThreadGap | Turn]:
    async with connected(gateway) as client:
        running = await client.read_turn(TURN)
        return [item async for item in client.follow_turn(running, **arguments)]


def kinds(items: list[ThreadEvent | ThreadGap | Turn]) -> list[str]:
    return [item.type if isinstance(item, ThreadEvent) else type(item).__name__ for item in items]


async def test_a_turn_from_its_start_to_its_record() -> None:
    """What other turns of the thread say is left out; the record has the last word."""
    ended = asyncio.Event()
    other = event(2, events.TURN_FAILED, of=OTHER_TURN, error={"code": "x", "message": ""})
    stream = opened(other, STARTED, delta(3, 1, "fo"), delta(4, 2, "ur"), COMPLETED, SILENT)
    async with (
        PlayedThreads.start(
            route(TURNS, document(turn()), [ended, *document(turn("completed"))]), route(EVENTS, stream)
        ) as gateway,
        connected(gateway) as client,
    ):
        items = []
        running = await client.read_turn(TURN)
        async for item in client.follow_turn(running):
            items.append(item)
            if isinstance(item, ThreadEvent) and item.type == events.TURN_COMPLETED:
                ended.set()
    assert kinds(items) == [
        "signal.dispatch.started",
        "message.delta",
        "message.delta",
        "signal.dispatch.completed",
        "Turn",
    ]
    assert [item.data for item in items[:4] if isinstance(item, ThreadEvent)] == [
        Attempt(TURN, 1),
        Delta(TURN, 1, 1, "fo"),
        Delta(TURN, 1, 2, "ur"),
        Ended(TURN, entry=REPLY),
    ]
    assert isinstance(items[-1], Turn)
    assert items[-1].outcome == TurnOutcome(entry=REPLY, text="four, of course")
    assert [request.headers.get("prefer") for request in gateway.to(TURNS)] == [None, "wait=50"]


async def test_a_turn_that_has_ended_is_not_streamed() -> None:
    async with PlayedThreads.start(route(TURNS, document(turn("failed")))) as gateway:
        (item,) = await follow(gateway)
    assert isinstance(item, Turn)
    assert (item.state, len(gateway.requests)) == ("failed", 1)


async def test_an_end_that_the_stream_has_lost_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis was flushed: the stream goes on, with what comes after the end that nobody will send again."""
    monkeypatch.setattr("towline.client.turns.ANNOUNCED_WITHIN_S", 0.2)
    later = [event(20 + n, events.MESSAGE, of=OTHER_TURN, entry=ENTRY, role="user", text="next") for n in range(3)]
    async with PlayedThreads.start(
        route(TURNS, document(turn()), document(turn("completed"))),
        route(EVENTS, opened(STARTED, gap(), *later, SILENT)),
    ) as gateway:
        items = await follow(gateway)
    assert kinds(items) == ["signal.dispatch.started", "ThreadGap", "Turn"]


async def test_a_broken_stream_is_resumed_and_a_void_attempt_is_told() -> None:
    breaks: list[Break] = []
    async with PlayedThreads.start(
        route(TURNS, document(turn()), [SILENT]),
        route(
            EVENTS,
            opened(STARTED, delta(2, 1, "fi"), CUT),
            opened(event(3, events.TURN_RESTARTED, attempt=2), delta(4, 1, "four", attempt=2), COMPLETED, SILENT),
        ),
    ) as gateway:
        async with connected(gateway) as client:
            items = []
            stream = client.follow_turn(await client.read_turn(TURN), on_break=breaks.append)
            async with contextlib.aclosing(stream):
                async for item in stream:
                    items.append(item)
                    if isinstance(item, ThreadEvent) and item.type in events.TURN_ENDS:
                        break
        assert kinds(items)[2:] == ["signal.dispatch.restarted", "message.delta", "signal.dispatch.completed"]
        assert [request.last_event_id for request in gateway.to(EVENTS)] == [None, "7-2"]
        assert len(breaks) == 1
        await eventually(lambda: gateway.connections == 0, FAR_S)


@pytest.mark.parametrize("status", [503, 429])
async def test_the_record_is_waited_for_over_an_outage(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towline.client.turns.AGAIN_S", 0.02)
    async with PlayedThreads.start(
        route(TURNS, document(turn()), refusal(status, "later"), refusal(status, "later"), document(turn("completed"))),
        route(EVENTS, opened(STARTED, COMPLETED, SILENT)),
    ) as gateway:
        items = await follow(gateway)
    assert kinds(items) == ["signal.dispatch.started", "signal.dispatch.completed", "Turn"]
    assert len(gateway.to(TURNS)) == 4


async def test_a_stream_that_never_opens_leaves_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is away and Postgres is not."""
    monkeypatch.setattr("towline.stream.PAUSE_FIRST_S", 0.01)
    ended = asyncio.Event()
    async with (
        PlayedThreads.start(
            route(TURNS, document(turn()), [ended, *document(turn("completed"))]),
            route(EVENTS, refusal(503, "store-unavailable")),
        ) as gateway,
        connected(gateway) as client,
    ):
        items = []
        async for item in client.follow_turn(await client.read_turn(TURN)):
            items.append(item)
            ended.set()
    assert kinds(items) == ["ThreadGap", "Turn"]
    assert len(gateway.to(EVENTS)) == FIRST_ATTEMPTS_MAX


async def test_a_turn_that_is_gone_is_a_refusal() -> None:
    async with PlayedThreads.start(
        route(TURNS, document(turn()), refusal(404, "not-found")), route(EVENTS, opened(STARTED, COMPLETED, SILENT))
    ) as gateway:
        with pytest.raises(ApiProblem, match="not-found"):
            await follow(gateway)
        await eventually(lambda: gateway.connections == 0, FAR_S)


async def test_leaving_closes_both_connections() -> None:
    async with (
        PlayedThreads.start(
            route(TURNS, document(turn()), [SILENT]), route(EVENTS, opened(STARTED, SILENT))
        ) as gateway,
        connected(gateway) as client,
    ):
        async with contextlib.aclosing(client.follow_turn(await client.read_turn(TURN))) as stream:
            async for _ in stream:
                await eventually(lambda: gateway.connections == 2, FAR_S)
                break
        await eventually(lambda: gateway.connections == 0, FAR_S)


async def test_a_thread_is_followed_from_an_event_and_what_is_new_has_no_data() -> None:
    async with PlayedThreads.start(
        route(EVENTS, opened(gap(), event(4, "signal.of.tomorrow", mood="fine"), STARTED, SILENT))
    ) as gateway:
        items: list[Any] = []
        async with connected(gateway) as client:
            stream = client.thread_events(THREAD, last_event_id="7-3")
            async with contextlib.aclosing(stream):
                async for item in stream:
                    items.append(item)
                    if len(items) == 3:
                        break
    assert items[0] == ThreadGap(THREAD, "7-1", "7-9")
    assert items[1] == ThreadEvent(THREAD, "7-4", TURN, "u4", 1764000000004, "signal.of.tomorrow", None)
    assert items[2].data == Attempt(TURN, 1)
    assert gateway.to(EVENTS)[0].last_event_id == "7-3"


async def test_an_entry_is_posted_again_under_its_key_when_the_link_breaks() -> None:
    posted = document({"entry": entry(), "turn": turn("queued")}, status=201)
    async with PlayedThreads.start(route(POST, [CUT], posted)) as gateway, connected(gateway) as client:
        found = await client.post_entry(THREAD, "2 + 2?", idempotency_key='order "17"', on_busy="interrupt")
    assert (found.turn.turn, found.entry.position) == (TURN, 1)
    sent = [(request.headers["idempotency-key"], json.loads(request.body)) for request in gateway.to(POST)]
    assert sent == [('"order \\"17\\""', {"text": "2 + 2?", "on_busy": "interrupt"})] * 2


async def test_a_thread_is_not_created_twice() -> None:
    cut_first = route("POST /v1/threads", [CUT], document(thread()))
    async with PlayedThreads.start(cut_first) as gateway, connected(gateway) as client:
        with pytest.raises(GatewayUnreachable):
            await client.create_thread("helper")
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    ("thread_id", "text", "key"),
    [("a/b", "x", "k"), (THREAD, "\ud800", "k"), (THREAD, "x", ""), (THREAD, "x", "é")],
    ids=["no id", "no text", "no key", "no ASCII"],
)
async def test_what_cannot_be_posted_is_not_sent(thread_id: str, text: str, key: str) -> None:
    async with Client("http://127.0.0.1:1", KEY) as client:
        with pytest.raises(InvalidRequest):
            await client.post_entry(thread_id, text, idempotency_key=key)


async def test_a_wait_for_a_turn_ends_by_itself() -> None:
    async with PlayedThreads.start(route(TURNS, document(turn()))) as gateway, connected(gateway) as client:
        assert not (await client.read_turn(TURN, wait_s=0.3)).terminal
    assert all(request.headers["prefer"] == "wait=1" for request in gateway.to(TURNS)[:2])


async def test_every_other_call() -> None:
    agent = {
        "agent": "helper",
        "kind": "openai",
        "url": "https://api.test/v1",
        "model": "m",
        "instructions": None,
        "tools": [],
        "has_api_key": True,
        "has_signing_secret": False,
        "turn_cap_s": 60.0,
        "created_at": "2026-01-02T03:04:05.000Z",
    }
    used = {
        "turn": TURN,
        "thread": THREAD,
        "agent": "helper",
        "user": "alice",
        "seam": "reply",
        "model": "m",
        "input_tokens": 12,
        "output_tokens": 3,
        "model_calls": 1,
        "tool_calls": 0,
        "seconds": 1.5,
        "ended_at": "2026-01-02T03:04:05.000Z",
    }

    def page(*items: Any, cursor: str | None = None) -> Any:
        return document({"items": list(items), "next_cursor": cursor})

    async with (
        PlayedThreads.start(
            route("PUT /v1/agents/helper", document(agent, status=201)),
            route("GET /v1/agents/helper", document(agent)),
            route("DELETE /v1/agents/helper", [b"HTTP/1.1 204 No Content\r\n\r\n"]),
            route("GET /v1/agents", page(agent)),
            route("POST /v1/threads", document(thread(), status=201)),
            route("GET /v1/threads", page(thread())),
            route(VIEW, document(thread(entries=[entry(), entry(2, "agent", "four")], turns=[turn("completed")]))),
            route(f"{VIEW}/entries", page(entry(), cursor="next"), page(entry(2, "agent", "four"))),
            route(f"DELETE /v1/turns/{TURN}", document(turn(cancel_requested=True), status=202)),
            route("GET /v1/usage", page(used)),
        ) as gateway,
        connected(gateway) as client,
    ):
        definition = AgentPut("openai", "https://api.test/v1", "m", tools=[], api_key="s3cret", turn_cap_s=60.0)
        assert (await client.put_agent("helper", definition)).has_api_key
        assert (await client.read_agent("helper")).tools == []
        await client.delete_agent("helper")
        assert [each.agent async for each in client.list_agents()] == ["helper"]
        assert (await client.create_thread("helper", user="alice", model="m")).thread == THREAD
        assert [each.thread async for each in client.list_threads(agent="helper", user="alice")] == [THREAD]
        view = await client.read_thread(THREAD)
        assert [each.text for each in view.entries] == ["2 + 2?", "four"]
        assert view.turns[0].outcome == TurnOutcome(entry=REPLY, text="four, of course")
        assert [each.position async for each in client.list_entries(THREAD)] == [1, 2]
        assert (await client.cancel_turn(TURN)).cancel_requested
        (row,) = [each async for each in client.usage(thread=THREAD, agent="helper", day=date(2026, 1, 2))]
        assert (row.input_tokens, row.seam) == (12, "reply")
    assert gateway.unknown == []
    (put,) = gateway.to("PUT /v1/agents/helper")
    assert json.loads(put.body) == {
        "kind": "openai",
        "url": "https://api.test/v1",
        "model": "m",
        "instructions": None,
        "tools": [],
        "api_key": "s3cret",
        "signing_secret": None,
        "turn_cap_s": 60.0,
    }
    (created,) = gateway.to("POST /v1/threads")
    assert json.loads(created.body) == {"agent": "helper", "user": "alice", "model": "m"}
    assert "idempotency-key" not in created.headers
    (usage,) = gateway.to("GET /v1/usage")
    for given in (f"thread={THREAD}", "agent=helper", "day=2026-01-02"):
        assert given in usage.target
