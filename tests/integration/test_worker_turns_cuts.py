"""Turns whose worker or claim is lost, and the one end that comes all the same."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from support import eventually
from turn_workers import TurnWorld, open_world

from common import turn_times
from common.ids import WorkerId, new_id
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.turns import Turn, completed
from harness.faults import TcpProxy
from harness.model import Model


@pytest.fixture
async def world(postgres: Postgres, redis_store: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as running:
        yield running


async def test_a_worker_that_leaves_hands_its_turns_over_at_once(world: TurnWorld, model: Model) -> None:
    """Drained in the middle of an answer: the other one goes on in the same attempt, long before the claim lapses."""
    leaving = await world.worker()
    turn = await world.ask(model, "slow-2")
    await world.heard_text(turn, " 3 ")
    staying = await world.worker()
    await leaving.drain()
    ended = await world.ended_once(turn)
    assert ended.attempts == 1
    story = await world.story(turn.thread)
    assert story.turns[turn.turn].restarts == 1
    assert staying.metric("towline_turns_total", outcome="completed") == 1
    assert [request.end for request in model.requests] == ["left", "answered"]


async def test_what_is_claimed_while_a_worker_leaves_is_given_back(world: TurnWorld) -> None:
    """Postgres has given it the turn, and the answer is on its way when the worker is told to leave."""
    proxy = TcpProxy(world.stores.postgres.url)
    url = await proxy.start()
    world.cleanup.push_async_callback(proxy.stop)
    leaving = await world.worker(postgres_url=url)
    turn = await world.post(await world.thread())
    await world.ended_once(turn)
    proxy.delay(1.0, "to_client")
    turn = await world.post(turn.thread)
    await eventually(lambda: _runs(world, turn, "running"))
    await leaving.drain()
    assert not await _runs(world, turn, "running")
    await world.worker()
    assert (await world.ended_once(turn)).attempts == 1


async def test_what_a_dead_worker_ran_goes_on_when_its_claim_lapses(world: TurnWorld, model: Model) -> None:
    """For real: nobody helps the clock (at most 15 s; a claim and two looks)."""
    doomed = await world.worker()
    turn = await world.ask(model, "slow-2")
    await world.heard_text(turn, " 3 ")
    await doomed.cut()
    await world.worker()
    ended = await world.ended_once(turn, within_s=30)
    assert ended.attempts == 2
    assert ended.ended_ms is not None
    assert ended.started_ms is not None
    assert ended.ended_ms - ended.started_ms < 2 * (turn_times.CLAIM_S + turn_times.NET_POLL_S) * 1000


async def test_a_worker_that_lost_its_claim_says_nothing_more(
    world: TurnWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on unawares while another attempt has begun: refused at its next word, and the model is left alone."""
    monkeypatch.setattr(turn_times, "HEARTBEAT_S", 60.0)  # nothing else tells it
    slow = await world.worker(turn_slots=1)
    turn = await world.ask(model, "slow-3")
    await world.heard_text(turn, " 3 ")
    await world.lapse(turn)
    await world.worker()
    ended = await world.ended_once(turn)
    assert ended.attempts == 2
    await eventually(lambda: [request.end for request in model.requests] == ["left", "answered"])
    assert slow.metric("towline_turns_total", outcome="completed") == 0


async def test_a_worker_that_lost_its_claim_hears_of_it(world: TurnWorld, model: Model) -> None:
    """Also while its model is silent: at the next heartbeat."""
    await world.worker(turn_slots=1)
    turn = await world.ask(model, "hang-1")
    await eventually(lambda: model.requests)
    await world.lapse(turn)
    await world.worker()
    assert (await world.ended_once(turn)).attempts == 2
    await eventually(lambda: [request.end for request in model.requests] == ["left", "answered"])


