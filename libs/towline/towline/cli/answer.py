"""How an answer looks as it comes: text for people, the events as JSON lines for programs.

Owns:     which of an answer's deltas count and what has been shown of it (`AnswerText`, PURE), and the writers.
Promises: standard output has the answer and nothing else, as a terminal gets it live and a pipe gets it once, when it
          is certain; signals, tools and breaks are told on standard error. No answer's text can steer the terminal.
Used by:  `towline threads say`.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET

from towline.cli.terminal import note, plain
from towline.client import ThreadEvent, ThreadGap
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, ToolCall, ToolResult
from towline.wire.threads import Turn

Item = ThreadEvent | ThreadGap | Turn

# A tool's arguments and results are cut to this on standard error; the events have all of them.
SHOWN_CHARACTERS_MAX = 200


@dataclass(slots=True)
class AnswerText:
    """What was shown of one turn's answer (PURE).

    Deltas count until the turn is begun again, which voids them; each counts once.
    """

    attempt: int = 0
    n: int = 0
    since_start: str = ""
    since_tool_call: str = ""
    has_hole: bool = False

    def begin(self, attempt: int, *, is_again: bool = False) -> bool:
        """Take in that an attempt begins; returns whether something that was shown is void now.

        Args:
            is_again: it was said so, and so it may be the same attempt, in the hands of another worker.
        """
        if attempt < self.attempt or (attempt == self.attempt and not is_again):
            return False
        is_void = bool(self.since_start)
        self.attempt, self.n, self.since_start, self.since_tool_call, self.has_hole = attempt, 0, "", "", False
        return is_void

    def add(self, delta: Delta) -> str:
        """Take in a delta of the attempt that is under way; returns what to show of it."""
        if delta.attempt != self.attempt or delta.n <= self.n:
            return ""
        self.has_hole |= delta.n > self.n + 1
        self.n = delta.n
        self.since_start += delta.text
        self.since_tool_call += delta.text
        return delta.text

    def call_tool(self) -> None:
        """Take in that the model calls a tool: what it said before may be no part of the answer."""
        self.since_tool_call = ""

    def rest(self, answer: str) -> str | None:
        """What of the answer is still to be shown; None when what was shown is not its beginning."""
        if self.has_hole:
            return None
        for shown in (self.since_start, self.since_tool_call):
            if answer.startswith(shown):
                return answer[len(shown) :]
        return None


class Writer(Protocol):
    """Writes what `follow_turn` brings."""

    def write(self, item: Item) -> None: ...


class JsonLines:
    """One JSON object a line: an event as it is, `{"gap": ...}`, and at the end `{"turn": ...}`."""

    def write(self, item: Item) -> None:
        """Write one line."""
        document = {"gap": item} if isinstance(item, ThreadGap) else {"turn": item} if isinstance(item, Turn) else item
        sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
        sys.stdout.buffer.flush()


class Answers:
    """The answer on standard output, all else on standard error."""

    def __init__(self, *, is_live: bool) -> None:
        """Args: is_live: show the answer as it comes; else once, when it is certain."""
        self._is_live = is_live
        self._text = AnswerText()
        self._is_in_line = False

    def write(self, item: Item) -> None:
        """Show one item."""
        if isinstance(item, Turn):
            self._end(item)
        elif isinstance(item, ThreadGap):
            self._note("events are missing here")
        elif isinstance(item.data, Attempt):
            is_again = item.type == events.TURN_RESTARTED
            self._begin(item.data.attempt, is_again=is_again)
            if is_again:
                self._note(f"it is worked on again, attempt {item.data.attempt}")
        elif isinstance(item.data, Delta):
            self._begin(item.data.attempt)
            self._show(self._text.add(item.data))
        elif isinstance(item.data, ToolCall):
            self._text.call_tool()
            self._note(f"tool {item.data.name} {_cut(item.data.args)}")
        elif isinstance(item.data, ToolResult):
            self._note(f"  {item.data.state} {_cut(item.data.outcome)}")

    def _begin(self, attempt: int, *, is_again: bool = False) -> None:
        # A pipe has been shown nothing that could be void.
        if self._text.begin(attempt, is_again=is_again) and self._is_live:
            self._note("what was shown of the answer is void")

    def _end(self, turn: Turn) -> None:
        if turn.outcome is UNSET or turn.outcome.text is UNSET:
            self._note(ending(turn))
            return
        answer = turn.outcome.text
        rest = self._text.rest(answer) if self._is_live else answer
        if rest is None:
            self._note("the whole answer:")
        sys.stdout.write(plain(answer if rest is None else rest) + "\n")
        sys.stdout.flush()
        self._is_in_line = False

    def _show(self, text: str) -> None:
        if self._is_live and text:
            sys.stdout.write(plain(text))
            sys.stdout.flush()
            self._is_in_line = not text.endswith("\n")

    def _note(self, message: str) -> None:
        if self._is_in_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._is_in_line = False
        note(message)


def ending(turn: Turn) -> str:
    """Say in one line how a turn that was not answered stands."""
    if turn.outcome is UNSET or turn.outcome.error is UNSET:
        return turn.state + (", to be cancelled" if turn.cancel_requested else "")
    return f"{turn.state}: {turn.outcome.error.code}: {turn.outcome.error.message}"


def _cut(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + " ..."
