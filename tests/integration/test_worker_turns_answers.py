"""Answers of endpoints, word by word: what each means for the turn, however odd, and that none is tried for ever."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from turn_workers import TurnWorld, open_world

from common import turn_times
from common.store.postgres import Postgres
from common.store.redis import Redis
from harness.loopback import Answer, Call, Connection, LoopbackServer

JSON = {"Content-Type": "application/json"}
SSE = {"Content-Type": "text/event-stream; charset=utf-8"}


class Scripted(LoopbackServer):
    """Answers every request with the same words; `requests` counts them."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(0)
        self.answer = answer
        self.requests = 0

    async def serve(self, call: Call, connection: Connection) -> None:
        self.requests += 1
        await connection.answer(self.answer)


@pytest.fixture
async def world(
    postgres: Postgres, redis_store: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TurnWorld]:
    monkeypatch.setattr(turn_times, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(turn_times, "RETRY_CAP_S", 0.05)
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


def event(kind: str, **data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@dataclass(frozen=True)
class Case:
    """An answer. `expected`: the reply, or code and a part of the message; `attempts`: how many requests."""

    name: str
    answer: Answer
    expected: str | tuple[str, str]
    attempts: int = 1


CASES = [
    Case("message-only", Answer(200, SSE, event("message", text="all of it")), "all of it"),
    Case("deltas-only", Answer(200, SSE, event("delta", text="a") + event("delta", text="b") + event("message")), "ab"),
    Case("corrected", Answer(200, SSE, event("delta", text="teh") + event("message", text="the")), "the"),
    Case("unknown-events", Answer(200, SSE, ": hi\n\n" + event("thought") + event("message", text="x")), "x"),
    Case("odd", Answer(200, JSON, '{"text": "a\\u0000b\\ud800"}'), "a\ufffdb\ufffd"),
    Case("more-members", Answer(200, JSON, '{"text": "x", "confidence": 1}'), "x"),
    Case("error", Answer(200, SSE, event("error", code="quota", message="no money left")), ("quota", "no money left")),
    Case(
        "error-that-passes",
        Answer(200, SSE, event("error", message="busy", retryable=True)),
        ("agent-unavailable", "busy (tried 5 times)"),
        turn_times.ATTEMPTS_MAX,
    ),
    Case(
        "no-end",
        Answer(200, SSE, event("delta", text="half")),
        ("agent-unavailable", "ended before its `message`"),
        turn_times.ATTEMPTS_MAX,
    ),
    Case("no-text", Answer(200, JSON, "{}"), ("agent-unavailable", "has no `text`"), turn_times.ATTEMPTS_MAX),
    Case(
        "wrong-type", Answer(200, JSON, '{"text": 5}'), ("agent-unavailable", "cannot be read"), turn_times.ATTEMPTS_MAX
    ),
    Case("deep", Answer(200, JSON, "[" * 100_000), ("agent-unavailable", "cannot be read"), turn_times.ATTEMPTS_MAX),
    Case("too-large", Answer(200, JSON, "x" * (6 * 1024 * 1024 + 1)), ("answer-too-large", "more than 6291456 bytes")),
    Case("large-event", Answer(200, SSE, event("delta", text="x" * 300_000)), ("event-too-large", "an event of 3000")),
    Case(
        "endless",
        Answer(200, SSE, event("delta", text="x" * 100_000) * 11),
        ("answer-too-large", "more than 1048576 characters"),
    ),
    Case("silent", Answer(200, JSON, '{"text": " "}'), ("answer-empty", "without a word")),
    Case("redirect", Answer(302, {"Location": "http://127.0.0.1:1/"}), ("agent-redirected", "answered 302")),
    Case("page", Answer(404, {}, "<html>nothing here</html>"), ("agent-refused", "the agent answered 404")),
    Case("nothing", Answer(204), ("agent-refused", "the agent answered 204")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_answer_means(world: TurnWorld, case: Case) -> None:
    await world.worker()
    async with Scripted(case.answer) as endpoint:
        thread = await world.thread("http", url=f"http://127.0.0.1:{endpoint.port}/")
        turn = await world.post(thread)
        if isinstance(case.expected, str):
            assert (await world.ended_once(turn)).reply_text == case.expected
        else:
            ended = await world.ended_once(turn, "failed")
            assert ended.error_code == case.expected[0]
            assert case.expected[1] in str(ended.error_message)
        assert endpoint.requests == case.attempts


async def test_what_an_answer_has_cost_is_kept(world: TurnWorld) -> None:
    """As the endpoint says; a negative count is none."""
    await world.worker()
    usage = {"model": "m-1", "input_tokens": 12, "output_tokens": -3}
    async with Scripted(Answer(200, JSON, json.dumps({"text": "x", "usage": usage}))) as endpoint:
        turn = await world.post(await world.thread("http", url=f"http://127.0.0.1:{endpoint.port}/"))
        await world.ended_once(turn)
    (row,) = await world.usage(turn)
    assert (row.model, row.input_tokens, row.output_tokens, row.model_calls) == ("m-1", 12, 0, 1)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": None, "completion_tokens": 2}, (0, 2)),
        ({"prompt_tokens": "12", "completion_tokens": -2}, (0, 0)),
        ({"prompt_tokens": 10**30, "completion_tokens": 1.5}, (10**12, 0)),
        ({}, (0, 0)),
    ],
    ids=["null", "text", "huge", "none"],
)
async def test_a_count_that_is_none_does_not_cost_the_answer(
    world: TurnWorld, usage: dict[str, object], expected: tuple[int, int]
) -> None:
    await world.worker()
    chunk = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage}
    async with Scripted(Answer(200, SSE, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")) as endpoint:
        thread = await world.thread("openai", url=f"http://127.0.0.1:{endpoint.port}/v1", model="m", api_key="k")
        turn = await world.post(thread)
        assert (await world.ended_once(turn)).reply_text == "hi"
    (row,) = await world.usage(turn)
    assert (row.input_tokens, row.output_tokens) == expected


async def test_a_compressed_answer_is_bounded_by_what_it_inflates_to(
    world: TurnWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed bomb, a thousand times what came in; it must not keep the worker from its other turns either."""
    monkeypatch.setattr("worker.agents.openai.RESPONSE_BYTES_MAX", 100_000)
    body = gzip.compress(b"data: " + b"x" * 200_000)

    class Compressing(Scripted):
        async def serve(self, call: Call, connection: Connection) -> None:
            self.requests += 1
            connection.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n")
            connection.writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            await connection.writer.drain()

    await world.worker()
    async with Compressing(Answer(200)) as endpoint:
        thread = await world.thread("openai", url=f"http://127.0.0.1:{endpoint.port}/v1", model="m", api_key="k")
        ended = await world.ended_once(await world.post(thread), "failed")
        assert "more than 100000 bytes" in str(ended.error_message)


async def test_a_model_that_never_stops_is_broken_off(world: TurnWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded whatever an API sends, also inside one event that never ends."""
    monkeypatch.setattr("worker.agents.openai.RESPONSE_BYTES_MAX", 100_000)
    await world.worker()
    async with Scripted(Answer(200, SSE, "data: " + "x" * 200_000)) as endpoint:
        thread = await world.thread("openai", url=f"http://127.0.0.1:{endpoint.port}/v1", model="m", api_key="k")
        ended = await world.ended_once(await world.post(thread), "failed")
        assert ended.error_code == "agent-unavailable"
        assert "more than 100000 bytes" in str(ended.error_message)
        assert endpoint.requests == turn_times.ATTEMPTS_MAX


async def test_without_a_key_nothing_of_the_environment_is_sent(
    world: TurnWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official client would take what it finds there, and send it to whatever URL an agent has."""
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-somebody-else")
    seen: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    class Listening(Scripted):
        async def serve(self, call: Call, connection: Connection) -> None:
            seen.put_nowait(call.headers)
            await super().serve(call, connection)

    await world.worker()
    async with Listening(Answer(400, JSON, '{"error": {"message": "no"}}')) as endpoint:
        thread = await world.thread("openai", url=f"http://127.0.0.1:{endpoint.port}/v1", model="m")
        await world.ended_once(await world.post(thread), "failed")
    headers = seen.get_nowait()
    assert "authorization" not in headers
    assert "of-somebody-else" not in headers.values()
