"""One stream of the stand-in agent: what it says, how it resumes, and who has asked for it.

Owns:     the numbering. Event `n` (from 1) has `"n": n` in its data and, with `ids`, the id `n`: whoever reads can
          count holes and repeats. `"at"` is when it was said, in Unix milliseconds. What event `n` says never changes,
          however often it is replayed.
Used by:  the agent's server (a `send` per connection), tests and its control API (everything else).
"""

import asyncio
import json
import time
from array import array
from typing import Literal, NamedTuple

import msgspec

from harness.loopback import LAST_CHUNK, Answer, Connection, chunk

__all__ = ["Answer", "Request", "Script", "Stream"]

# Ends a source unless a run declares other types (`towline.wire.runs.TERMINAL_TYPES`).
TERMINAL_TYPE = "result"
# A paced stream wakes up for each event, but not more often than this: a late timer is made good in one go.
PACE_RESOLUTION_S = 0.005


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream behaves.

    Attributes:
        ids: whether events carry an id.
        resume: what a connection gets first: `ids`: what follows its `Last-Event-ID` (all without one), `replay`:
            everything, `live`: nothing.
        keep: how many past events it can still resume or replay; None: all.
        rate: events per second of its own accord, from the first connection on; 0: only what is asked for.
        total: of these, how many; None: without end.
        types: event types, in turn.
        terminal: type of the event that follows the last one and ends the stream; None: it falls silent instead.
        comment_every_s: a comment this often on each connection; 0: never.
    """

    ids: bool = True
    resume: Literal["ids", "replay", "live"] = "ids"
    keep: int | None = None
    rate: float = 0.0
    total: int | None = None
    types: tuple[str, ...] = ("output",)
    terminal: str | None = TERMINAL_TYPE
    comment_every_s: float = 0.0


class Request(NamedTuple):
    """One request for the stream. `at`: monotonic seconds of the agent's process."""

    at: float
    last_event_id: str | None
    headers: dict[str, str]
    status: int


class Stream:
    """What one upstream source says, to any number of connections.

    Attributes:
        emitted: the number of the newest event.
        is_ended: the terminal event is out: connections close behind it, and whoever has it is answered 204.
        requests: every request so far, the refused included.
        open_connections, most_connections: how many are being served now, and were at once at most.
    """

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.emitted = 0
        self.is_ended = False
        self.requests: list[Request] = []
        self.open_connections = 0
        self.most_connections = 0
        self._at = array("d")  # when each event was said
        self._special: dict[int, tuple[str, str]] = {}  # those that are not as the script has it
        self._paused = False
        self._answers: list[Answer] = []
        self._breaks = 0  # how often all connections were to end
        self._is_cut = False  # the last time, in the middle of an event
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()

    def emit(self, count: int = 1, *, type: str = "", data: str = "") -> int:
        """Say `count` events more, now. Returns the newest number.

        Args:
            type: in place of the script's.
            data: in place of the numbered JSON; may have several lines.
        """
        at = time.time() * 1000
        for _ in range(count):
            self.emitted += 1
            self._at.append(at)
            if type or data:
                self._special[self.emitted] = (type, data)
        self._wake()
        return self.emitted

    def end(self, type: str = "") -> int:
        """Say the terminal event, once. Returns its number."""
        if not self.is_ended:
            self.is_ended = True
            self.emit(type=type or self.script.terminal or TERMINAL_TYPE)
        return self.emitted

    def close(self) -> None:
        """End every connection in order, as a server does that restarts."""
        self._breaks += 1
        self._is_cut = False
        self._wake()

    def cut(self) -> None:
        """Emit one event more and reset every connection in the middle of it."""
        self._breaks += 1
        self._is_cut = True
        self.emit()

    def pause(self) -> None:
        """Send nothing more on any connection, comments included; what is emitted waits."""
        self._paused = True

    def go_on(self) -> None:
        """End a pause."""
        self._paused = False
        self._wake()

    def answer(self, answer: Answer, *, times: int = 1) -> None:
        """Answer the next `times` requests with this; `status` 0: they are read and never answered."""
        self._answers += [answer] * times

    def admit(self, headers: dict[str, str]) -> Answer | int:
        """Note a request. Returns an answer, or the number behind which the connection begins.

        Args:
            headers: names in lower case.
        """
        last_event_id = headers.get("last-event-id")
        admitted = self._answers.pop(0) if self._answers else self._first_after(last_event_id)
        status = admitted.status if isinstance(admitted, Answer) else 200
        self.requests.append(Request(time.monotonic(), last_event_id, headers, status))
        return admitted

    def _first_after(self, last_event_id: str | None) -> Answer | int:
        if self.script.resume == "live":
            return Answer(204) if self.is_ended else self.emitted
        after = 0
        if self.script.resume == "ids" and last_event_id is not None:
            after = int(last_event_id) if last_event_id.isdecimal() else 0
            if self.is_ended and after >= self.emitted:
                return Answer(204)
        oldest_after = 0 if self.script.keep is None else max(0, self.emitted - self.script.keep)
        return max(after, oldest_after)

    def encode(self, number: int) -> bytes:
        """The bytes of one event."""
        kind, data = self._special.get(number, ("", ""))
        kind = kind or self.script.types[number % len(self.script.types)]
        data = data or json.dumps({"n": number, "stream": self.name, "at": round(self._at[number - 1], 1)})
        lines = [f"event: {kind}", *(f"data: {line}" for line in data.split("\n"))]
        if self.script.ids:
            lines.insert(0, f"id: {number}")
        return ("\n".join(lines) + "\n\n").encode()

    async def send(self, after: int, connection: Connection) -> None:
        """Send what follows number `after`, one event per chunk, until the stream ends, closes or cuts."""
        breaks = self._breaks
        self.open_connections += 1
        self.most_connections = max(self.most_connections, self.open_connections)
        self._begun.set()
        try:
            while True:
                changed = self._changed
                while after < self.emitted and not self._paused and breaks == self._breaks:
                    after += 1
                    await connection.chunk(self.encode(after))
                if breaks != self._breaks:
                    break
                if self.is_ended and after >= self.emitted:
                    break
                await self._wait(changed, connection)
            if breaks != self._breaks and self._is_cut:
                await connection.cut(chunk(self.encode(after + 1)))
            else:
                connection.writer.write(LAST_CHUNK)
                await connection.writer.drain()
        finally:
            self.open_connections -= 1

    async def run_pace(self) -> None:
        """Emit by the script's rate until the total is out; returns at once without a rate."""
        script = self.script
        if not script.rate:
            return
        await self._begun.wait()
        began = time.monotonic()
        paced = 0
        while not self.is_ended and (script.total is None or paced < script.total):
            await asyncio.sleep(max(PACE_RESOLUTION_S, began + (paced + 1) / script.rate - time.monotonic()))
            due = int((time.monotonic() - began) * script.rate)
            if script.total is not None:
                due = min(due, script.total)
            if due > paced and not self.is_ended:
                self.emit(due - paced)
                paced = due
        if script.terminal is not None:
            self.end()

    async def _wait(self, changed: asyncio.Event, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self.script.comment_every_s or None):
                await changed.wait()
        except TimeoutError:
            if not self._paused:
                await connection.chunk(b": still here\n\n")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
