"""The history of a run: what was planned, and everything that was observed, as JSON lines.

Owns:     the kinds of events, their file, and the clock of a run: the wall clock of this machine, in milliseconds since
          the Unix epoch, which is also what PostgreSQL and the logs of all processes go by.
Promises: a line is whole once `add` has returned; `read_history` gives back the same values.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from harness.drills.sequences import Seen
from harness.soak.plan import Plan

Verb = Literal["submit", "read", "cancel"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Something that happened. `at_ms`: when it was seen."""

    at_ms: int


class Planned(Event, frozen=True, kw_only=True):
    """The first event."""

    plan: Plan


class Asked(Event, frozen=True, kw_only=True):
    """A request left for a gateway.

    Attributes:
        request: numbers the requests of a run.
        args: of a submission, what defines its work beside the tool; JSON as submitted.
        wait_s: how long the gateway may take to answer.
    """

    request: int
    verb: Verb
    user: str
    key: str
    gateway: str
    wait_s: float = 0.0
    tool: str = ""
    args: str = ""


class Answered(Event, frozen=True, kw_only=True):
    """What came of a request.

    Attributes:
        status: of HTTP; 0: no answer, `problem` says why.
        problem: slug of a refusal.
        outcome: the outcome's own bytes, as text; empty while there is none.
    """

    request: int
    status: int
    problem: str = ""
    job: str = ""
    user: str = ""
    state: str = ""
    outcome: str = ""
    ended_at: str = ""
    replayed: bool = False
    payload_matches: bool = True
    machine: str = ""


class FaultBegan(Event, frozen=True, kw_only=True):
    """A fault is being made. `target`: `worker-1`, a user for a machine or its link, a run for its sources, `redis`."""

    fault: int
    kind: str
    target: str


class FaultEnded(Event, frozen=True, kw_only=True):
    """A fault is over: what was stopped runs again, what was away answers again."""

    fault: int


class Noted(Event, frozen=True, kw_only=True):
    """A line of the notes of a user's machine, in their order; `died` follows the last note of a dead process."""

    user: str
    what: Literal["began", "ended", "died"]
    mark: str = ""


class Said(Event, frozen=True, kw_only=True):
    """A line of a sidecar's log about its socket; `session` only when it connects."""

    user: str
    what: Literal["connected", "disconnected", "connection_lost", "draining", "slept", "stopped"]
    session: str = ""


class Delivered(Event, frozen=True, kw_only=True):
    """A frame that a sidecar took for a job, by its log."""

    user: str
    job: str
    frame: str
    attempt: int
    decision: str


class Started(Event, frozen=True, kw_only=True):
    """A sidecar started a job's tool, by its log."""

    user: str
    job: str


class SessionBegan(Event, frozen=True, kw_only=True):
    """A worker took a machine's socket, by its log."""

    worker: str
    user: str
    session: str


class PresenceTold(Event, frozen=True, kw_only=True):
    """A gateway's answer about a machine."""

    user: str
    gateway: str
    asked_ms: int
    state: str


class Recorded(Event, frozen=True, kw_only=True):
    """A job's record at the end; times by PostgreSQL's clock."""

    job: str
    user: str
    key: str
    tool: str
    args: str
    timeout_s: float
    hinted: bool
    state: str
    attempts: int
    outcome: str | None
    late_outcome: str | None
    accepted_ms: int
    deadline_ms: int
    ended_ms: int | None


class Left(Event, frozen=True, kw_only=True):
    """What Redis held of a user at the end, all jobs ended and the machine connected."""

    user: str
    entries: int
    pending: int
    indexed: int
    groups: int
    consumers: int


class KeysLeft(Event, frozen=True, kw_only=True):
    """Which keys Redis held of a user after the machine had said goodbye."""

    user: str
    names: list[str]


class Followed(Event, frozen=True, kw_only=True):
    """A run was asked to be followed, again and again if need be. `accepted`: a gateway said so in the end."""

    run: str
    accepted: bool


class Watched(Event, frozen=True, kw_only=True):
    """A watcher at the end of the soak.

    Attributes:
        opened, broken: streams it was given, and those of them that broke off.
        refused: statuses of answers that were no stream.
        ended: it was told that the run has ended.
        seen: everything it saw, in its order; `at` in seconds since the Unix epoch.
    """

    run: str
    watcher: str
    opened: int
    broken: int
    refused: list[str]
    ended: bool
    seen: list[Seen]


class Spoken(Event, frozen=True, kw_only=True):
    """A source at the end of the soak: the number of its last event, and how often it was asked."""

    run: str
    source: str
    last: int
    requests: int


class RunRecorded(Event, frozen=True, kw_only=True):
    """A run's record at the end, and its lease, if any; `state` empty: there is no record."""

    run: str
    state: str
    reason: str
    lease: str


AnyEvent = (
    Planned
    | Asked
    | Answered
    | FaultBegan
    | FaultEnded
    | Noted
    | Said
    | Delivered
    | Started
    | SessionBegan
    | PresenceTold
    | Recorded
    | Left
    | KeysLeft
    | Followed
    | Watched
    | Spoken
    | RunRecorded
)

_decoder = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


def now_ms() -> int:
    """The clock of a run."""
    return time.time_ns() // 1_000_000


class History:
    """A history that is being written.

    Attributes:
        events: all so far, in the order in which they were added.
    """

    def __init__(self, path: Path) -> None:
        """Begin a new file, in place of an older one."""
        self.events: list[AnyEvent] = []
        self._file = path.open("wb")

    def add(self, event: AnyEvent) -> None:
        """Write one event down."""
        self.events.append(event)
        self._file.write(_encoder.encode(event) + b"\n")

    def close(self) -> None:
        """Write out what is buffered."""
        self._file.close()


def read_history(path: Path) -> list[AnyEvent]:
    """Read a file that `History` wrote. Raises: msgspec.DecodeError for any other."""
    with path.open("rb") as lines:
        return [_decoder.decode(line) for line in lines]


def to_line(event: AnyEvent) -> str:
    """An event as it stands in the file."""
    return _encoder.encode(event).decode()


def in_order(events: Iterable[AnyEvent]) -> list[AnyEvent]:
    """By time; what has the same time keeps its order."""
    return sorted(events, key=lambda event: event.at_ms)
