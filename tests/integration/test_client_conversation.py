"""The client's calls about agents, threads, turns and usage against a real gateway; the worker is played."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from gateway_door import Door, open_door
from gateway_threads import Product

from common.ids import ThreadId, new_id
from common.process.secrets import new_key
from common.store import keys
from common.store.turn_events import event_of
from common.store.turns import Claim, completed, failed
from common.store.turns import Turn as Record
from harness.servers import Servers
from towline.client import AgentPut, ApiProblem, Client, ThreadEvent, ThreadGap
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, Ended, Message, ThreadEventData
from towline.wire.threads import Thread, Turn

FAR_S = 60.0


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    env = {"TOWLINE_SECRET_KEYS": new_key()}
    async with open_door(servers, postgres_url, state_directory / "conversation", env=env) as opened:
        yield opened


@pytest.fixture
async def product(door: Door) -> AsyncIterator[Product]:
    async with Product(door) as opened:
        yield opened


@pytest.fixture
async def client(door: Door) -> AsyncIterator[Client]:
    async with asyncio.timeout(FAR_S), Client(door.stack.gateways[0].url, door.stack.api_key, timeout_s=10) as client:
        yield client


@pytest.fixture
async def thread(client: Client) -> Thread:
    agent = f"agent-{new_id()}"
    await client.put_agent(agent, AgentPut("echo"))
    return await client.create_thread(agent, user="alice", model="m")


async def speak(product: Product, record: Record, attempt: int, *said: tuple[str, ThreadEventData]) -> None:
    writer = product.writer(record, attempt)
    await writer.append([event_of(record.turn, "", kind, data, 1) for kind, data in said])


async def test_an_agent_from_its_definition_to_its_end(client: Client) -> None:
    agent = f"agent-{new_id()}"
    definition = AgentPut("openai", "http://127.0.0.1:9/v1", "m", tools=["search"], api_key="s3cret", turn_cap_s=60)
    put = await client.put_agent(agent, definition)
    assert (put.agent, put.tools, put.has_api_key, put.turn_cap_s) == (agent, ["search"], True, 60.0)
    assert await client.read_agent(agent) == put
    assert put in [each async for each in client.list_agents()]
    await client.delete_agent(agent)
    with pytest.raises(ApiProblem) as raised:
        await client.read_agent(agent)
    assert raised.value.status == 404


async def test_a_turn_as_its_watcher_sees_it(client: Client, product: Product, thread: Thread) -> None:
    """A worker dies in mid-answer; the next one begins it again and answers."""
    posted = await client.post_entry(thread.thread, "2 + 2?", idempotency_key="first")
    turn = posted.turn.turn
    assert (posted.turn.state, posted.entry.role, posted.entry.position) == ("queued", "user", 1)
    seen: list[ThreadEvent | ThreadGap | Turn] = []

    async def watch() -> None:
        async with contextlib.aclosing(client.follow_turn(posted.turn)) as items:
            async for item in items:
                seen.append(item)  # noqa: PERF401 (the rest of the test watches it grow)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        claim = await product.begin(turn)
        record = await product.record(turn)
        await speak(
            product,
            record,
            1,
            (events.TURN_STARTED, Attempt(turn, 1)),
            (events.MESSAGE_DELTA, Delta(turn, 1, 1, "fi")),
        )
        await speak(
            product,
            record,
            2,
            (events.TURN_RESTARTED, Attempt(turn, 2)),
            (events.MESSAGE_DELTA, Delta(turn, 2, 1, "four")),
        )
        await product.end(claim, completed("four"))
    said = [item.data for item in seen if isinstance(item, ThreadEvent)]
    last = seen[-1]
    assert isinstance(last, Turn)
    assert (last.state, last.outcome.text) == ("completed", "four")
    reply = last.outcome.entry
    assert said == [
        Message(posted.entry.entry, turn, "user", "2 + 2?"),
        Attempt(turn, 1),
        Delta(turn, 1, 1, "fi"),
        Attempt(turn, 2),
        Delta(turn, 2, 1, "four"),
        Message(reply, turn, "agent", "four"),
        Ended(turn, entry=reply),
    ]
    assert len(seen) == len(said) + 1

    view = await client.read_thread(thread.thread)
    assert [(each.role, each.text) for each in view.entries] == [("user", "2 + 2?"), ("agent", "four")]
    assert view.turns == [last]
    assert [each async for each in client.list_entries(thread.thread)] == view.entries
    assert thread.thread in [each.thread async for each in client.list_threads(agent=thread.agent, user="alice")]
    # Who comes when it is over reads it in the record.
    assert [item async for item in client.follow_turn(last)] == [last]


async def test_a_key_is_one_entry(client: Client, thread: Thread) -> None:
    first = await client.post_entry(thread.thread, "hello", idempotency_key="k")
    again = await client.post_entry(thread.thread, "another", idempotency_key="k")
    assert (again.turn.turn, again.turn.replayed, again.turn.payload_matches) == (first.turn.turn, True, False)
    assert again.entry == first.entry
    assert (await client.read_thread(thread.thread)).turns[0].replays == 1


async def test_a_busy_thread_refuses_when_told_to(client: Client, thread: Thread) -> None:
    await client.post_entry(thread.thread, "hello", idempotency_key="k1")
    with pytest.raises(ApiProblem) as raised:
        await client.post_entry(thread.thread, "hello", idempotency_key="k2", on_busy="reject")
    assert (raised.value.status, raised.value.slug) == (409, "thread-busy")


async def test_a_cancelled_turn_ends_for_its_watcher(client: Client, thread: Thread) -> None:
    posted = await client.post_entry(thread.thread, "hello", idempotency_key="k")
    async with contextlib.aclosing(client.follow_turn(posted.turn)) as items:
        kinds: list[str] = []
        async for item in items:
            if not kinds:
                assert (await client.cancel_turn(posted.turn.turn)).state == "cancelled"
            kinds.append(item.type if isinstance(item, ThreadEvent) else type(item).__name__)
    assert kinds == ["message", "signal.dispatch.cancelled", "Turn"]
    ended = await client.read_turn(posted.turn.turn, wait_s=30)
    assert (ended.state, ended.outcome.error.code, ended.cancel_requested) == ("cancelled", "cancelled", False)


async def test_an_end_that_no_stream_tells_is_told_by_the_record(
    client: Client, product: Product, door: Door, thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies between commit and announcement, and the thread's log is lost besides."""
    monkeypatch.setattr("towline.client.turns.ANNOUNCED_WITHIN_S", 0.5)
    posted = await client.post_entry(thread.thread, "hello", idempotency_key="k")
    claim: Claim = await product.begin(posted.turn.turn)
    seen: list[ThreadEvent | ThreadGap | Turn] = []
    async with contextlib.aclosing(client.follow_turn(posted.turn)) as items:
        async for item in items:
            if not seen:
                await door.commands.delete(keys.thread_events(ThreadId(thread.thread)))
                await product.end(claim, failed("agent-refused", "no"), announce=False)
            seen.append(item)
    last = seen[-1]
    assert isinstance(last, Turn)
    assert (last.state, last.outcome.error.message) == ("failed", "no")
    assert not any(isinstance(item, ThreadEvent) and item.type in events.TURN_ENDS for item in seen)


async def test_usage_by_thread_agent_and_day(client: Client, product: Product, thread: Thread) -> None:
    posted = await client.post_entry(thread.thread, "hello", idempotency_key="k")
    turn = await product.worker.end(await product.begin(posted.turn.turn))
    assert turn.ended_ms is not None
    day = datetime.fromtimestamp(turn.ended_ms / 1000, UTC).date()
    for filters in ({"thread": thread.thread}, {"agent": thread.agent, "day": day}):
        (row,) = [each async for each in client.usage(**filters)]
        assert (row.turn, row.agent, row.user, row.seam) == (turn.turn, thread.agent, "alice", "reply")
        assert (row.input_tokens, row.output_tokens, row.model_calls) == (10, 20, 1)
    assert [each async for each in client.usage(agent=thread.agent, day=day.replace(year=2001))] == []
