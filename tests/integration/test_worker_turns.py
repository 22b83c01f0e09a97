"""Turns on a worker: from the entry to the one visible end, whoever answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support import eventually
from turn_workers import TurnWorld, kinds, open_world

from common import turn_times
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.turns import Turns
from worker.agents.echo import EchoAgent


@pytest.fixture
async def world(postgres: Postgres, redis_store: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


async def test_an_echo_is_answered_and_told(world: TurnWorld) -> None:
    """Entry, work, pieces, answer, end; one reply, one usage row, one completed task."""
    worker = await world.worker()
    thread = await world.thread()
    turn = await world.post(thread, "say this again")
    ended = await world.ended(turn)
    assert (ended.state, ended.reply_text, ended.attempts) == ("completed", "say this again", 1)
    assert kinds(await world.heard(thread), turn) == [
        "message",
        "signal.dispatch.started",
        "message.delta",
        "message",
        "signal.dispatch.completed",
    ]
    story = await world.coherent(thread)
    assert story.gaps == 0
    assert story.turns[turn.turn].text == story.answers[turn.turn] == "say this again"
    (row,) = await world.usage(turn)
    assert (row.seam, row.model_calls, row.tool_calls) == ("reply", 0, 0)
    assert [(entry.role, entry.text) for entry in await world.stores.entries(thread)] == [
        ("user", "say this again"),
        ("agent", "say this again"),
    ]
    assert await world.stores.tasks(turn) == ["completed"]
    assert worker.metric("towline_turns_total", outcome="completed") == 1


@pytest.mark.parametrize("text", ["", "x" * (1024 * 1024 + 1)], ids=["answer-empty", "answer-too-large"])
async def test_an_answer_that_is_none_fails_readably(
    world: TurnWorld, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, text: str
) -> None:
    async def answer(*_: object) -> str:
        return text

    monkeypatch.setattr(EchoAgent, "answer", answer)
    await world.worker()
    turn = await world.post(await world.thread())
    ended = await world.ended_once(turn, "failed")
    assert ended.error_code == request.node.callspec.id


async def test_an_agent_that_meets_a_fault_of_ours_fails_readably(
    world: TurnWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not silent, and not tried for ever."""

    async def answer(*_: object) -> str:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(EchoAgent, "answer", answer)
    await world.worker()
    ended = await world.ended_once(await world.post(await world.thread()), "failed")
    assert (ended.error_code, ended.attempts) == ("internal-error", 1)


async def test_a_turn_whose_end_cannot_be_written_runs_out_of_attempts(
    world: TurnWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours outside of the agent's part: each time counts, and the net ends it."""
    monkeypatch.setattr(turn_times, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(turn_times, "RETRY_CAP_S", 0.05)

    async def end(*_: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(Turns, "end", end)
    await world.worker()
    turn = await world.post(await world.thread())
    ended = await world.ended(turn)
    assert (ended.state, ended.error_code, ended.attempts) == ("failed", "attempts-exhausted", turn_times.ATTEMPTS_MAX)


async def test_a_thread_whose_agent_was_deleted_says_so(world: TurnWorld) -> None:
    """Between the entry and its turn."""
    turn = await world.post(await world.thread())
    await world.stores.agents.delete(turn.agent)
    await world.worker()
    ended = await world.ended_once(turn, "failed")
    assert ended.error_code == "agent-unknown"


async def test_a_turn_that_was_cancelled_before_it_began_is_not_begun(world: TurnWorld) -> None:
    turn = await world.post(await world.thread())
    cancelled = await world.stores.turns.cancel(turn.turn)
    assert cancelled is not None
    assert (cancelled.state, cancelled.attempts) == ("cancelled", 0)
    worker = await world.worker()
    later = await world.post(turn.thread)
    await world.ended_once(later)
    assert kinds(await world.heard(turn.thread), turn)[-1:] != ["signal.dispatch.started"]
    assert worker.metric("towline_turns_total", outcome="cancelled") == 0


async def test_the_depths_of_the_queue_are_shown(world: TurnWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """By state, for whoever scales the workers."""
    monkeypatch.setattr(turn_times, "NET_POLL_S", 0.1)
    is_over = asyncio.Event()

    async def answer(*_: object) -> str:
        await is_over.wait()
        return "late"

    monkeypatch.setattr(EchoAgent, "answer", answer)
    worker = await world.worker(turn_slots=1)
    running, queued = await world.post(await world.thread()), await world.post(await world.thread())

    def depths() -> tuple[float, float]:
        return (
            worker.metric("towline_queue_depth", queue="turns_running"),
            worker.metric("towline_queue_depth", queue="turns_queued"),
        )

    await eventually(lambda: depths() == (1, 1))
    assert worker.metric("towline_queue_oldest_seconds", queue="turns_queued") > 0
    is_over.set()
    for turn in (running, queued):
        await world.ended_once(turn)
    await eventually(lambda: depths() == (0, 0))
    assert worker.metric("towline_turn_seconds_count") == 2
