"""Agents of kind `http` on a worker, before a stand-in endpoint that is a real server and checks every signature."""

from collections.abc import AsyncIterator

import pytest
from support import eventually
from turn_workers import TRACEPARENT, TurnWorld, open_world

from common import turn_times
from common.ids import new_id
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.turns import Turn
from harness.endpoint import SECRET, Endpoint


@pytest.fixture
async def world(postgres: Postgres, redis_store: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with Endpoint() as running:
        yield running


async def ask(world: TurnWorld, endpoint: Endpoint, behaviour: str, **members: object) -> Turn:
    """Post an entry to an agent that behaves so."""
    members = {"signing_secret": SECRET, **members}
    return await world.post(await world.thread("http", url=endpoint.url(behaviour), **members), f"hi {new_id()}")


@pytest.mark.parametrize(("behaviour", "pieces"), [("fast", 1), ("sse+slow-0.4", 2)], ids=["json", "sse"])
async def test_the_endpoint_answers(world: TurnWorld, endpoint: Endpoint, behaviour: str, pieces: int) -> None:
    """In one body or as a stream, whose pieces are heard as they come."""
    await world.worker()
    turn = await ask(world, endpoint, behaviour)
    ended = await world.ended_once(turn)
    (request,) = endpoint.of(turn.turn)
    assert ended.reply_text == f"You said: {request.body['text']}" + (" 1 2 3 4" if pieces > 1 else "")
    story = await world.story(turn.thread)
    assert story.turns[turn.turn].text == ended.reply_text
    assert story.turns[turn.turn].pieces >= pieces


async def test_it_is_told_what_it_needs(world: TurnWorld, endpoint: Endpoint) -> None:
    """Who asks, the entries so far, and a key that is the same for every attempt; signed, with the caller's trace."""
    await world.worker()
    first = await ask(world, endpoint, "fast")
    await world.ended_once(first)
    turn = await world.post(first.thread, "and now?")
    await world.ended_once(turn)
    (request,) = endpoint.of(turn.turn)
    assert request.is_signed
    said = endpoint.of(first.turn)[0].body["text"]
    assert request.body == {
        "agent": turn.agent,
        "thread": turn.thread,
        "turn": turn.turn,
        "attempt": 1,
        "key": turn.key,
        "user": None,
        "model": None,
        "text": "and now?",
        "entries": [
            {"role": "user", "text": said},
            {"role": "agent", "text": f"You said: {said}"},
            {"role": "user", "text": "and now?"},
        ],
    }
    assert request.headers["idempotency-key"] == turn.turn
    assert request.headers["traceparent"] == TRACEPARENT


async def test_an_unsigned_request_is_refused_there(world: TurnWorld, endpoint: Endpoint) -> None:
    """Without its secret an agent signs nothing; 401 is final, in the endpoint's own words."""
    await world.worker()
    turn = await ask(world, endpoint, "fast", signing_secret="another-secret-of-nobody")
    ended = await world.ended_once(turn, "failed")
    assert (ended.error_code, ended.attempts) == ("agent-refused", 1)
    assert ended.error_message == "the agent answered 401: the signature is not ours, or too old"


@pytest.mark.parametrize("fault", ["fail-503-2", "sse+cut-2", "malformed-2"])
async def test_a_failure_that_passes_is_tried_again(
    world: TurnWorld, endpoint: Endpoint, brisk_retries: None, fault: str
) -> None:
    """Under the same key; what was relayed of a stream that broke is void."""
    await world.worker()
    turn = await ask(world, endpoint, fault)
    ended = await world.ended_once(turn)
    requests = endpoint.of(turn.turn)
    assert [request.body["attempt"] for request in requests] == [1, 2, 3]
    assert {request.headers["idempotency-key"] for request in requests} == {turn.turn}
    assert (await world.story(turn.thread)).turns[turn.turn].text == ended.reply_text


async def test_a_failure_that_stays_ends(world: TurnWorld, endpoint: Endpoint, brisk_retries: None) -> None:
    await world.worker()
    turn = await ask(world, endpoint, "fail-500")
    ended = await world.ended_once(turn, "failed")
    assert (ended.error_code, ended.attempts) == ("agent-unavailable", turn_times.ATTEMPTS_MAX)
    assert "The endpoint fails with 500" in str(ended.error_message)


async def test_silence_ends_at_the_agents_time(world: TurnWorld, endpoint: Endpoint) -> None:
    """Five seconds before the cap, so that the turn can still say so; the request is closed."""
    await world.worker()
    turn = await ask(world, endpoint, "hang", turn_cap_s=6.0)
    ended = await world.ended_once(turn, "failed")
    assert (ended.error_code, ended.attempts) == ("turn-timeout", 1)
    assert "within 1 s" in str(ended.error_message)
    await eventually(lambda: endpoint.of(turn.turn)[0].end == "left")
