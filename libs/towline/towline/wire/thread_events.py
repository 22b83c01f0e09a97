"""Events of a thread: what their data is (PURE).

Owns:     one struct for the data of each type in `towline.wire.events`, and how an event is read.
Promises: `read` never fails on what a newer gateway says: an unknown type has no struct, unknown members are ignored.
Used by:  the worker and the gateway (what they write into a thread's log), `towline.client` (what it reads).

`turn` names the turn everywhere; an event's `source` repeats it, so that readers can sort events without their data.
The text of an answer is what its deltas say, joined in order; `signal.dispatch.restarted` voids those before it, also
where it names the same attempt, which another worker goes on with. The `message` that comes with the end has all of it.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from towline.wire import events
from towline.wire.threads import Role, TurnError


class Attempt(msgspec.Struct, frozen=True):
    """Data of `signal.dispatch.started` and `.restarted`: `attempt` counts from 1."""

    turn: str
    attempt: int


class Delta(msgspec.Struct, frozen=True):
    """Data of `message.delta`: the next piece of an answer; `n` counts from 1 after each (re)start."""

    turn: str
    attempt: int
    n: int
    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """Data of `tool.call`: the model asks for a tool. `step` names the call within the turn."""

    turn: str
    step: str
    name: str
    args: Any


class ToolResult(msgspec.Struct, frozen=True):
    """Data of `tool.result`: what the model was told. `state` and `outcome` are those of a job.

    Where no job could be made (offline, no such tool, queue full) the state is `failed`, and the outcome's error says
    why.
    """

    turn: str
    step: str
    state: str
    outcome: Any


class Message(msgspec.Struct, frozen=True):
    """Data of `message`: an entry of the thread; `turn` is the one that answers it, or that wrote it."""

    entry: str
    turn: str
    role: Role
    text: str


class Ended(msgspec.Struct, frozen=True):
    """Data of `signal.dispatch.completed` (the answer's `entry`), and of `.failed` and `.cancelled` (`error`)."""

    turn: str
    entry: str | UnsetType = UNSET
    error: TurnError | UnsetType = UNSET


ThreadEventData = Attempt | Delta | ToolCall | ToolResult | Message | Ended

_DATA: dict[str, type[ThreadEventData]] = {
    events.TURN_STARTED: Attempt,
    events.TURN_RESTARTED: Attempt,
    events.MESSAGE_DELTA: Delta,
    events.TOOL_CALL: ToolCall,
    events.TOOL_RESULT: ToolResult,
    events.MESSAGE: Message,
    events.TURN_COMPLETED: Ended,
    events.TURN_FAILED: Ended,
    events.TURN_CANCELLED: Ended,
}


def read(event_type: str, data: bytes | str) -> ThreadEventData | None:
    """Read an event's data; None for a type that only newer peers know.

    Raises:
        msgspec.DecodeError: it is not that type's data.
    """
    struct = _DATA.get(event_type)
    return None if struct is None else msgspec.json.decode(data, type=struct)
