"""The checker: which promises a history breaks (PURE). Jobs and what was said of them stand here: G1, G2 and G4.

    accepted       has one record, and ends                                                     G1
    a key          names one job; once it has ended, everyone is told the same outcome, bytes   G2
    an end         comes once, at the latest at its deadline and the sweeper's round            G4
    a waiter       is answered when its wait is over                                            G4

Executions are `executions`' (G3), presence is `presence`'s (G5), streams are `streams`' (G6). Faults excuse only what
the promises exempt: time during which a store was away, and until it must be in use again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from harness.soak.executions import check_executions
from harness.soak.history import AnyEvent, KeysLeft, Left, Recorded
from harness.soak.presence import check_presence
from harness.soak.reading import RECOVERY_MS, Exchange, Reading, Span, Spans, Violation, read
from harness.soak.streams import check_streams
from towline.wire import api

# A deadline is found by the sweeper's round, every two seconds, and written by its next statement.
SWEEP_MS = 5_000
# From the end of a wait to its answer: a last look into the record, on a machine that is busy.
ANSWER_MS = 5_000
# The session at work, and the one before it while its entries are claimed.
CONSUMERS_MAX = 2


def check(events: Sequence[AnyEvent]) -> list[Violation]:
    """Find every broken promise in a whole history, its plan first.

    Raises:
        ValueError: no such history.
    """
    reading = read(events)
    found = list(_check_jobs(reading))
    found += check_executions(reading)
    found += check_presence(reading)
    found += check_streams(reading)
    found += _check_left(reading)
    return found


def _check_jobs(reading: Reading) -> Iterator[Violation]:
    stores_away = reading.stores_away()
    postgres_away = reading.spans_of(targets=("postgres",), longer_ms=RECOVERY_MS)
    for (user, key), exchanges in reading.exchanges.items():
        record = reading.records.get((user, key))
        for what in (
            *_check_durable(exchanges, record),
            *(() if record is None else _check_user(exchanges, record)),
        ):
            yield Violation("G1", what, user, key)
        for what in (
            *_check_one_answer(exchanges, record),
            *_check_never_refused(exchanges, postgres_away),
        ):
            yield Violation("G2", what, user, key)
        for what in _check_waits(exchanges, stores_away):
            yield Violation("G4", what, user, key)
    for (user, key), record in reading.records.items():
        for what in _check_end(record, stores_away):
            yield Violation("G4", what, user, key)


def _check_durable(exchanges: Sequence[Exchange], record: Recorded | None) -> Iterator[str]:
    jobs = sorted({exchange.answered.job for exchange in exchanges if exchange.accepted})
    for job in jobs:
        if record is None or record.job != job:
            yield f"job {job} was accepted and has no record"


def _check_user(exchanges: Sequence[Exchange], record: Recorded) -> Iterator[str]:
    for exchange in exchanges:
        told = exchange.answered
        if told.job and told.user != record.user:
            yield f"an answer to {record.user} is about a job of {told.user}"
    if record.state == "completed" and record.outcome is not None:
        result = msgspec.json.decode(record.outcome, type=api.Outcome).result
        if result != f"{record.user}/{record.key}":
            yield f"the outcome holds the result of another job: {result!r}"


def _check_one_answer(exchanges: Sequence[Exchange], record: Recorded | None) -> Iterator[str]:
    accepted = [exchange for exchange in exchanges if exchange.accepted]
    jobs = {exchange.answered.job for exchange in accepted}
    if len(jobs) > 1:
        yield f"the key names {len(jobs)} jobs: {', '.join(sorted(jobs))}"
    ended = [exchange.answered for exchange in accepted if exchange.answered.state in api.TERMINAL_STATES]
    ends = {(answer.state, answer.ended_at, answer.outcome) for answer in ended}
    if record is not None and record.ended_ms is not None:
        ends.add((record.state, api.timestamp(record.ended_ms), record.outcome or ""))
    if len(ends) > 1:
        yield f"{len(ends)} different ends were told or recorded: {sorted(ends)}"
    if ended:
        first_ms = min(answer.at_ms for answer in ended)
        for exchange in accepted:
            if exchange.asked.at_ms > first_ms and exchange.answered.state not in api.TERMINAL_STATES:
                yield f"request {exchange.asked.request}: told as {exchange.answered.state} after its end had been told"
    submits = [exchange for exchange in accepted if exchange.asked.verb == "submit"]
    fresh = [exchange.asked.request for exchange in submits if not exchange.answered.replayed]
    if len(fresh) > 1:
        yield f"requests {fresh} were all answered as the first of their key"
    if record is not None:
        for exchange in submits:
            matches = (exchange.asked.tool, exchange.asked.args) == (record.tool, record.args)
            if exchange.answered.payload_matches != matches:
                yield f"request {exchange.asked.request}: payload_matches is {exchange.answered.payload_matches}"


def _check_never_refused(exchanges: Sequence[Exchange], postgres_away: Spans) -> Iterator[str]:
    """Once a key is accepted, nothing refuses it: only PostgreSQL's absence hides its record."""
    accepted_ms = min((e.answered.at_ms for e in exchanges if e.accepted), default=None)
    if accepted_ms is None:
        return
    for asked, answered in exchanges:
        if asked.at_ms <= accepted_ms or answered.job or not answered.status:
            continue
        if answered.status == 503 and postgres_away.meet(Span(asked.at_ms, answered.at_ms)):
            continue
        yield f"request {asked.request} was refused ({answered.status} {answered.problem}) though the job was accepted"


def _check_waits(exchanges: Sequence[Exchange], stores_away: Spans) -> Iterator[str]:
    for asked, answered in exchanges:
        taken_ms = answered.at_ms - asked.at_ms
        excused_ms = stores_away.within_ms(Span(asked.at_ms, answered.at_ms))
        if taken_ms - excused_ms > asked.wait_s * 1000 + ANSWER_MS:
            yield f"request {asked.request} may wait {asked.wait_s:g} s and took {taken_ms / 1000:.1f} s"


def _check_end(record: Recorded, stores_away: Spans) -> Iterator[str]:
    if record.ended_ms is None or record.state not in api.TERMINAL_STATES:
        yield f"it never ended: {record.state} after {(record.at_ms - record.accepted_ms) / 1000:.1f} s"
        return
    late_ms = record.ended_ms - record.deadline_ms
    if late_ms > 0:
        late_ms -= stores_away.within_ms(Span(record.deadline_ms, record.ended_ms))
        if late_ms > SWEEP_MS:
            yield f"it ended {(record.ended_ms - record.deadline_ms) / 1000:.1f} s after its deadline"


def _check_left(reading: Reading) -> Iterator[Violation]:
    for left in reading.left:
        match left:
            case Left():
                if left.entries or left.pending or left.indexed or left.groups > 1 or left.consumers > CONSUMERS_MAX:
                    counts = f"entries {left.entries}, pending {left.pending}, indexed {left.indexed}"
                    more = f"groups {left.groups}, consumers {left.consumers}"
                    yield Violation("end", f"left in Redis: {counts}, {more}", left.user)
            case KeysLeft():
                if left.names:
                    yield Violation("end", f"keys of a user who left: {', '.join(left.names)}", left.user)
    users = Counter(left.user for left in reading.left if isinstance(left, KeysLeft))
    for user in reading.plan.users:
        if not users[user]:
            yield Violation("end", "nobody looked at what is left", user)
