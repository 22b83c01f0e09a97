"""The agent `openai`: any API of chat completions, streamed, with the tools of the thread's user.

Promises: each model call and each tool call is a step, so an attempt that follows a crash pays for none of them twice.
          A model that writes nonsense (arguments that are no JSON, tools that do not exist) is told so; an API that
          does is tried again with pauses, and then the turn says why it failed.
Used by:  `app`, when turns run here: the official client takes a second to import.
"""

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import openai
from openai.types.chat import ChatCompletionChunk

from common.process.egress import EgressRefused
from common.process.outbound import stream_bytes
from common.process.secrets import Secrets
from common.store.threads import Exchange
from towline.wire import json
from towline.wire.frames import Tool
from worker.agents import TOKENS_MAX, AgentFailed, AgentUnavailable, Asked, Attempt
from worker.agents.outgoing import reason_of, refusal, secret_of

# A model that goes on asking for tools costs money with each call.
MODEL_CALLS_MAX = 50
# Of one response: the client itself reads on for ever, also inside one event.
RESPONSE_BYTES_MAX = 16 * 1024 * 1024
# Of what a tool answered: more does not fit into models' contexts, and the API would refuse the whole conversation.
TOLD_CHARACTERS_MAX = 200_000
# Names of functions in the API; the machine's own may be longer and of other characters.
NAME_CHARACTERS_MAX = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class Call(msgspec.Struct, frozen=True):
    """A tool call that the model asks for; `arguments`: as it wrote them."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True):
    """What one model call answered; this is what is kept of it."""

    text: str
    calls: list[Call]
    finish: str
    model: str | None
    input_tokens: int
    output_tokens: int


class OpenAIAgent:
    """See the module. `http`: guarded, and this agent's own."""

    def __init__(self, http: httpx.AsyncClient, secrets: Secrets) -> None:
        http.event_hooks = {"response": [_bound]}
        self._http = http
        self._secrets = secrets

    async def answer(self, asked: Asked, attempt: Attempt) -> str:
        """Ask the model, run the tools that it asks for, and so on until it has said its last word."""
        key = secret_of(self._secrets, asked.agent.api_key, "api_key")
        functions, names = offer(await attempt.tools())
        messages = opening(asked.agent.instructions, asked.exchanges)
        model = asked.turn.model or asked.agent.model
        answer = ""
        for number in range(1, MODEL_CALLS_MAX + 1):
            step = f"model-{number}"
            lead = "\n\n" if answer else ""
            if (kept := attempt.recall(step)) is not None:
                reply = msgspec.convert(kept, Reply)
                attempt.say(lead + reply.text if reply.text else "")
            else:
                request: dict[str, Any] = {"model": model, "messages": messages}
                if functions:
                    request["tools"] = functions
                reply = await self._ask(asked.agent.url, key, request, attempt, lead)
                await attempt.keep(step, msgspec.to_builtins(reply))
            attempt.spend(reply.model, reply.input_tokens, reply.output_tokens)
            answer += lead + reply.text if reply.text else ""
            if not reply.calls:
                if not answer.strip():
                    raise AgentFailed("answer-empty", f"the model answered without a word ({reply.finish})")
                return answer
            messages.append(_assistant(reply))
            for call in reply.calls:
                told = await attempt.call_tool(names.get(call.name, call.name), call.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _bounded(told)})
        raise AgentFailed("too-many-calls", f"the model asked for tools {MODEL_CALLS_MAX} times in one turn")

    async def _ask(
        self, url: str | None, key: str | None, request: Mapping[str, Any], attempt: Attempt, lead: str
    ) -> Reply:
        """One model call, relayed as it comes."""
        client = openai.AsyncOpenAI(
            # Never what the environment holds for others: a key goes to the URL that it was given for.
            api_key=key or "none",
            base_url=url,
            max_retries=0,
            http_client=self._http,  # type: ignore[arg-type]  # it takes clients of httpx, and says httpx2
            timeout=self._http.timeout,  # type: ignore[arg-type]
        )
        omitted = ["OpenAI-Organization", "OpenAI-Project"] + ([] if key else ["Authorization"])
        try:
            stream = await client.chat.completions.create(
                **request,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={name: openai.Omit() for name in omitted},
            )
            async with stream:
                return await read_reply(stream, attempt, lead)
        except EgressRefused as error:
            raise AgentFailed("egress-refused", str(error)) from error
        except openai.APIStatusError as error:
            raise refusal(
                error.status_code, reason_of(error.response.content), error.response.headers.get("retry-after")
            ) from error
        except (openai.APIConnectionError, httpx.RequestError) as error:
            raise AgentUnavailable(f"the model cannot be reached: {error.__cause__ or error}") from error
        except openai.APIError as error:
            raise AgentUnavailable(f"the model broke off: {json.mend_text(error.message)}") from error
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            # The client hands on whatever the API sends, without looking at it.
            raise AgentUnavailable(f"the model's answer cannot be read: {error}") from error