async def test_claims_are_kept_while_a_model_thinks(
    world: TurnWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence for longer than a claim: no second attempt, though another worker would take it."""
    monkeypatch.setattr(turn_times, "CLAIM_S", 1)
    monkeypatch.setattr(turn_times, "HEARTBEAT_S", 0.25)
    monkeypatch.setattr(turn_times, "NET_POLL_S", 0.2)
    await world.worker()
    await world.worker()
    turn = await world.ask(model, "slow-3")
    ended = await world.ended_once(turn)
    assert (ended.attempts, len(model.requests)) == (1, 1)


async def test_a_turn_that_kills_whoever_takes_it_ends(world: TurnWorld) -> None:
    """Its attempts run out, and the net says so (rule 32)."""
    thread = await world.thread()
    turn = await world.post(thread)
    for attempt in range(1, turn_times.ATTEMPTS_MAX + 1):
        (claim,) = await world.stores.claims.claim(WorkerId(f"dead-{new_id()}"), 1, [])
        assert (claim.turn, claim.attempt) == (turn.turn, attempt)
        await world.stores.claims.begin(claim)
        await world.lapse(turn)
    worker = await world.worker()
    ended = await world.ended(turn)
    assert (ended.state, ended.error_code, ended.attempts) == ("failed", "attempts-exhausted", turn_times.ATTEMPTS_MAX)
    assert worker.metric("towline_turns_total", outcome="failed") == 1


async def test_an_end_that_nobody_announced_is_announced(world: TurnWorld) -> None:
    """The worker died between the commit of the end and its announcement (rule 31); the next one reads the record."""
    thread = await world.thread()
    turn = await world.post(thread)
    (claim,) = await world.stores.claims.claim(WorkerId(f"dead-{new_id()}"), 1, [])
    await world.stores.claims.begin(claim)
    await world.stores.turns.end(claim, completed("the answer"), [])
    await world.lapse(turn)
    await world.worker()
    ended = await world.ended(turn)
    assert ended.reply_text == "the answer"
    story = await world.story(thread)
    assert story.answers == {turn.turn: "the answer"}
    await eventually(lambda: world.is_completed(turn))


async def test_a_cancelled_turn_of_a_dead_worker_is_not_begun_again(world: TurnWorld, model: Model) -> None:
    """Its worker was killed before it heard of the cancel; that must not be lost with it."""
    doomed = await world.worker()
    turn = await world.ask(model, "hang")
    await eventually(lambda: model.requests)
    await doomed.cut()
    await world.stores.turns.cancel(turn.turn)
    await world.lapse(turn)
    await world.worker()
    await world.ended_once(turn, "cancelled")
    assert len(model.requests) == 1


async def test_a_drip_is_cut_off_at_the_cap(world: TurnWorld, model: Model) -> None:
    """A word now and then is no reason to go on; and it is not tried again."""
    await world.worker()
    turn = await world.ask(model, "slow-60", turn_cap_s=6.5)
    ended = await world.ended_once(turn, "failed")
    assert (ended.error_code, ended.attempts) == ("turn-timeout", 1)


async def test_a_free_slot_is_filled_while_others_are_busy(
    world: TurnWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a whole batch, nor for the next look: many short turns pass one long one, by two slots."""
    monkeypatch.setattr(turn_times, "NET_POLL_S", 60.0)
    await world.worker(turn_slots=2)
    long = await world.ask(model, "hang")
    await eventually(lambda: model.requests)
    short = [await world.ask(model, "fast") for _ in range(6)]
    for turn in short:
        await world.ended_once(turn)
    await world.stores.turns.cancel(long.turn)
    await world.ended_once(long, "cancelled")


async def test_entries_that_come_while_a_turn_runs_are_answered_in_order(world: TurnWorld, model: Model) -> None:
    """Two workers, one thread: each entry gets its answer, one after the other, none lost."""
    await world.worker()
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="slow-0.3", api_key="sk-test")
    turns = [await world.post(thread, f"{n} {new_id()}") for n in range(4)]
    for turn in turns:
        await world.ended_once(turn)
    records = [await world.stores.record(turn) for turn in turns]
    for before, after in itertools.pairwise(records):
        assert before.ended_ms is not None
        assert after.started_ms is not None
        assert before.ended_ms <= after.started_ms
    story = await world.coherent(thread)
    assert list(story.answers) == [turn.turn for turn in turns]


async def test_a_worker_without_sockets_opens_no_port_for_them(world: TurnWorld) -> None:
    worker = await world.worker(roles="turns")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", worker.settings.bridge_port)
    sockets = await world.worker(roles="bridge")
    _, writer = await asyncio.open_connection("127.0.0.1", sockets.settings.bridge_port)
    writer.close()


async def _runs(world: TurnWorld, turn: Turn, state: str) -> bool:
    query = "select 1 from absurd.r_turns where state = %s and task_id = (select task from turns where turn = %s)"
    return bool(await world.stores.ask(query, state, turn.turn))
