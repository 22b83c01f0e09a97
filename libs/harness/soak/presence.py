"""Presence, as gateways told it, against the machines' lives (PURE): it is a fact, not a memory (G5).

    connected      from the sidecar's welcome until it loses, leaves or is cut off its socket: nobody is told `offline`
    dead           a killed or frozen process: nobody is told `online` once its last sign of life must have lapsed
    alive          a process that runs is online again within the longest pause between two dials, and at the end

A fault of the machine, or of the worker that holds it, excuses what is told during it and one time to live afterwards.
A fault of Redis does not excuse `offline`: what it has lost is `unknown`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.store.keys import Timing
from harness.soak.history import PresenceTold, Said
from harness.soak.reading import Reading, Span, Spans, Violation

# A busy machine may be late by this.
SLACK_MS = 1_000
# A sidecar that was refused for long dials again after 30 s at the latest; the rest is for the dial itself.
AGAIN_ONLINE_MS = 40_000
CALLED_ONLINE = frozenset({"online", "reconnecting"})
ENDS_PROCESS = frozenset({"sidecar-kill", "sidecar-term"})


def check_presence(reading: Reading) -> Iterator[Violation]:
    """See the module."""
    timing = Timing(reading.plan.heartbeat_s)
    redis_away = reading.spans_of(targets=("redis",), longer_ms=timing.presence_ttl_ms)
    for user in reading.plan.users:
        told = [answer for answer in reading.told if answer.user == user]
        connected = list(_connected(reading, user))
        yield from _check_offline(told, connected)
        yield from _check_online(told, reading, user, timing, redis_away)
        yield from _check_alive(told, reading, user)


def _connected(reading: Reading, user: str) -> Iterator[Span]:
    """When the machine was connected beyond doubt."""
    ttl_ms = Timing(reading.plan.heartbeat_s).presence_ttl_ms
    ends = [fault.span.from_ms for fault in reading.faults if fault.target == user and fault.kind in ENDS_PROCESS]
    said = sorted(reading.said.get(user, ()), key=lambda saying: saying.at_ms)
    last = Said(at_ms=max((answer.at_ms for answer in reading.told), default=0), user=user, what="stopped")
    for saying, following in pairwise([*said, last]):
        if saying.what != "connected":
            continue
        end_ms = min([following.at_ms, *(at_ms for at_ms in ends if at_ms >= saying.at_ms)])
        session = reading.sessions.get(saying.session)
        workers = {fault.target for fault in reading.faults if fault.kind.startswith("worker-")}
        holders = workers if session is None else {session.worker}
        doubtful = reading.spans_of(targets={user, *holders}, longer_ms=ttl_ms)
        yield from _without(Span(saying.at_ms, end_ms), doubtful)


def _without(span: Span, others: Spans) -> Iterator[Span]:
    from_ms = span.from_ms
    for other in others.joined:
        if other.to_ms < from_ms:
            continue
        if other.from_ms > span.to_ms:
            break
        if other.from_ms > from_ms:
            yield Span(from_ms, other.from_ms - 1)
        from_ms = other.to_ms + 1
    if from_ms <= span.to_ms:
        yield Span(from_ms, span.to_ms)


def _check_offline(told: Sequence[PresenceTold], connected: Sequence[Span]) -> Iterator[Violation]:
    for answer in told:
        if answer.state != "offline":
            continue
        span = Span(answer.asked_ms, answer.at_ms)
        for life in connected:
            if life.from_ms <= span.from_ms and span.to_ms <= life.to_ms:
                since_s = (span.from_ms - life.from_ms) / 1000
                what = f"{answer.gateway} told `offline` of a machine that had been connected for {since_s:.1f} s"
                yield Violation("G5", what, answer.user)


def _check_online(
    told: Sequence[PresenceTold], reading: Reading, user: str, timing: Timing, redis_away: Spans
) -> Iterator[Violation]:
    # A worker that was itself frozen meanwhile may refresh once more, by the last sign of life.
    workers_away = reading.spans_of(
        targets={fault.target for fault in reading.faults if fault.kind.startswith("worker-")}
    )
    for fault in reading.faults:
        # One that is asked to leave lives on for as long as its job takes.
        if fault.target != user or fault.kind not in ("sidecar-kill", "sidecar-freeze"):
            continue
        lapses_ms = timing.presence_ttl_ms + SLACK_MS
        if fault.kind == "sidecar-freeze" or workers_away.meet(fault.span):
            lapses_ms += int(timing.sign_of_life_max_age_s * 1000)
        for answer in told:
            if answer.state not in CALLED_ONLINE or answer.at_ms >= fault.span.to_ms:
                continue
            dead_ms = answer.asked_ms - fault.span.from_ms
            if dead_ms > lapses_ms and not redis_away.meet(Span(fault.span.from_ms, answer.at_ms)):
                what = f"{answer.gateway} told `{answer.state}` of a machine {dead_ms / 1000:.1f} s after {fault.kind}"
                yield Violation("G5", what, user)


def _check_alive(told: Sequence[PresenceTold], reading: Reading, user: str) -> Iterator[Violation]:
    machine_away = reading.spans_of(targets=[user])
    in_the_way = Spans([*machine_away.joined, *reading.stores_away().joined])
    since_ms: int | None = None
    for answer in told:
        if answer.state in CALLED_ONLINE:
            since_ms = None
            continue
        since_ms = answer.asked_ms if since_ms is None else since_ms
        stretch = Span(since_ms, answer.at_ms)
        if stretch.to_ms - stretch.from_ms - in_the_way.within_ms(stretch) > AGAIN_ONLINE_MS:
            away_s = (stretch.to_ms - stretch.from_ms) / 1000
            yield Violation("G5", f"it runs and had not been online for {away_s:.1f} s", user)
            break
    if told and told[-1].state != "online":
        yield Violation("G5", f"`{told[-1].state}` was told of it at the end", user)
