"""The OpenAI chat completions API as the stand-in model speaks it (PURE): requests in, answers out.

Promises: refuses what the API refuses (a tool call without its result, a result without its call, a bad tool name), so
          that a caller who passes here has its conversation in order. An answer depends on the request alone.
Used by:  the model's server.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.model.behaviour import Behaviour, answer_words

# The last event of a stream.
DONE = b"data: [DONE]\n\n"
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# A line of the question that says which tool is to be called with what: `call look {"mark": "m1"}`.
_CALL_LINE = re.compile(r"^call ([a-zA-Z0-9_-]+)(?: (\{.*\}))?$", re.MULTILINE)
_EXAMPLES: Mapping[str, Any] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


class BadRequest(ValueError):
    """The API refuses it; `str()` says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        model: whom it asks.
        question: the text of the last user message: what the conversation is about now.
        told: outcomes of tools since the question, in order.
        tools: the functions that are offered, by name, each with the schema of its parameters.
        words: how many the messages have.
        digest: the same for the same messages to the same model.
    """

    model: str
    question: str
    told: tuple[str, ...]
    tools: Mapping[str, Mapping[str, Any]]
    words: int
    digest: str
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for; `arguments`: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answers: words, or tool calls."""

    words: Sequence[str] = ()
    calls: Sequence[ToolCall] = ()

    @property
    def text(self) -> str:
        """All words."""
        return "".join(self.words)


def read_request(body: bytes) -> Asked:
    """Read a request's body. Raises: BadRequest."""
    try:
        asked = json.loads(body)
        model, messages = str(asked["model"]), list(asked["messages"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"no chat completion request: {error!r}") from error
    told = _read_messages(messages)
    questions = [_text(message) for message in messages if message["role"] == "user"]
    options = asked.get("stream_options")
    if options is not None and not asked.get("stream"):
        raise BadRequest("stream_options is only allowed when stream is on")
    return Asked(
        model=model,
        question=questions[-1] if questions else "",
        told=tuple(told),
        tools=_read_tools(asked.get("tools")),
        words=sum(len(_text(message).split()) for message in messages),
        digest=hashlib.sha256(json.dumps([model, messages], sort_keys=True).encode()).hexdigest()[:16],
        stream=bool(asked.get("stream")),
        include_usage=bool((options or {}).get("include_usage")),
    )


def _read_messages(messages: list[dict[str, Any]]) -> list[str]:
    """Check that calls and results belong together. Returns the results since the last question."""
    if not messages:
        raise BadRequest("messages must not be empty")
    told: list[str] = []
    open_calls: list[str] = []
    for message in messages:
        role = message.get("role")
        if open_calls and role != "tool":
            raise BadRequest(f"tool calls {open_calls} have no result")
        match role:
            case "tool":
                if message.get("tool_call_id") not in open_calls:
                    raise BadRequest(f"no tool call {message.get('tool_call_id')!r} waits for a result")
                open_calls.remove(message["tool_call_id"])
                told.append(_text(message))
            case "assistant":
                open_calls = [call["id"] for call in message.get("tool_calls") or ()]
                for call in message.get("tool_calls") or ():
                    _check_name(call["function"]["name"])
            case "user":
                told = []
            case "system" | "developer":
                pass
            case _:
                raise BadRequest(f"a message has the role {role!r}")
    if open_calls:
        raise BadRequest(f"tool calls {open_calls} have no result")
    return told


def _read_tools(tools: list[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    if tools is not None and not tools:
        raise BadRequest("tools must not be empty")
    read: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function") or {}
        _check_name(function.get("name"))
        read[function["name"]] = function.get("parameters") or {}
    return read


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise BadRequest(f"no name of a tool: {name!r}")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def reply_to(asked: Asked, behaviour: Behaviour) -> Reply:
    """What the model answers.

    The tools that it asks for are those of the question's lines `call NAME {arguments}`, offered or not; where they are
    fewer than it is to ask for, the offered ones in turn follow, with arguments that their schemas ask for.
    """
    done, wanted = len(asked.told), behaviour.tools
    if done < wanted:
        calls = _planned_calls(asked, wanted)[done : None if behaviour.at_once else done + 1]
        if calls:
            return Reply(calls=calls)
    said = f"You said: {asked.question}"
    if asked.told:
        said = "I was told: " + " | ".join(asked.told)
    return Reply(words=answer_words(behaviour, said))


def _planned_calls(asked: Asked, wanted: int) -> list[ToolCall]:
    calls = [ToolCall(found[1], found[2] or "{}") for found in _CALL_LINE.finditer(asked.question)][:wanted]
    offered = [ToolCall(name, json.dumps(_example(schema))) for name, schema in asked.tools.items()]
    while offered and len(calls) < wanted:
        calls.append(offered[len(calls) % len(offered)])
    return calls


def _example(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    return {name: _EXAMPLES.get(properties.get(name, {}).get("type"), "x") for name in schema.get("required") or ()}


def usage_of(asked: Asked, reply: Reply) -> dict[str, int]:
    """What it is said to have cost: a token for each word, and one for each call."""
    prompt, completion = asked.words, len(reply.words) + len(reply.calls)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_body(status: int, message: str) -> str:
    """The body of a refusal, as the API words it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})


def whole_body(asked: Asked, reply: Reply) -> str:
    """The body of an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": None if reply.calls else reply.text, "refusal": None}
    if reply.calls:
        message["tool_calls"] = _tool_calls(asked, reply)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return json.dumps(_head(asked, "chat.completion") | {"choices": [choice], "usage": usage_of(asked, reply)})


def stream_events(asked: Asked, reply: Reply) -> Iterator[tuple[bytes, bool]]:
    """The events of a streamed answer, encoded; with each, whether it says a word."""
    for delta, says_word in _deltas(asked, reply):
        yield _event(asked, [{"index": 0, "delta": delta, "finish_reason": None}]), says_word
    yield _event(asked, [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}]), False
    if asked.include_usage:
        yield _event(asked, [], usage=usage_of(asked, reply)), False
    yield DONE, False


def _deltas(asked: Asked, reply: Reply) -> Iterator[tuple[dict[str, Any], bool]]:
    yield {"role": "assistant", "content": None if reply.calls else "", "refusal": None}, False
    for word in reply.words:
        yield {"content": word}, True
    for index, call in enumerate(_tool_calls(asked, reply)):
        arguments = call["function"]["arguments"]
        middle = len(arguments) // 2
        # As the API does: the head first, and the arguments in pieces that are no JSON of their own.
        yield {"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]}, False
        for piece in (arguments[:middle], arguments[middle:]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, False


def _event(asked: Asked, choices: list[dict[str, Any]], **more: Any) -> bytes:
    return f"data: {json.dumps(_head(asked, 'chat.completion.chunk') | {'choices': choices} | more)}\n\n".encode()


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{asked.digest}", "object": kind, "created": 1_700_000_000, "model": asked.model}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop"


def _tool_calls(asked: Asked, reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{asked.digest}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.calls)
    ]
