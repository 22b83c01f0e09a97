"""Executions, by the tools' own notes (PURE): a machine is never told twice (G3).

    not hinted     began at most once; `failed`, `expired` and `cancelled` say that it did not run
    hinted         began again only if the process that ran it has died in between
    completed      ran to its end, and an unhinted one once
    a machine      does one thing at a time
    nothing        starts without a record, or after its end

A soak's tools never fail by themselves, so `failed` of an unhinted job always means that it did not run.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from harness.soak.history import Noted, Recorded
from harness.soak.reading import Reading, Violation

NOT_RUN = frozenset({"failed", "expired", "cancelled"})
# Clocks of PostgreSQL and of a sidecar are one; its estimate of the server's time is off by half a round trip.
CLOCK_MS = 1_000


@dataclass(slots=True)
class Runs:
    """What a machine noted of one job: how often it began, ended, and began in one and the same process as before."""

    began: int = 0
    ended: int = 0
    again_in_process: int = 0
    life: int = -1


def check_executions(reading: Reading) -> Iterator[Violation]:
    """See the module."""
    by_mark: dict[str, Runs] = {}
    for user, notes in reading.notes.items():
        runs = count_runs(notes)
        by_mark |= runs
        for mark in runs:
            owner, _, key = mark.partition("/")
            if owner != user:
                yield Violation("G3", f"the machine of {user} ran a job of {owner}", owner, key)
            if (owner, key) not in reading.records:
                yield Violation("G3", "it ran and has no record", owner, key)
        yield from _check_overlaps(user, notes, reading)
    for (user, key), record in reading.records.items():
        for what in _check_job(record, by_mark.get(f"{user}/{key}", Runs()), reading):
            yield Violation("G3", what, user, key)


def count_runs(notes: Sequence[Noted]) -> dict[str, Runs]:
    """Count one machine's notes by mark."""
    runs: dict[str, Runs] = defaultdict(Runs)
    life = 0
    for note in notes:
        match note.what:
            case "died":
                life += 1
            case "began":
                run = runs[note.mark]
                run.began += 1
                run.again_in_process += run.life == life
                run.life = life
            case "ended":
                runs[note.mark].ended += 1
    return dict(runs)


def _check_job(record: Recorded, runs: Runs, reading: Reading) -> Iterator[str]:
    if record.hinted:
        if runs.again_in_process:
            yield f"it is hinted and began {runs.began} times, {runs.again_in_process + 1} of them in one process"
    elif runs.began > 1:
        yield f"it is not hinted and began {runs.began} times"
    if not record.hinted and record.state in NOT_RUN and runs.began:
        yield f"it is {record.state}, which says that it did not run, and began {runs.began} times"
    if record.state == "completed" and not runs.ended:
        yield f"it is completed and never came to its end (began {runs.began} times)"
    frames = [delivery.frame for delivery in reading.delivered.get(record.job, ())]
    if len(set(frames)) < len(frames):
        yield "two deliveries have the same frame id"
    if record.hinted:
        return
    limit_ms = record.deadline_ms if record.ended_ms is None else min(record.deadline_ms, record.ended_ms)
    for start in reading.started.get(record.job, ()):
        if start.at_ms > limit_ms + CLOCK_MS:
            started = datetime.fromtimestamp(start.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
            yield f"it started at {started}, after its end or deadline"


def _check_overlaps(user: str, notes: Sequence[Noted], reading: Reading) -> Iterator[Violation]:
    running = ""
    for note in notes:
        match note.what:
            case "began":
                if running and not _may_be_cut_short(running, reading):
                    owner, _, key = note.mark.partition("/")
                    yield Violation("G3", f"it began while {running} was running on the machine of {user}", owner, key)
                running = note.mark
            case "ended" if note.mark == running:
                running = ""
            case "died":
                running = ""


def _may_be_cut_short(mark: str, reading: Reading) -> bool:
    """Whether a job may have been stopped before its end, which leaves no note: by a cancel or its time."""
    user, _, key = mark.partition("/")
    record = reading.records.get((user, key))
    if record is None:
        return False
    cancelled = any(exchange.asked.verb == "cancel" for exchange in reading.exchanges.get((user, key), ()))
    timed_out = any('"timeout"' in (outcome or "") for outcome in (record.outcome, record.late_outcome))
    return cancelled or timed_out