async def read_reply(chunks: AsyncIterator[ChatCompletionChunk], attempt: Attempt, lead: str) -> Reply:
    """Gather a streamed reply, and relay its text. Raises: AgentUnavailable when it ends in the middle."""
    said: list[str] = []
    calls: list[dict[str, str]] = []
    places: dict[int, int] = {}
    finish: str | None = None
    model: str | None = None
    usage = None
    async for chunk in chunks:
        model = chunk.model or model
        usage = chunk.usage or usage
        for choice in chunk.choices or ():
            finish = choice.finish_reason or finish
            for text in (choice.delta.content, choice.delta.refusal):
                if text:
                    said.append(attempt.say(lead + text).removeprefix(lead))
                    lead = ""
            for piece in choice.delta.tool_calls or ():
                place = places.setdefault(piece.index, len(calls))
                if place == len(calls):
                    calls.append({"id": "", "name": "", "arguments": ""})
                call = calls[place]
                call["id"] = piece.id or call["id"]
                if piece.function is not None:
                    call["name"] += piece.function.name or ""
                    call["arguments"] += piece.function.arguments or ""
    if finish is None:
        raise AgentUnavailable("the model's answer ended in the middle")
    return Reply(
        text="".join(said),
        calls=[_call(call, number) for number, call in enumerate(calls)],
        finish=json.mend_text(finish),
        model=None if model is None else json.mend_text(model),
        input_tokens=_tokens(usage, "prompt_tokens"),
        output_tokens=_tokens(usage, "completion_tokens"),
    )


def opening(instructions: str | None, exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """The messages that a turn begins with."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.text})
        if exchange.reply is not None:
            messages.append({"role": "assistant", "content": exchange.reply})
    return messages


def offer(tools: Iterable[Tool]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Tools as the API takes them, and the machine's name of each by the one that it was given for the API."""
    functions: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for tool in tools:
        plain = _NOT_IN_NAMES.sub("_", tool.name)[:NAME_CHARACTERS_MAX]
        name, number = plain, 1
        while name in names:
            number += 1
            name = f"{plain[: NAME_CHARACTERS_MAX - 4]}_{number}"
        names[name] = tool.name
        schema = {"type": "object", "properties": {}} | tool.input_schema
        function = {"name": name, "description": tool.description, "parameters": schema}
        functions.append({"type": "function", "function": function})
    return functions, names


def _tokens(usage: object, name: str) -> int:
    """A count of the API; what is none must not cost the answer."""
    value = getattr(usage, name, None)
    return max(0, min(value, TOKENS_MAX)) if isinstance(value, int) else 0


def _call(call: Mapping[str, str], number: int) -> Call:
    mended = {name: json.mend_text(value) for name, value in call.items()}
    return Call(mended["id"] or f"call-{number}", mended["name"], mended["arguments"])


def _assistant(reply: Reply) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]
    return {"role": "assistant", "content": reply.text or None, "tool_calls": calls}


def _bounded(text: str) -> str:
    if len(text) <= TOLD_CHARACTERS_MAX:
        return text
    return f"{text[:TOLD_CHARACTERS_MAX]}\n[cut off here: the first {TOLD_CHARACTERS_MAX} of {len(text)} characters]"


class _BoundedBody(httpx.AsyncByteStream):
    """A body that breaks off when it becomes too large, compressed or not."""

    def __init__(self, parts: AsyncIterator[bytes], body: httpx.AsyncByteStream) -> None:
        self._parts = parts
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = RESPONSE_BYTES_MAX
        async for part in self._parts:
            left -= len(part)
            if left < 0:
                raise httpx.ReadError(f"the answer has more than {RESPONSE_BYTES_MAX} bytes")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


async def _bound(response: httpx.Response) -> None:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    response.stream = _BoundedBody(stream_bytes(response), response.stream)
    response.headers.pop("Content-Encoding", None)  # undone by now
