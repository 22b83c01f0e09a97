"""What a run came to: counts of everything, and each broken promise with the history of its job."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from harness.drills.sequences import tally
from harness.soak.checker import check
from harness.soak.executions import count_runs
from harness.soak.history import (
    Answered,
    AnyEvent,
    Asked,
    Delivered,
    FaultBegan,
    FaultEnded,
    Followed,
    Noted,
    Planned,
    PresenceTold,
    Recorded,
    RunRecorded,
    Said,
    Spoken,
    Started,
    Watched,
    in_order,
    to_line,
)
from harness.soak.reading import Reading, Violation, read

EXCERPT_LINES_MAX = 80
# One fault of the product can break every promise there is; the first ones show it.
EXCERPTS_MAX = 10
# What else happened at the machine and around it, this long before and after the job.
AROUND_MS = 3_000


class Counts(NamedTuple):
    """Everything that can be counted in a history; mappings from a name to how often."""

    submits: int
    retries: int
    jobs: int
    answers: Counter[str]
    faults: Counter[str]
    outcomes: Counter[str]
    deliveries: int
    redeliveries: int
    executions: int
    executions_again: int
    presence: Counter[str]
    runs: Counter[str]
    watchers: int
    events: int
    resumed: int
    gaps: int

    def as_rows(self) -> Iterator[tuple[str, str]]:
        """For a table."""
        for name, value in self._asdict().items():
            yield name.replace("_", " "), _plain(value)


def count(events: Sequence[AnyEvent]) -> Counts:
    """Count a whole history. Raises: ValueError: no such history."""
    reading = read(events)
    exchanges = [exchange for group in reading.exchanges.values() for exchange in group]
    submits = [exchange for exchange in exchanges if exchange.asked.verb == "submit"]
    submitted = {(exchange.asked.user, exchange.asked.key) for exchange in submits}
    deliveries = [len(frames) for frames in reading.delivered.values()]
    runs = [run.began for notes in reading.notes.values() for run in count_runs(notes).values()]
    watched = [each for group in reading.watched.values() for each in group]
    tallies = [tally(each.seen, reading.spoken[each.run]) for each in watched]
    return Counts(
        submits=len(submits),
        retries=len(submits) - len(submitted),
        jobs=len(reading.records),
        answers=Counter(_answer_of(exchange.answered) for exchange in exchanges),
        faults=Counter(fault.kind for fault in reading.faults),
        outcomes=Counter(record.state for record in reading.records.values()),
        deliveries=sum(deliveries),
        redeliveries=sum(deliveries) - len(deliveries),
        executions=sum(runs),
        executions_again=sum(runs) - len(runs),
        presence=Counter(told.state for told in reading.told),
        runs=Counter(record.state for record in reading.run_records.values()),
        watchers=len(watched),
        events=sum(each.events for each in tallies),
        resumed=sum(max(0, each.opened - 1) for each in watched),
        gaps=sum(each.gaps for each in tallies),
    )


def excerpt(events: Sequence[AnyEvent], violation: Violation) -> list[str]:
    """The history around a violation, a line for each event: its job's, its machine's and the faults of that time."""
    reading = read(events)
    record = reading.records.get((violation.user, violation.key))
    chosen = [event for event in events if _is_about(event, violation, record, reading)]
    if chosen:
        first_ms = min(event.at_ms for event in chosen if not isinstance(event, Recorded)) - AROUND_MS
        last_ms = max(event.at_ms for event in chosen if not isinstance(event, Recorded)) + AROUND_MS
        chosen += [
            event
            for event in events
            if isinstance(event, FaultBegan | FaultEnded | Said)
            and first_ms <= event.at_ms <= last_ms
            and (not isinstance(event, Said) or event.user == violation.user)
        ]
    lines = [f"{_clock(event.at_ms)}  {to_line(event)}" for event in in_order(chosen)]
    if len(lines) > EXCERPT_LINES_MAX:
        left_out = len(lines) - EXCERPT_LINES_MAX
        lines = [*lines[: EXCERPT_LINES_MAX // 2], f"({left_out} more)", *lines[-EXCERPT_LINES_MAX // 2 :]]
    return lines


def show_verdict(console: Console, events: Sequence[AnyEvent]) -> int:
    """Check a whole history, print counts and violations; returns how many of these there are.

    Raises:
        ValueError: no such history.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in count(events).as_rows():
        table.add_row(name, value)
    console.print(table, highlight=False)
    violations = check(events)
    for number, violation in enumerate(violations):
        console.print(f"[bold red]VIOLATION[/] {violation}", highlight=False, soft_wrap=True)
        if number < EXCERPTS_MAX:
            for line in excerpt(events, violation):
                console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    verdict = f"[bold red]{len(violations)} violations[/]" if violations else "[bold green]no violation[/]"
    console.print(verdict)
    return len(violations)


def _is_about(event: AnyEvent, violation: Violation, record: Recorded | None, reading: Reading) -> bool:
    user, key = violation.user, violation.key
    match event:
        case Planned():
            return False
        case Asked():
            return (event.user, event.key) == (user, key)
        case Answered():
            return any(event.request == e.asked.request for e in reading.exchanges.get((user, key), ()))
        case Noted():
            return event.user == user and (event.what == "died" or event.mark == f"{user}/{key}")
        case Recorded():
            return record is not None and event.job == record.job
        case Delivered() | Started():
            return record is not None and event.job == record.job
        case PresenceTold():
            return not key and event.user == user and event.state == "offline"
        case Followed() | Spoken() | RunRecorded():
            return event.run == user
        case Watched():
            return (event.run, event.watcher) == (user, key)
        case _:
            return False


def _answer_of(answered: Answered) -> str:
    if not answered.status:
        return answered.problem
    return f"{answered.status} {answered.problem}".strip()


def _plain(value: Any) -> str:
    if isinstance(value, Counter):
        return ", ".join(f"{name} {times}" for name, times in sorted(value.items())) or "none"
    return str(value)


def _clock(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%H:%M:%S}.{at_ms % 1000:03d}"
