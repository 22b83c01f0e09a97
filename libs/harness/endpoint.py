"""`python -m harness.endpoint --port N`: a stand-in for a product's own endpoint that answers turns (agents of kind
`http`), as well and as badly as real ones do.

    POST /turns/{behaviour}              one turn; what it does is named as in `harness.model.behaviour`, and `sse` says
                                         the answer as a stream
    GET  /control/turns/{turn}           `[TurnRequest, ...]` in order
    GET  /readyz

A request must be signed with `SECRET` within the last `FRESH_FOR_S` (`worker.agents.http` says how); another one is
answered 401. The answer is `You said: …`; its usage counts words.

Owns:     the record of every request.
"""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from harness.loopback import LAST_CHUNK, SSE_HEAD, Answer, Call, Connection, LoopbackServer, chunk
from harness.model.behaviour import Behaviour, UnknownBehaviour, answer_words, parse_behaviour
from harness.stand_in import running_stand_in, serve_until_stopped

SECRET = "a-secret-of-the-harness"
FRESH_FOR_S = 300
JSON_TYPE = {"Content-Type": "application/json"}


class TurnRequest(msgspec.Struct):
    """One request for a turn.

    Attributes:
        body: as it came.
        headers: by name in lower case.
        is_signed: whether signature and time were good; without that it was answered 401.
        end: how it ended: `answered` in full, `failed` as the behaviour has it, `refused` unsigned, or `left` by the
            caller in the middle; `open` so far.
    """

    turn: str
    body: dict[str, Any]
    headers: dict[str, str]
    is_signed: bool
    end: Literal["open", "answered", "failed", "refused", "left"] = "open"


class Endpoint(LoopbackServer):
    """A stand-in endpoint on a loopback port, as an async context manager.

    Attributes:
        requests: every request that could be read, in order.
    """

    def __init__(self, port: int = 0) -> None:
        """Describe it; port 0 takes any free one."""
        super().__init__(port)
        self.requests: list[TurnRequest] = []

    def url(self, behaviour: str) -> str:
        """Where an agent is that behaves so."""
        return f"http://127.0.0.1:{self.port}/turns/{behaviour}"

    def of(self, turn: str) -> list[TurnRequest]:
        """The requests for a turn, in order."""
        return [request for request in self.requests if request.turn == turn]

    async def serve(self, call: Call, connection: Connection) -> None:
        """Answer a turn, or whoever counts."""
        match call.method, call.path:
            case "POST", ("turns", name):
                await self._answer(name, call, connection)
            case "GET", ("control", "turns", turn):
                await connection.answer(Answer(200, JSON_TYPE, msgspec.json.encode(self.of(turn)).decode()))
            case "GET", ("readyz",):
                await connection.answer(Answer(200))
            case _:
                await connection.answer(Answer(404))

    async def _answer(self, name: str, call: Call, connection: Connection) -> None:
        words = name.split("+")
        try:
            behaviour = parse_behaviour("+".join(word for word in words if word != "sse") or "fast")
            body = json.loads(call.body)
        except (UnknownBehaviour, ValueError) as error:
            await connection.answer(_refusal(404 if isinstance(error, UnknownBehaviour) else 400, str(error)))
            return
        request = TurnRequest(str(body.get("turn")), body, call.headers, _is_signed(call))
        self.requests.append(request)
        if not request.is_signed:
            request.end = "refused"
            await connection.answer(_refusal(401, "the signature is not ours, or too old"))
            return
        match behaviour.fault_of(len(self.of(request.turn))):
            case "fail":
                request.end = "failed"
                status = behaviour.status
                await connection.answer(_refusal(status, f"The endpoint fails with {status}"))
            case "hang":
                await connection.while_open()
                request.end = "left"
            case "cut":
                request.end = "failed"
                connection.writer.write(SSE_HEAD)
                await connection.chunk(_event("delta", {"text": "half "}))
                await connection.cut(chunk(_event("delta", {"text": "an answer"})))
            case "malformed":
                request.end = "failed"
                await connection.answer(Answer(200, JSON_TYPE, '{"text": "half an'))
            case None:
                pieces = answer_words(behaviour, f"You said: {body.get('text')}")
                say = _stream if "sse" in words else _answer_whole
                await connection.while_open(say(pieces, behaviour, request, connection))
                if request.end == "open":
                    request.end = "left"


async def _answer_whole(pieces: list[str], behaviour: Behaviour, request: TurnRequest, connection: Connection) -> None:
    await asyncio.sleep(behaviour.slow_s)
    # Noted before it is said: whoever has the whole answer finds it counted.
    request.end = "answered"
    await connection.answer(Answer(200, JSON_TYPE, json.dumps(_whole(pieces))))


async def _stream(pieces: list[str], behaviour: Behaviour, request: TurnRequest, connection: Connection) -> None:
    connection.writer.write(SSE_HEAD)
    for piece in pieces:
        await asyncio.sleep(behaviour.slow_s / len(pieces))
        await connection.chunk(_event("delta", {"text": piece}))
    request.end = "answered"
    await connection.chunk(_event("message", _whole(pieces)))
    connection.writer.write(LAST_CHUNK)
    await connection.writer.drain()


def _whole(pieces: list[str]) -> dict[str, Any]:
    usage = {"model": "endpoint", "input_tokens": 1, "output_tokens": len(pieces)}
    return {"text": "".join(pieces), "usage": usage}


def _is_signed(call: Call) -> bool:
    sent_at = call.headers.get("towline-timestamp", "")
    if not sent_at.isdecimal() or abs(time.time() - int(sent_at)) > FRESH_FOR_S:
        return False
    signed = hmac.new(SECRET.encode(), sent_at.encode() + b"." + call.body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(f"v1={signed}", call.headers.get("towline-signature", ""))


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _refusal(status: int, message: str) -> Answer:
    return Answer(status, JSON_TYPE, json.dumps({"error": {"message": message}}))


class RemoteEndpoint:
    """What can be asked of an endpoint in a process of its own, or in a container."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        """`url`: its root, as workers reach it; `http`: has its root as we reach it for the base URL."""
        self._url = url
        self._http = http

    def url(self, behaviour: str) -> str:
        """Where an agent is that behaves so."""
        return f"{self._url}/turns/{behaviour}"

    async def of(self, turn: str) -> list[TurnRequest]:
        """The requests for a turn, in order."""
        response = await self._http.get(f"/control/turns/{turn}")
        return msgspec.json.decode(response.raise_for_status().content, type=list[TurnRequest])


@asynccontextmanager
async def running_endpoint(directory: Path, name: str = "endpoint") -> AsyncIterator[RemoteEndpoint]:
    """Run an endpoint process, with its log in `directory`, for as long as the context lasts."""
    async with running_stand_in("harness.endpoint", directory, name) as stand_in:
        yield RemoteEndpoint(stand_in.url, stand_in.http)


if __name__ == "__main__":
    serve_until_stopped(Endpoint, __doc__ or "")
