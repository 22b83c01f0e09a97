"""The stand-in model: the official client is content with it, its requests are counted, and it fails as it was told."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support import eventually

from harness.model import Model, repeated
from harness.model.remote import running_model
from harness.runner import temporary_directory

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"mark": {"type": "string"}}, "required": ["mark"]},
        },
    }
    for name in ("look", "work")
]


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as model:
        yield model


@pytest.fixture
async def client(model: Model) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=model.url, api_key="any", max_retries=0, timeout=20) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]


async def test_an_answer_comes_whole_with_its_usage(model: Model, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fast", messages=user("How are you?"))
    assert answer.choices[0].message.content == "You said: How are you?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)
    assert [request.end for request in model.about("How are you?")] == ["answered"]
    assert model.about("something else") == []


async def test_a_streamed_answer_comes_word_by_word_and_its_usage_last(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="slow-0.5", messages=user("Count."), stream=True, stream_options={"include_usage": True}
    )
    began = time.monotonic()
    chunks = [chunk async for chunk in stream]
    assert time.monotonic() - began > 0.4
    words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert words == ["You ", "said: ", "Count. ", "1 ", "2 ", "3 ", "4 ", "5"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].choices == []


async def test_a_stream_has_no_usage_unless_it_was_asked_for(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="fast", messages=user("Hi"), stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_it_asks_for_tools_in_turn_and_says_what_it_was_told(
    model: Model, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """The first call is the one that the question names, the second is filled up from those that are offered."""
    messages = user('Please.\ncall look {"mark": "m1"}')
    asked = []
    for number in range(2):
        message = await complete(client, "tools-2", messages, stream)
        (call,) = message.tool_calls or ()
        assert message.content is None
        asked.append((call.function.name, call.function.arguments))
        messages.append(message.to_dict())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"outcome {number}"})
    assert asked == [("look", '{"mark": "m1"}'), ("work", '{"mark": "x"}')]
    answer = await complete(client, "tools-2", messages, stream)
    assert answer.content == "I was told: outcome 0 | outcome 1"
    requests = model.about("Please.")
    assert [request.calls for request in requests] == [["look"], ["work"], []]
    assert requests[-1].told == ["outcome 0", "outcome 1"]
    assert requests[0].tools == ["look", "work"]
    assert repeated(requests) == 0


async def test_it_asks_for_tools_at_once(client: openai.AsyncOpenAI) -> None:
    message = await complete(client, "parallel-2", user("Please."), True)
    assert [call.function.name for call in message.tool_calls or ()] == ["look", "work"]


async def test_a_request_that_was_answered_before_is_counted_as_repeated(
    model: Model, client: openai.AsyncOpenAI
) -> None:
    """What was cut off before is no repeat, and neither is the same question to another model."""
    with pytest.raises(openai.APIStatusError):
        await client.chat.completions.create(model="fail-500-1", messages=user("q"))
    await client.chat.completions.create(model="fail-500-1", messages=user("q"))
    await client.chat.completions.create(model="fast", messages=user("q"))
    assert repeated(model.about("q")) == 0
    await client.chat.completions.create(model="fast", messages=user("q"))
    assert repeated(model.about("q")) == 1


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        pytest.param("fail-400", [400, 400, 400], id="always"),
        pytest.param("fail-500-2", [500, 500, 200], id="twice"),
        pytest.param("nobody", [404, 404, 404], id="no-such-model"),
    ],
)
async def test_it_fails_as_often_as_it_was_told_to(client: openai.AsyncOpenAI, name: str, statuses: list[int]) -> None:
    got = []
    for _ in statuses:
        try:
            await client.chat.completions.create(model=name, messages=user("q"))
            got.append(200)
        except openai.APIStatusError as error:
            got.append(error.status_code)
    assert got == statuses


async def test_a_hanging_model_notices_who_leaves(model: Model, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.2).chat.completions.create(model="hang", messages=user("q"))
    await eventually(lambda: [request.end for request in model.requests] == ["left"])


async def test_a_slow_model_notices_who_leaves(model: Model, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="slow-30", messages=user("q"), stream=True)
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: [request.end for request in model.requests] == ["left"])


@pytest.mark.parametrize("fault", ["cut-1", "malformed-1"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_breaks_off_is_an_error_once(
    model: Model, client: openai.AsyncOpenAI, fault: str, stream: bool
) -> None:
    # Whatever the client makes of it (it wraps broken connections while it waits, not while it streams).
    with pytest.raises(Exception, match=r".") as caught:
        await complete(client, fault, user("q"), stream)
    assert not isinstance(caught.value, openai.APIStatusError | AssertionError)
    assert (await complete(client, fault, user("q"), stream)).content == "You said: q"
    assert [request.end for request in model.requests] == ["failed", "answered"]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        pytest.param([], "empty", id="nothing"),
        pytest.param([{"role": "tool", "tool_call_id": "c1", "content": "x"}], "waits", id="result-without-call"),
        pytest.param(
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                    ],
                },
                {"role": "user", "content": "x"},
            ],
            "no result",
            id="call-without-result",
        ),
    ],
)
async def test_it_refuses_what_the_api_refuses(client: openai.AsyncOpenAI, messages: list[Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        await client.chat.completions.create(model="fast", messages=messages)


async def test_it_refuses_a_tool_with_a_bad_name_and_a_caller_without_a_key(
    model: Model, client: openai.AsyncOpenAI
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "files.read"}}]
    with pytest.raises(openai.BadRequestError, match=r"files\.read"):
        await client.chat.completions.create(model="fast", messages=user("q"), tools=tools)
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(
            model="fast", messages=user("q"), extra_headers={"Authorization": openai.omit}
        )
    assert model.requests == []


async def test_an_odd_answer_carries_what_databases_refuse(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="odd", messages=user("q"))
    assert answer.choices[0].message.content == "\x00 \ud800 You said: q"


async def test_a_model_in_a_process_counts_likewise() -> None:
    with temporary_directory() as directory:
        async with (
            running_model(Path(directory)) as model,
            openai.AsyncOpenAI(base_url=model.url, api_key="any", max_retries=0) as client,
        ):
            await asyncio.gather(
                *(client.chat.completions.create(model="fast", messages=user(f"q{n}")) for n in range(3))
            )
            assert [request.question for request in await model.about("q1")] == ["q1"]
            assert len(await model.about("q")) == 3


async def complete(client: openai.AsyncOpenAI, name: str, messages: list[Any], stream: bool) -> Any:
    """Return the message that the model answers with, put together from deltas if it is streamed."""
    if not stream:
        answer = await client.chat.completions.create(model=name, messages=messages, tools=TOOLS)
        return answer.choices[0].message
    async with client.chat.completions.stream(model=name, messages=messages, tools=TOOLS) as events:
        return (await events.get_final_completion()).choices[0].message
