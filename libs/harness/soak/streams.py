"""Streams, as watchers saw them, against what the sources said (PURE): no silent holes (G6), and one end each (G4).

    a watcher      sees every event of every source once and in order, or is told of a gap before the next one
    the end        comes to every watcher, once and as the last, with the state that the record has
    a run          ends, once its sources have; nobody follows it then

Only the sources' own numbers count. A live source's discontinuity is such a gap, and said to be one.
"""

from collections.abc import Iterator

from harness.drills.sequences import Tally, tally
from harness.soak.history import Followed, Watched
from harness.soak.plan import RunPlan
from harness.soak.reading import Reading, Violation
from towline.wire import events
from towline.wire.runs import RUN_TERMINAL_STATES


def check_streams(reading: Reading) -> Iterator[Violation]:
    """See the module."""
    for plan in reading.plan.runs:
        followed = reading.followed.get(plan.run)
        if followed is None or not followed.accepted:
            continue
        for what in _check_run(reading, plan):
            yield Violation("G4", what, plan.run)
        live = live_sources(plan)
        for watched in reading.watched[plan.run]:
            found = tally(watched.seen, reading.spoken[plan.run], live=live)
            for what in _check_sequence(found):
                yield Violation("G6", what, plan.run, watched.watcher)
            for what in _check_told(reading, plan.run, watched, found):
                yield Violation("G4", what, plan.run, watched.watcher)
            if found.gaps and not live and not _may_lose(reading, followed):
                yield Violation("G6", f"{found.gaps} gaps, and nothing was lost", plan.run, watched.watcher)


def _check_run(reading: Reading, plan: RunPlan) -> Iterator[str]:
    record = reading.run_records.get(plan.run)
    if record is None or not record.state:
        yield "it was accepted and has no record"
    elif record.state not in RUN_TERMINAL_STATES:
        yield f"it never ended: {record.state}"
    elif record.state != "completed" and not live_sources(plan):
        # A live source whose last event nobody heard has failed; no other may.
        yield f"all its sources came to their ends, and it is {record.state} ({record.reason})"
    if record is not None and record.lease:
        yield f"{record.lease} still follows it"


def _check_sequence(found: Tally) -> Iterator[str]:
    for what, times in (
        ("lost without a word", found.lost),
        ("doubled", found.doubled),
        ("out of order", found.disordered),
        ("of other runs", found.strays),
        ("sent after the last one", found.after_terminal),
    ):
        if times:
            yield f"{times} events {what}"


def _check_told(reading: Reading, run: str, watched: Watched, found: Tally) -> Iterator[str]:
    if not watched.ended:
        yield f"it was never told the end (opened {watched.opened} times, refused {watched.refused})"
        return
    if found.terminals != 1:
        yield f"it saw {found.terminals} last events"
    record = reading.run_records.get(run)
    told = {seen.state for seen in watched.seen if seen.type in (events.RUN_ENDED, events.END)}
    if record is not None and told - {record.state}:
        yield f"it was told {sorted(told)}, and the record says {record.state}"


def _may_lose(reading: Reading, followed: Followed) -> bool:
    """Whether Redis was made to lose something since; a kill may cost it what it had not yet written to disk."""
    return any(
        fault.kind in ("redis-flush", "redis-kill") and fault.span.to_ms >= followed.at_ms for fault in reading.faults
    )


def live_sources(plan: RunPlan) -> frozenset[str]:
    """Sources of a run that say nothing again."""
    return frozenset(name for name, source in plan.sources.items() if source.resume == "live")
