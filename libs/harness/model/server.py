"""The stand-in model's server: chat completions, and a control API that says who has asked for what.

    POST /v1/chat/completions            the OpenAI API, streaming or not; needs a bearer token, any one
    GET  /control/requests?about=TEXT    `[ModelRequest, ...]`: those whose question contains the text, in order
    GET  /readyz

What it does is chosen by the `model` in the request (`harness.model.behaviour`). Its answer is `You said: …`, or
`I was told: …` with the outcomes of the tools that it asked for; its usage counts words.

Owns:     the record of every request. A conversation is known by its question, the last user message: whoever wants to
          count asks each question in words of its own.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.loopback import LAST_CHUNK, SSE_HEAD, Answer, Call, Connection, LoopbackServer, chunk
from harness.model import chat
from harness.model.behaviour import Behaviour, UnknownBehaviour, parse_behaviour

NOT_JSON = '{"choices": [{"delta": {"content": "half a'
JSON_TYPE = {"Content-Type": "application/json"}


class ModelRequest(msgspec.Struct):
    """One request for a chat completion.

    Attributes:
        question: what it was about.
        digest: the same for the same messages to the same model.
        told: outcomes of tools since the question.
        tools: names of the tools that were offered.
        calls: tools that it was answered with.
        end: how it ended: `answered` in full, `failed` as the behaviour has it, `refused` as a bad request, or `left`
            by the caller in the middle; `open` so far.
    """

    model: str
    question: str
    digest: str
    told: list[str]
    tools: list[str]
    stream: bool
    calls: list[str] = []
    end: Literal["open", "answered", "failed", "refused", "left"] = "open"


def repeated(requests: Sequence[ModelRequest]) -> int:
    """How many requests asked for what had been answered in full before."""
    answered: set[str] = set()
    count = 0
    for request in requests:
        count += request.digest in answered
        if request.end == "answered":
            answered.add(request.digest)
    return count


class Model(LoopbackServer):
    """A stand-in model on a loopback port, as an async context manager.

    Attributes:
        requests: every request that could be read, in order.
    """

    def __init__(self, port: int = 0) -> None:
        """Describe it; port 0 takes any free one."""
        super().__init__(port)
        self.requests: list[ModelRequest] = []

    @property
    def url(self) -> str:
        """What an OpenAI client takes for its `base_url`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def about(self, text: str) -> list[ModelRequest]:
        """The requests whose question contains the text, in order."""
        return [request for request in self.requests if text in request.question]

    async def serve(self, call: Call, connection: Connection) -> None:
        """Answer as a model, or to whoever counts."""
        match call.method, call.path:
            case "POST", ("v1", "chat", "completions"):
                await self._complete(call, connection)
            case "GET", ("control", "requests"):
                found = self.about(call.query.get("about", ""))
                await connection.answer(Answer(200, JSON_TYPE, msgspec.json.encode(found).decode()))
            case "GET", ("readyz",):
                await connection.answer(Answer(200))
            case _:
                await connection.answer(_refusal(404, f"no {call.method} /{'/'.join(call.path)}"))

    async def _complete(self, call: Call, connection: Connection) -> None:
        if not call.headers.get("authorization", "").removeprefix("Bearer "):
            await connection.answer(_refusal(401, "You didn't provide an API key"))
            return
        try:
            asked = chat.read_request(call.body)
        except chat.BadRequest as error:
            await connection.answer(_refusal(400, str(error)))
            return
        request = ModelRequest(
            asked.model, asked.question, asked.digest, list(asked.told), list(asked.tools), asked.stream
        )
        self.requests.append(request)
        try:
            behaviour = parse_behaviour(asked.model)
        except UnknownBehaviour:
            request.end = "refused"
            await connection.answer(_refusal(404, f"The model `{asked.model}` does not exist"))
            return
        number = sum(earlier.question == asked.question for earlier in self.requests)
        await self._behave(behaviour, number, asked, request, connection)

    async def _behave(
        self, behaviour: Behaviour, number: int, asked: chat.Asked, request: ModelRequest, connection: Connection
    ) -> None:
        reply = chat.reply_to(asked, behaviour)
        match behaviour.fault_of(number):
            case "fail":
                request.end = "failed"
                await connection.answer(_refusal(behaviour.status, f"The model fails with {behaviour.status}"))
            case "hang":
                await connection.while_open()
                request.end = "left"
            case "cut":
                request.end = "failed"
                await _cut(asked, reply, connection)
            case "malformed":
                request.end = "failed"
                await _answer_malformed(asked, connection)
            case None:
                request.calls = [wanted.name for wanted in reply.calls]
                await connection.while_open(_say(asked, reply, behaviour, request, connection))
                if request.end == "open":
                    request.end = "left"


async def _say(
    asked: chat.Asked, reply: chat.Reply, behaviour: Behaviour, request: ModelRequest, connection: Connection
) -> None:
    await asyncio.sleep(behaviour.think_s)
    pause_s = behaviour.slow_s / len(reply.words) if reply.words else 0.0
    if not asked.stream:
        await asyncio.sleep(pause_s * len(reply.words))
        # Noted before it is said: whoever has the whole answer finds it counted.
        request.end = "answered"
        await connection.answer(Answer(200, JSON_TYPE, chat.whole_body(asked, reply)))
        return
    connection.writer.write(SSE_HEAD)
    for event, says_word in chat.stream_events(asked, reply):
        if says_word:
            await asyncio.sleep(pause_s)
        if event == chat.DONE:
            request.end = "answered"
        await connection.chunk(event)
    connection.writer.write(LAST_CHUNK)
    await connection.writer.drain()


async def _cut(asked: chat.Asked, reply: chat.Reply, connection: Connection) -> None:
    if not asked.stream:
        body = chat.whole_body(asked, reply).encode()
        connection.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        await connection.cut(body)
        return
    events = [event for event, _ in chat.stream_events(asked, reply)]
    connection.writer.write(SSE_HEAD)
    for event in events[: len(events) // 2]:
        await connection.chunk(event)
    await connection.cut(chunk(events[len(events) // 2]))


async def _answer_malformed(asked: chat.Asked, connection: Connection) -> None:
    if not asked.stream:
        await connection.answer(Answer(200, JSON_TYPE, NOT_JSON))
        return
    connection.writer.write(SSE_HEAD)
    await connection.chunk(f"data: {NOT_JSON}\n\n".encode())
    connection.writer.write(LAST_CHUNK)
    await connection.writer.drain()


def _refusal(status: int, message: str) -> Answer:
    return Answer(status, JSON_TYPE, chat.error_body(status, message))
