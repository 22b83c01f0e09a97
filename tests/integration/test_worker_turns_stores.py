"""Turns while a store is away, answers too late, or has lost what it had: one end, told as soon as that is possible."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from support import eventually
from turn_workers import TurnWorld, open_world

from common import turn_times
from common.store import keys
from common.store.postgres import Postgres
from common.store.redis import Redis
from harness.faults import TcpProxy
from harness.model import Model, repeated


@pytest.fixture
async def world(postgres: Postgres, redis_store: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as running:
        yield running


@pytest.mark.parametrize(
    "statement",
    [
        "towline_claim_turns",
        "towline_begin_turn",
        "towline_checkpoint",
        "towline_end_turn",
        "towline_complete_turn",
        "towline_fail_turn",
    ],
)
async def test_a_lost_answer_of_postgres_does_nothing_twice(
    world: TurnWorld, model: Model, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """The link dies after the statement was sent: it is repeated, and finds what the first one did."""
    monkeypatch.setattr(turn_times, "RETRY_FIRST_S", 0.05)
    proxy = TcpProxy(world.stores.postgres.url)
    url = await proxy.start()
    world.cleanup.push_async_callback(proxy.stop)
    await world.worker(postgres_url=url)
    cut = proxy.cut_after(statement.encode())
    turn = await world.ask(model, "fail-500-1" if statement == "towline_fail_turn" else "fast")
    ended = await world.ended_once(turn)
    await eventually(cut.happened.is_set)  # the task is completed after the end was heard
    assert ended.attempts == (2 if statement == "towline_fail_turn" else 1)
    assert (repeated(model.requests), len(model.requests)) == (0, ended.attempts)
    await eventually(lambda: world.is_completed(turn))


async def test_postgres_may_be_away_for_longer_than_a_claim(world: TurnWorld, model: Model) -> None:
    """All connections are cut and none is let in: the answer waits, and the turn ends once when it is back."""
    proxy = TcpProxy(world.stores.postgres.url)
    url = await proxy.start()
    world.cleanup.push_async_callback(proxy.stop)
    await world.worker(postgres_url=url)
    turn = await world.ask(model, "slow-1")
    await world.heard_text(turn, " 2 ")
    proxy.refuse()
    proxy.cut()
    await eventually(lambda: model.requests[0].end == "answered")
    await world.lapse(turn)
    assert not (await world.stores.record(turn)).terminal
    await proxy.heal()
    ended = await world.ended_once(turn)
    assert ended.attempts in (1, 2)  # whoever was first: the claim that is kept again, or the sweep
    assert repeated(model.requests) == ended.attempts - 1 or len(model.requests) == 1
    later = await world.post(turn.thread)
    await world.ended_once(later)


async def test_no_connection_is_held_while_models_think(world: TurnWorld, model: Model) -> None:
    """Many turns, few connections, no open transaction."""
    await world.worker(turn_slots=40)
    turns = [await world.ask(model, "slow-1.5") for _ in range(40)]
    await eventually(lambda: len(model.requests) == 40)
    (idle, all_of_them) = (
        await world.stores.ask(
            "select count(*) filter (where state like 'idle in transaction%%'), count(*)"
            " from pg_stat_activity where datname = current_database()"
        )
    )[0]
    assert idle == 0
    # The worker's pool and its listener; the test's own pool, and this very connection.
    assert all_of_them <= 8 + 1 + 8 + 1
    for turn in turns:
        await world.ended_once(turn)


async def test_redis_may_lose_everything_in_the_middle(
    world: TurnWorld, model: Model, redis_client: redis.asyncio.Redis
) -> None:
    """The answer, the end and what was said after the loss are heard; what was lost before is a gap, not a silence."""
    await world.worker()
    turn = await world.ask(model, "slow-1.5")
    await world.heard_text(turn, " 3 ")
    await redis_client.flushdb()
    ended = await world.ended(turn)
    assert ended.state == "completed"
    heard = [event.type for event in await world.heard(turn.thread)]
    assert heard[-2:] == ["message", "signal.dispatch.completed"]
    assert set(heard[:-2]) == {"message.delta"}
    assert (await world.story(turn.thread)).answers == {turn.turn: ended.reply_text}
    first = await redis_client.xrange(keys.thread_events(turn.thread), count=1)
    assert "marker" in first[0][1]


async def test_redis_may_be_away_while_a_model_answers(world: TurnWorld, model: Model) -> None:
    """The end is durable without it, and announced when it is back."""
    proxy = TcpProxy(world.redis_url)
    url = await proxy.start()
    world.cleanup.push_async_callback(proxy.stop)
    await world.worker(redis_url=url)
    turn = await world.ask(model, "slow-1")
    await world.heard_text(turn, " 3 ")
    proxy.refuse()
    proxy.cut()
    await eventually(lambda: world.has_ended(turn))
    assert (await world.story(turn.thread)).turns[turn.turn].end == ""
    await proxy.heal()
    ended = await world.ended_once(turn, within_s=30)
    assert (ended.attempts, len(model.requests)) == (1, 1)
    assert (await world.story(turn.thread)).turns[turn.turn].text == ended.reply_text
    await eventually(lambda: world.is_completed(turn))
    assert await world.runs(turn) == 1
