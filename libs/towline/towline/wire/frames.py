"""Frames between worker and sidecar: WebSocket `/v1/bridge`, subprotocol `towline.v1`, one JSON object a text frame.

`type` names the frame. Unknown members are ignored and unknown types are reported as `None`, so that newer peers can
talk to older ones. Arguments and results stay raw JSON: they are carried, not looked into.
"""

import json as stdlib_json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from towline.wire import json

PATH = "/v1/bridge"
SUBPROTOCOL = "towline.v1"

RESULT_BYTES_MAX = 1024 * 1024
# Of all tools together, as `hello` and `tools` carry them.
CATALOGUE_BYTES_MAX = 1024 * 1024
# Largest frame either side accepts: one result or catalogue, and its envelope.
FRAME_BYTES_MAX = 1024 * 1024 + 64 * 1024
ARGS_BYTES_MAX = 256 * 1024
TOOLS_MAX = 256
CLOSE_REASON_BYTES_MAX = 123  # RFC 6455: a control frame has 125 bytes, two of them for the code

_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]')


class Close:
    """Close codes. 4000-4499: reconnect; 4500-4999: do not."""

    RESTARTING = 1012
    TRY_LATER = 1013
    NO_PONG = 4001
    TOO_SLOW = 4002
    OTHER_MACHINE = 4003  # another machine of this user is connected; the reason carries the delay in seconds
    TOKEN_REFUSED = 4500
    BAD_FRAME = 4501
    BAD_VERSION = 4502
    REPLACED = 4503


class FrameError(ValueError):
    """A frame that cannot be read; `str()` says which field and why."""


