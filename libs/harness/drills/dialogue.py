"""What a watcher saw of a thread, held against how a turn is to be told (PURE).

A turn is told coherently when it starts once, each further attempt says `restarted` before anything else, the pieces of
an attempt are numbered without a hole, a tool's result follows its call, and after its one end nothing more is said of
it. What is not so is a fault, in words. After an announced gap anything may be missing, and what was told may come
again.
Used by:  the threads of a drill.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, Ended, Message, ThreadEventData, ToolCall, ToolResult


class Heard(NamedTuple):
    """One event or frame of a thread's stream.

    Attributes:
        turn: whose it is, by its source.
        id: empty for frames.
        at: when it was seen, monotonic seconds.
        data: None for frames and for types that are not a thread's.
    """

    type: str
    turn: str
    id: str
    at: float
    data: ThreadEventData | None


@dataclass(slots=True)
class Told:
    """What was told of one turn.

    Attributes:
        attempt: the last one that began; 0: none.
        text: what the pieces of that attempt say.
        end: type of its end; empty: none so far.
        calls, results: steps of that attempt whose call, and whose result, was told.
        restarts: how often it was begun again.
        is_torn: there was a gap since its attempt began, or before it was first heard of.
    """

    attempt: int = 0
    text: str = ""
    end: str = ""
    calls: list[str] = field(default_factory=list)
    results: dict[str, ToolResult] = field(default_factory=dict)
    restarts: int = 0
    pieces: int = 0
    is_torn: bool = False


@dataclass(slots=True)
class Story:
    """What one watcher was told.

    Attributes:
        ids: of the events, in order.
        turns: by turn.
        messages: how often each entry was told; answers: the text of each turn's own.
        gaps: announced.
        faults: what was not coherent.
    """

    ids: list[str] = field(default_factory=list)
    turns: dict[str, Told] = field(default_factory=dict)
    messages: Counter[str] = field(default_factory=Counter)
    answers: dict[str, str] = field(default_factory=dict)
    gaps: int = 0
    faults: list[str] = field(default_factory=list)


def read_story(heard: Iterable[Heard]) -> Story:
    """Go through what a watcher saw, in its order."""
    story = Story()
    for item in heard:
        if item.type == events.GAP:
            story.gaps += 1
            for told in story.turns.values():
                told.is_torn = True
            continue
        if item.id in story.ids:
            story.faults.append(f"{item.type} {item.id} came again")
        story.ids.append(item.id)
        data = item.data
        if data is None:
            story.faults.append(f"{item.type} is no event of a thread")
        elif isinstance(data, Message):
            _take_message(story, data)
        else:
            told = story.turns.setdefault(data.turn, Told(is_torn=story.gaps > 0))
            was_torn, end = told.is_torn, told.end
            fault = _take(told, item.type, data)
            if end and not (was_torn and item.type == end):
                fault = f"after {end}"
            elif was_torn:
                fault = ""
            if fault:
                story.faults.append(f"{fault} ({item.type} of {data.turn})")
            if item.turn != data.turn:
                story.faults.append(f"{item.type} of {data.turn} bears the source {item.turn!r}")
    return story


def _take_message(story: Story, message: Message) -> None:
    story.messages[message.entry] += 1
    if story.messages[message.entry] > 1 and not story.gaps:
        story.faults.append(f"entry {message.entry} was told again")
    if message.role == "agent":
        if story.answers.get(message.turn, message.text) != message.text or (
            message.turn in story.answers and not story.gaps
        ):
            story.faults.append(f"a second answer of {message.turn}")
        story.answers[message.turn] = message.text


def _take(told: Told, kind: str, data: Attempt | Delta | ToolCall | ToolResult | Ended) -> str:
    """Take one event of a turn. Returns the fault; empty: none."""
    match data:
        case Attempt():
            is_first = told.attempt == 0
            # An attempt that a leaving worker gave back goes on under its number.
            fault = "" if data.attempt >= told.attempt else f"attempt {data.attempt} after {told.attempt}"
            if is_first != (kind == events.TURN_STARTED):
                fault = "begun again without a word" if not is_first else "begun again before it was begun"
            told.restarts += not is_first
            told.attempt, told.text, told.pieces = data.attempt, "", 0
            told.calls, told.results = [], {}
            told.is_torn = False
            return fault
        case Delta():
            expected = (told.attempt, told.pieces + 1)
            told.pieces = data.n
            told.text += data.text
            got = (data.attempt, data.n)
            return "" if got == expected else f"piece {got} where {expected} was due"
        case ToolCall():
            is_again = data.step in told.calls
            told.calls.append(data.step)
            return "called again" if is_again else ""
        case ToolResult():
            fault = "" if data.step in told.calls else "a result without a call"
            fault = "a second result" if data.step in told.results else fault
            told.results[data.step] = data
            return fault
        case Ended():
            told.end = kind
            return ""
