"""Agents of kind `openai` on a worker, before a stand-in model: a real server, slow, failing, silent or malformed."""

from collections.abc import AsyncIterator

import pytest
from support import eventually
from turn_workers import TurnWorld, open_world

from common import turn_times
from common.ids import new_id
from common.store.postgres import Postgres
from common.store.redis import Redis
from harness.model import Model, repeated


@pytest.fixture
async def world(postgres: Postgres, redis_store: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as running:
        yield running


async def test_a_model_answers_in_pieces(world: TurnWorld, model: Model) -> None:
    """What was heard is the answer, and the usage is the API's own count."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="slow-0.4", api_key="sk-test", instructions="be brief")
    turn = await world.post(thread, f"tell me {new_id()}")
    ended = await world.ended(turn)
    assert ended.state == "completed"
    story = await world.coherent(thread)
    assert story.turns[turn.turn].text == ended.reply_text
    assert story.turns[turn.turn].pieces > 1
    (row,) = await world.usage(turn)
    assert (row.model, row.model_calls, row.input_tokens > 0, row.output_tokens > 0) == ("slow-0.4", 1, True, True)
    assert row.seconds >= 0.4


async def test_the_thread_is_the_conversation(world: TurnWorld, model: Model) -> None:
    """Each turn is asked with what was said before, answers included, in the order of the thread."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="fast", api_key="sk-test", instructions="be brief")
    words = new_id()
    first = await world.ended(await world.post(thread, f"one {words}"))
    second = await world.ended(await world.post(thread, f"two {words}"))
    assert (first.reply_text, second.reply_text) == (f"You said: one {words}", f"You said: two {words}")
    (row,) = await world.usage(second)
    # "be brief", "one ...", "You said: one ...", "two ...": words, as the stand-in counts its input.
    assert row.input_tokens == 2 + 2 + 4 + 2


async def test_a_bogus_model_fails_at_once_and_says_why(world: TurnWorld, model: Model) -> None:
    """4xx is final: one request, one attempt, the API's own words."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="no/such-model", api_key="sk-test")
    turn = await world.post(thread, new_id())
    ended = await world.ended(turn)
    assert (ended.state, ended.error_code, ended.attempts) == ("failed", "agent-refused", 1)
    assert "404" in str(ended.error_message)
    assert "no/such-model` does not exist" in str(ended.error_message)
    assert len(model.requests) == 1
    assert len(await world.usage(turn)) == 1
    assert await world.stores.tasks(turn) == ["completed"]


@pytest.mark.parametrize("fault", ["fail-500-2", "fail-429-2", "cut-2", "malformed-2"])
async def test_a_failure_that_passes_is_tried_again(
    world: TurnWorld, model: Model, brisk_retries: None, fault: str
) -> None:
    """The third attempt answers; what the cut-off ones have said is void."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model=fault, api_key="sk-test")
    turn = await world.post(thread, f"hi {new_id()}")
    ended = await world.ended(turn)
    assert (ended.state, ended.attempts) == ("completed", 3)
    story = await world.coherent(thread)
    assert (story.turns[turn.turn].restarts, story.turns[turn.turn].text) == (2, ended.reply_text)
    assert len(model.requests) == 3
    assert len(await world.usage(turn)) == 1


@pytest.mark.parametrize("fault", ["fail-503", "malformed"])
async def test_a_failure_that_stays_ends_after_five_attempts(
    world: TurnWorld, model: Model, brisk_retries: None, fault: str
) -> None:
    """Never retried for ever, and the last attempt ends the turn itself."""
    worker = await world.worker()
    thread = await world.thread("openai", url=model.url, model=fault, api_key="sk-test")
    turn = await world.post(thread, new_id())
    ended = await world.ended(turn)
    assert (ended.state, ended.error_code, ended.attempts) == ("failed", "agent-unavailable", turn_times.ATTEMPTS_MAX)
    assert "tried 5 times" in str(ended.error_message)
    assert len(model.requests) == turn_times.ATTEMPTS_MAX
    await world.coherent(thread)
    assert len(await world.usage(turn)) == 1
    assert worker.metric("towline_turns_total", outcome="failed") == 1


async def test_a_model_that_is_not_there_fails_readably(world: TurnWorld, model: Model, brisk_retries: None) -> None:
    await world.worker()
    url = model.url.replace("/v1", "").rsplit(":", 1)[0] + ":1/v1"
    thread = await world.thread("openai", url=url, model="fast", api_key="sk-test")
    ended = await world.ended(await world.post(thread))
    assert (ended.state, ended.error_code) == ("failed", "agent-unavailable")
    assert "cannot be reached" in str(ended.error_message)


async def test_a_silent_model_is_cut_off_at_its_time(world: TurnWorld, model: Model) -> None:
    """The model hears it, too: its connection is closed."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="hang", api_key="sk-test", turn_cap_s=6.0)
    turn = await world.post(thread, new_id())
    await eventually(lambda: model.requests)
    ended = await world.ended(turn)
    assert (ended.state, ended.error_code, ended.attempts) == ("failed", "turn-timeout", 1)
    assert ended.ended_ms is not None
    assert ended.started_ms is not None
    assert 1000 <= ended.ended_ms - ended.started_ms < 6000
    await eventually(lambda: model.requests[0].end == "left")
    assert len(await world.usage(turn)) == 1


async def test_what_no_store_can_hold_is_mended(world: TurnWorld, model: Model) -> None:
    """U+0000 (Postgres refuses it) and half a surrogate pair in an answer: one end, pieces and entry are alike."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="odd", api_key="sk-test")
    turn = await world.post(thread, f"hi {new_id()}")
    ended = await world.ended(turn)
    assert ended.state == "completed"
    assert str(ended.reply_text).startswith("\ufffd \ufffd You said:")
    story = await world.coherent(thread)
    assert story.turns[turn.turn].text == story.answers[turn.turn] == ended.reply_text


async def test_an_address_that_is_not_allowed_is_not_called(world: TurnWorld, model: Model) -> None:
    """The guard of the egress stands before the official client, too."""
    await world.worker()
    thread = await world.thread("openai", url="http://169.254.169.254/v1", model="fast", api_key="sk-test")
    ended = await world.ended(await world.post(thread))
    assert (ended.state, ended.error_code) == ("failed", "egress-refused")


async def test_a_secret_that_cannot_be_read_fails_readably(world: TurnWorld, model: Model) -> None:
    """The installation's keys were changed; nothing is called without the agent's own."""
    await world.worker()
    agent = await world.thread("openai", url=model.url, model="fast", api_key="sk-test")
    await world.stores.ask("update agents set api_key = 'nonsense' where url = %s", model.url)
    ended = await world.ended(await world.post(agent))
    assert (ended.state, ended.error_code) == ("failed", "secret-unreadable")
    assert model.requests == []


async def test_a_cancelled_turn_ends_once_and_leaves_the_model(world: TurnWorld, model: Model) -> None:
    """While it thinks: told by a notification, the request is closed, and no attempt follows."""
    worker = await world.worker()
    thread = await world.thread("openai", url=model.url, model="hang", api_key="sk-test")
    turn = await world.post(thread, new_id())
    await eventually(lambda: model.requests)
    told = await world.stores.turns.cancel(turn.turn)
    assert told is not None
    assert (told.terminal, told.cancel_requested) == (False, True)
    ended = await world.ended(turn, within_s=10)
    assert (ended.state, ended.error_code, ended.attempts) == ("cancelled", "cancelled", 1)
    await eventually(lambda: model.requests[0].end == "left")
    again = await world.stores.turns.cancel(turn.turn)
    assert again == ended
    await world.coherent(thread)
    assert (len(model.requests), len(await world.usage(turn))) == (1, 1)
    assert await world.stores.tasks(turn) == ["completed"]
    assert worker.metric("towline_turns_total", outcome="cancelled") == 1


async def test_an_interruption_is_answered_after_what_it_interrupts(world: TurnWorld, model: Model) -> None:
    """`on_busy: interrupt`: the turn under way ends as cancelled, and the new entry gets its answer."""
    await world.worker()
    thread = await world.thread("openai", url=model.url, model="hang-1", api_key="sk-test")
    question = new_id()
    stuck = await world.post(thread, question)
    await eventually(lambda: model.requests)
    other = await world.post(thread, question, on_busy="interrupt")
    assert (await world.ended(stuck)).state == "cancelled"
    assert (await world.ended(other)).state == "completed"
    await world.coherent(thread)
    assert repeated(model.requests) == 0