class Hints(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tool says of itself (the names are MCP's)."""

    read_only: bool = False
    idempotent: bool = False
    destructive: bool = False

    @property
    def repeatable(self) -> bool:
        """Hinted: a second run does no harm, so it needs no begin mark."""
        return self.read_only or self.idempotent


class Tool(msgspec.Struct, frozen=True):
    """One entry of a machine's catalogue."""

    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    hints: Hints = Hints()


class Failure(msgspec.Struct, frozen=True):
    """Why there is no result."""

    code: str
    message: str = ""
    retryable: bool = False


def close_reason(text: str) -> str:
    """Cut a text to what a close frame holds."""
    return text.encode(errors="replace")[:CLOSE_REASON_BYTES_MAX].decode(errors="ignore")


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Frame(msgspec.Struct, tag_field="type", tag=_snake, omit_defaults=True):
    """Base of all frames; its subclasses' names in snake case are the values of `type`."""


class Hello(Frame):
    """sidecar -> worker, first frame."""

    machine: str
    journal: str
    name: str = ""
    version: str = ""
    tools: list[Tool] = []
    running: list[str] = []


class Welcome(Frame):
    """worker -> sidecar: the session stands.

    `server_time`: seconds since the Unix epoch, UTC; `user`: whose token it is.
    """

    session: str
    epoch: int
    heartbeat_s: float
    max_frame_bytes: int
    server_time: float
    user: str = ""


class Job(Frame):
    """worker -> sidecar, one delivery. Times are RFC 3339 UTC by the server's clock; `id` is fresh per delivery."""

    id: str
    job: str
    idempotency_key: str
    accepted_at: str
    name: str
    args: msgspec.Raw
    timeout_s: float
    deadline_at: str
    attempt: int = 1
    hinted: bool = False
    traceparent: str = ""


Outcome = Literal["completed", "failed", "unknown"]


class JobResult(Frame):
    """sidecar -> worker. Names the frame it answers (`id`) or, unasked, the `job`."""

    outcome: Outcome
    id: str = ""
    job: str = ""
    result: msgspec.Raw = msgspec.Raw(b"")
    error: Failure | None = None
    replayed: bool = False
    lane_busy: bool = False
    mended: bool = False


class JobResultAck(Frame):
    """worker -> sidecar: these outcomes are durable, the journal may let go. Nothing waits for it."""

    jobs: Sequence[str]


class JobCancel(Frame):
    """worker -> sidecar: stop the job of this delivery if that can be done.

    `id` "": the job that this socket's hello listed as running; it came by an older one, and has no frame id here.
    """

    id: str


class Status(Frame):
    """worker -> sidecar: answer at once, whatever is running."""

    id: str


class StatusResult(Frame):
    """sidecar -> worker. `queue`: jobs that wait in the lane."""

    id: str
    busy: bool
    queue: int
    uptime_s: float


class Tools(Frame):
    """sidecar -> worker: the catalogue changed."""

    tools: list[Tool]


class Token(Frame):
    """worker -> sidecar: a fresh token, to be used from the next dial on."""

    token: str


class Ping(Frame):
    """Both: answer with the same `n`."""

    n: int = 0


class Pong(Frame):
    """Both."""

    n: int = 0


class Draining(Frame):
    """worker -> sidecar: reconnect now, elsewhere."""


class Goodbye(Frame):
    """sidecar -> worker: leaving on purpose; presence need not wait for its time to live."""


FromSidecar = Hello | JobResult | StatusResult | Tools | Ping | Pong | Goodbye
FromWorker = Welcome | Job | JobResultAck | JobCancel | Status | Token | Ping | Pong | Draining

_from_sidecar = msgspec.json.Decoder(FromSidecar)
_from_worker = msgspec.json.Decoder(FromWorker)
_encoder = msgspec.json.Encoder()


def encode(frame: Frame) -> str:
    """Encode a frame of ours as the text of one WebSocket message."""
    return _encoder.encode(frame).decode()


def decode_from_sidecar(text: str) -> FromSidecar | None:
    """Read a frame on the worker's side; None for a type not known here.

    Raises:
        FrameError: not JSON, not an object, a wrong field.
    """
    frame: FromSidecar | None = _decode(_from_sidecar, text)
    return frame


def decode_from_worker(text: str) -> FromWorker | None:
    """Read a frame on the sidecar's side; None for a type not known here.

    Raises:
        FrameError: not JSON, not an object, a wrong field.
    """
    frame: FromWorker | None = _decode(_from_worker, text)
    return frame


def _decode(decoder: msgspec.json.Decoder[Any], text: str) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and str(error).endswith("at `$.type`"):
            return None
        if "Number out of range" not in str(error):
            raise FrameError(str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        pass
    # Rare: text that only a lenient parser takes (NaN, lone surrogates). Name the place or mend it.
    return _decode_mended(decoder, text)


def _decode_mended(decoder: msgspec.json.Decoder[Any], text: str) -> Any:
    try:
        value, mended = json.mend(text)
    except json.JsonProblem as problem:
        if unusable := _unusable_result(text, problem):
            return unusable
        raise FrameError(str(problem)) from problem
    if isinstance(value, dict) and value.get("type") == "job_result":
        value["mended"] = mended
    try:
        return decoder.decode(json.dumps(value))
    except msgspec.DecodeError as error:
        raise FrameError(str(error)) from error


def _unusable_result(text: str, problem: json.JsonProblem) -> JobResult | None:
    """A result that cannot be carried (NaN, a huge number, endless nesting) fails its job, not the socket."""
    try:
        # Without its numbers: one of them may be what nobody can read.
        value = stdlib_json.loads(_without_depths(text), parse_constant=_nothing, parse_int=_nothing)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("type") != "job_result":
        return None
    id_, job = value.get("id", ""), value.get("job", "")
    if not isinstance(id_, str) or not isinstance(job, str):
        return None
    failure = Failure("result-unusable", f"the tool's result cannot be carried: {problem}")
    return JobResult(outcome="failed", id=id_, job=job, error=failure, lane_busy=value.get("lane_busy") is True)


def _nothing(_number: str) -> None:
    return None


def _without_depths(text: str) -> str:
    """JSON with null for whatever is nested too deeply, so that any parser can read the rest."""
    kept: list[str] = []
    depth, start = 0, 0
    for match in _BRACKETS.finditer(text):
        if match[0] in ("[", "{"):
            depth += 1
            if depth == json.NESTING_MAX + 1:
                kept += [text[start : match.start()], "null"]
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth == json.NESTING_MAX:
                start = match.end()
    return "" if depth > json.NESTING_MAX else "".join([*kept, text[start:]])
