"""A history, read so that it can be asked (PURE): requests with their answers, jobs, faults as spans of time.

Used by:  the checker's parts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.soak.history import (
    Answered,
    AnyEvent,
    Asked,
    Delivered,
    FaultBegan,
    FaultEnded,
    Followed,
    KeysLeft,
    Left,
    Noted,
    Planned,
    PresenceTold,
    Recorded,
    RunRecorded,
    Said,
    SessionBegan,
    Spoken,
    Started,
    Watched,
)
from harness.soak.plan import Plan

# A store that is back is in use again after this at the latest.
RECOVERY_MS = 10_000
FOR_EVER_MS = 1 << 62


class Violation(NamedTuple):
    """A broken promise.

    Attributes:
        user: whose job or presence it is about; or the run.
        key: of the job; or the watcher of the run; empty when it is about neither.
    """

    promise: str
    what: str
    user: str = ""
    key: str = ""

    def __str__(self) -> str:
        return f"{self.promise}: {f'{self.user} {self.key}'.strip() or 'the run'}: {self.what}"


class Span(NamedTuple):
    """A stretch of time, both ends included."""

    from_ms: int
    to_ms: int

    def meets(self, other: "Span") -> bool:
        """Whether they have a moment in common."""
        return self.from_ms <= other.to_ms and other.from_ms <= self.to_ms


class Spans:
    """Stretches of time, joined where they meet."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.joined: list[Span] = []
        for span in sorted(spans):
            if self.joined and span.from_ms <= self.joined[-1].to_ms:
                self.joined[-1] = Span(self.joined[-1].from_ms, max(self.joined[-1].to_ms, span.to_ms))
            else:
                self.joined.append(span)

    def meet(self, span: Span) -> bool:
        """Whether one of them has a moment in common with `span`."""
        return any(own.meets(span) for own in self.joined)

    def within_ms(self, span: Span) -> int:
        """How much of `span` they cover."""
        return sum(max(0, min(own.to_ms, span.to_ms) - max(own.from_ms, span.from_ms)) for own in self.joined)


class Fault(NamedTuple):
    """A fault as it was made."""

    kind: str
    target: str
    span: Span


class Exchange(NamedTuple):
    """A request and what came of it."""

    asked: Asked
    answered: Answered

    @property
    def accepted(self) -> bool:
        """Whether it was answered with a job."""
        return bool(self.answered.job)


@dataclass(slots=True)
class Reading:
    """A history, sorted out.

    Attributes:
        exchanges: by user and key, in the order in which they were asked; every request is answered, or 0.
        records: by user and key.
        notes: by user, in the order of the machine's file.
        delivered, started: by job.
        told: presence, in order.
        said, sessions: by user.
        followed, watched, run_records: by run.
        spoken: by run and source, the number of the last event.
    """

    plan: Plan
    exchanges: dict[tuple[str, str], list[Exchange]] = field(default_factory=lambda: defaultdict(list))
    records: dict[tuple[str, str], Recorded] = field(default_factory=dict)
    notes: dict[str, list[Noted]] = field(default_factory=lambda: defaultdict(list))
    delivered: dict[str, list[Delivered]] = field(default_factory=lambda: defaultdict(list))
    started: dict[str, list[Started]] = field(default_factory=lambda: defaultdict(list))
    said: dict[str, list[Said]] = field(default_factory=lambda: defaultdict(list))
    sessions: dict[str, SessionBegan] = field(default_factory=dict)
    told: list[PresenceTold] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    left: list[Left | KeysLeft] = field(default_factory=list)
    followed: dict[str, Followed] = field(default_factory=dict)
    watched: dict[str, list[Watched]] = field(default_factory=lambda: defaultdict(list))
    spoken: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    run_records: dict[str, RunRecorded] = field(default_factory=dict)

    def spans_of(self, *, targets: Iterable[str], longer_ms: int = 0) -> Spans:
        """When the given targets were at fault, and so much longer."""
        chosen = set(targets)
        return Spans(
            Span(fault.span.from_ms, fault.span.to_ms + longer_ms) for fault in self.faults if fault.target in chosen
        )

    def stores_away(self) -> Spans:
        """When a store was at fault or just back, or no worker served."""
        stores = self.spans_of(targets=("redis", "postgres"), longer_ms=RECOVERY_MS)
        return Spans([*stores.joined, *self._without_workers()])

    def _without_workers(self) -> list[Span]:
        workers = sorted({fault.target for fault in self.faults if fault.kind.startswith("worker-")})
        if len(workers) < 2:
            return []
        away = self.spans_of(targets=workers[:1]).joined
        for worker in workers[1:]:
            other = self.spans_of(targets=[worker]).joined
            away = [
                Span(max(one.from_ms, two.from_ms), min(one.to_ms, two.to_ms))
                for one in away
                for two in other
                if one.meets(two)
            ]
        return [Span(span.from_ms, span.to_ms + RECOVERY_MS) for span in away]


def read(events: Sequence[AnyEvent]) -> Reading:
    """Sort a history out.

    Raises:
        ValueError: it does not begin with its plan.
    """
    if not events or not isinstance(events[0], Planned):
        raise ValueError("a history begins with its plan")
    reading = Reading(events[0].plan)
    asked: dict[int, Asked] = {}
    began: dict[int, FaultBegan] = {}
    for event in events:
        match event:
            case Asked():
                asked[event.request] = event
            case Answered():
                question = asked.pop(event.request)
                reading.exchanges[question.user, question.key].append(Exchange(question, event))
            case FaultBegan():
                began[event.fault] = event
            case FaultEnded():
                begin = began.pop(event.fault)
                reading.faults.append(Fault(begin.kind, begin.target, Span(begin.at_ms, event.at_ms)))
            case Noted():
                reading.notes[event.user].append(event)
            case Said():
                reading.said[event.user].append(event)
            case Delivered():
                reading.delivered[event.job].append(event)
            case Started():
                reading.started[event.job].append(event)
            case SessionBegan():
                reading.sessions[event.session] = event
            case PresenceTold():
                reading.told.append(event)
            case Recorded():
                reading.records[event.user, event.key] = event
            case Left() | KeysLeft():
                reading.left.append(event)
            case Followed():
                reading.followed[event.run] = event
            case Watched():
                reading.watched[event.run].append(event)
            case Spoken():
                reading.spoken[event.run][event.source] = event.last
            case RunRecorded():
                reading.run_records[event.run] = event
    for question in asked.values():
        cut_off = Answered(at_ms=events[-1].at_ms, request=question.request, status=0, problem="no answer")
        reading.exchanges[question.user, question.key].append(Exchange(question, cut_off))
    for exchanges in reading.exchanges.values():
        exchanges.sort(key=lambda exchange: exchange.asked.at_ms)
    for begin in began.values():
        reading.faults.append(Fault(begin.kind, begin.target, Span(begin.at_ms, FOR_EVER_MS)))
    return reading
