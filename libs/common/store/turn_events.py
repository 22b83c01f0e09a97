"""What a thread's log says of an entry, and of a turn's end (PURE).

Promises: whoever says it, and whenever, it is the same, from the record alone (rules 2, 31); `ThreadLog.say` has it
          there once.
Used by:  the gateway (an entry as it is posted, a turn that it cancelled), the worker (all ends; an entry before its
          turn's first word, because the gateway that took it may be dead).
"""

from typing import NamedTuple

from msgspec import UNSET, Struct

from common.ids import EntryId, ThreadId, TurnId
from common.store.eventlog import NewEvent
from common.store.threads import Entry
from common.store.turns import Turn
from towline.wire import events, json
from towline.wire.thread_events import Ended, Message
from towline.wire.threads import TurnError

_END_TYPES = {"completed": events.TURN_COMPLETED, "failed": events.TURN_FAILED, "cancelled": events.TURN_CANCELLED}


class Said(NamedTuple):
    """What `ThreadLog.say` takes."""

    thread: ThreadId
    name: str
    events: list[NewEvent]


def posted(entry: Entry) -> Said:
    """A user's entry, with the turn that answers it."""
    data = Message(entry.entry, entry.turn, entry.role, entry.text)
    event = event_of(entry.turn, _uid_of_entry(entry.entry), events.MESSAGE, data, entry.created_ms)
    return Said(entry.thread, _uid_of_entry(entry.entry), [event])


def ended(turn: Turn) -> Said:
    """A turn's end, after its answer if it has one. `turn` has ended."""
    assert turn.ended_ms is not None
    name = f"end:{turn.turn}"
    said: list[NewEvent] = []
    if turn.reply is not None:
        answer = Message(turn.reply, turn.turn, "agent", turn.reply_text or "")
        said.append(event_of(turn.turn, _uid_of_entry(turn.reply), events.MESSAGE, answer, turn.ended_ms))
    end = Ended(
        turn.turn,
        entry=UNSET if turn.reply is None else turn.reply,
        error=UNSET if turn.error_code is None else TurnError(turn.error_code, turn.error_message or ""),
    )
    said.append(event_of(turn.turn, name, _END_TYPES[turn.state], end, turn.ended_ms))
    return Said(turn.thread, name, said)


def event_of(turn: TurnId, uid: str, kind: str, data: Struct, ts_ms: int) -> NewEvent:
    """An event about a turn. `uid`: names it in its thread, also where it stands there again after a loss."""
    return NewEvent(turn, uid, kind, json.dumps(data), ts_ms)


def _uid_of_entry(entry: EntryId) -> str:
    return f"entry:{entry}"
