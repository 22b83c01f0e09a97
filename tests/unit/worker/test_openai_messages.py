"""What a model is sent: messages and functions; and how its streamed reply is put together."""

import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest
from openai.types.chat import ChatCompletionChunk

from common.store.threads import Exchange
from towline.wire.frames import Tool
from worker.agents import AgentUnavailable, Attempt
from worker.agents.openai import Call, offer, opening, read_reply


def test_a_thread_is_told_in_its_order() -> None:
    """A turn without an answer leaves its question; instructions come first."""
    exchanges = [Exchange("one", "1"), Exchange("two", None), Exchange("three", None)]
    assert [(m["role"], m["content"]) for m in opening("be brief", exchanges)] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
        ("user", "three"),
    ]
    assert opening(None, exchanges)[0]["role"] == "user"


def test_tools_get_names_that_the_api_takes() -> None:
    """Each its own, however alike they are, and each leads back to the machine's."""
    tools = [Tool("look"), Tool("form.fill"), Tool("form/fill"), Tool("ö" * 128), Tool("ä" * 128)]
    functions, names = offer(tools)
    assert list(names.values()) == [tool.name for tool in tools]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert list(names)[:3] == ["look", "form_fill", "form_fill_2"]
    assert [function["function"]["name"] for function in functions] == list(names)


def test_a_tool_without_a_schema_takes_any_object() -> None:
    (function,), _ = offer([Tool("look", input_schema={"required": ["a"]})])
    assert function["function"]["parameters"] == {"type": "object", "properties": {}, "required": ["a"]}


class Saying:
    """An attempt that only listens."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> str:
        self.said.append(text)
        return text


async def chunks(deltas: Iterable[dict[str, Any]], finish: str | None = "stop") -> AsyncIterator[ChatCompletionChunk]:
    for delta in [*deltas, None]:
        choice = {"index": 0, "delta": delta or {}, "finish_reason": None if delta is not None else finish}
        body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m-1", "choices": [choice]}
        yield ChatCompletionChunk.model_validate(body)


async def read(deltas: Iterable[dict[str, Any]], *, finish: str | None = "stop", lead: str = "") -> Any:
    saying = Saying()
    reply = await read_reply(chunks(deltas, finish), cast(Attempt, saying), lead)
    return reply, saying.said


async def test_pieces_make_a_text() -> None:
    reply, said = await read([{"content": "a"}, {"content": ""}, {"content": "b"}], lead="\n\n")
    assert (reply.text, said, reply.model, reply.finish) == ("ab", ["\n\na", "b"], "m-1", "stop")


async def test_pieces_make_calls() -> None:
    """Heads and arguments come apart, and two calls in turn; a call without an id gets one."""
    function = {"index": 0, "id": "x", "function": {"name": "look", "arguments": ""}}
    reply, _ = await read(
        [
            {"tool_calls": [function]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}, {"index": 1, "function": {"name": "go"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        ],
        finish="tool_calls",
    )
    assert reply.calls == [Call("x", "look", '{"a":1}'), Call("call-1", "go", "")]


async def test_a_refusal_is_said() -> None:
    reply, said = await read([{"refusal": "I will not"}])
    assert (reply.text, said) == ("I will not", ["I will not"])


async def test_an_answer_that_stops_in_the_middle_is_none() -> None:
    with pytest.raises(AgentUnavailable, match="in the middle"):
        await read([{"content": "half an"}], finish=None)
