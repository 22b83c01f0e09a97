"""The agent `http`: one held-open POST to the product's own endpoint, whose answer is the turn's.

    POST {url}                      content-type: application/json
    Idempotency-Key: {turn}         the same for every attempt: answer what was answered before, if it was
    Towline-Timestamp: {seconds}    Unix time of this request
    Towline-Signature: v1={hex}     HMAC-SHA256, under the agent's signing secret, of timestamp + "." + body
    traceparent: ...                as the entry's caller gave it

    {"agent", "thread", "turn", "attempt", "key", "user", "model", "text", "entries": [{"role", "text"}, ...]}

`text` is what is to be answered, the last of `entries`; `key` is the entry's own. The answer is JSON, `{"text": ...}`,
or an SSE stream: `delta` events `{"text"}` are relayed as they come, and `message` `{"text"?}` is the end, whose text
counts (without one, that of the deltas does). Both may bring `"usage": {"model", "input_tokens", "output_tokens"}`. A
stream's event `error` `{"message", "code"?, "retryable"?}` ends the turn, or has it tried again.

A status of 4xx ends the turn with its reason, but 408, 425 and 429; those, 5xx, a broken connection and an answer that
cannot be read are tried again, with growing pauses. Silence ends at the agent's time (`turns.agent_time_s`).
"""

import time
from typing import TypeVar

import httpx
import msgspec

from common.process.egress import EgressRefused
from common.process.outbound import stream_bytes
from common.process.secrets import Secrets
from towline.wire import json, sse
from worker.agents import AgentFailed, AgentUnavailable, Asked, Attempt
from worker.agents.outgoing import reason_of, refusal, secret_of, signature

T = TypeVar("T")

# A text of 1 MiB, escaped as badly as JSON can.
ANSWER_BYTES_MAX = 6 * 1024 * 1024
# Of an answer that refuses: what is worth reading.
REFUSAL_BYTES_MAX = 16 * 1024


class Spent(msgspec.Struct, frozen=True):
    """What the endpoint says that the answer has cost."""

    model: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0


class Piece(msgspec.Struct, frozen=True):
    """Body of an answer, or data of `delta` and `message`."""

    text: str | None = None
    usage: Spent | None = None


class Problem(msgspec.Struct, frozen=True):
    """Data of `error`."""

    message: str = "the agent failed without saying why"
    code: str = "agent-failed"
    retryable: bool = False


class HttpAgent:
    """See the module."""

    def __init__(self, http: httpx.AsyncClient, secrets: Secrets) -> None:
        self._http = http
        self._secrets = secrets

    async def answer(self, asked: Asked, attempt: Attempt) -> str:
        """Ask the endpoint, and relay what it says."""
        assert asked.agent.url is not None
        body = request_body(asked)
        headers = self._headers(asked, body)
        try:
            async with self._http.stream("POST", asked.agent.url, content=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    reason = reason_of(await _read(response, REFUSAL_BYTES_MAX))
                    raise refusal(response.status_code, reason, response.headers.get("retry-after"))
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    return await _relay(response, attempt)
                whole = _piece(await _read(response, ANSWER_BYTES_MAX))
                if whole.text is None:
                    raise AgentUnavailable("the agent's answer has no `text`")
                _spend(whole, attempt)
                return attempt.say(whole.text)
        except EgressRefused as error:
            raise AgentFailed("egress-refused", str(error)) from error
        except httpx.RequestError as error:
            raise AgentUnavailable(f"the agent cannot be reached: {error or type(error).__name__}") from error

    def _headers(self, asked: Asked, body: bytes) -> dict[str, str]:
        sent_at = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
            "Idempotency-Key": asked.turn.turn,
            "Towline-Timestamp": sent_at,
        }
        if asked.turn.traceparent:
            headers["traceparent"] = asked.turn.traceparent
        if (secret := secret_of(self._secrets, asked.agent.signing_secret, "signing_secret")) is not None:
            headers["Towline-Signature"] = signature(secret, sent_at, body)
        return headers


def request_body(asked: Asked) -> bytes:
    """What is asked, as it is sent."""
    turn = asked.turn
    entries: list[dict[str, str]] = []
    for exchange in asked.exchanges:
        entries.append({"role": "user", "text": exchange.text})
        if exchange.reply is not None:
            entries.append({"role": "agent", "text": exchange.reply})
    return json.dumps(
        {
            "agent": turn.agent,
            "thread": turn.thread,
            "turn": turn.turn,
            "attempt": asked.attempt,
            "key": turn.key,
            "user": turn.user,
            "model": turn.model or asked.agent.model,
            "text": asked.exchanges[-1].text,
            "entries": entries,
        }
    )


async def _relay(response: httpx.Response, attempt: Attempt) -> str:
    parser = sse.Parser()
    said: list[str] = []
    async for chunk in stream_bytes(response):
        for event in parser.feed(chunk):
            if isinstance(event, sse.Oversized):
                raise AgentFailed("event-too-large", f"the agent sent an event of {event.size_bytes} bytes")
            match event.type:
                case "delta":
                    if text := _piece(event.data).text:
                        said.append(attempt.say(text))
                case "message":
                    end = _piece(event.data)
                    _spend(end, attempt)
                    if end.text is None:
                        return "".join(said)
                    return json.mend_text(end.text) if said else attempt.say(end.text)
                case "error":
                    problem = _convert(event.data, Problem)
                    if problem.retryable:
                        raise AgentUnavailable(problem.message)
                    raise AgentFailed(problem.code[:100], problem.message)
    raise AgentUnavailable("the agent's stream ended before its `message`")


async def _read(response: httpx.Response, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in stream_bytes(response):
        body += chunk
        if len(body) > bytes_max:
            if response.status_code == httpx.codes.OK:
                raise AgentFailed("answer-too-large", f"the agent's answer has more than {bytes_max} bytes")
            break
    return bytes(body[:bytes_max])


def _piece(data: bytes) -> Piece:
    return _convert(data, Piece)


def _convert(data: bytes, kind: type[T]) -> T:
    try:
        value, _ = json.mend(data)
        return msgspec.convert(value, kind)
    except (json.JsonProblem, msgspec.ValidationError) as error:
        raise AgentUnavailable(f"the agent's answer cannot be read: {error}") from error


def _spend(piece: Piece, attempt: Attempt) -> None:
    if piece.usage is not None:
        attempt.spend(piece.usage.model, piece.usage.input_tokens, piece.usage.output_tokens)
