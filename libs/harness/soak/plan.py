"""What a run will do, decided beforehand by one seed (PURE).

Promises: the same arguments give the same plan, whatever the machine then makes of it.
"""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from towline.wire.runs import Resume

Tool = Literal["work", "look"]
Role = Literal["worker", "gateway", "relay", "machine", "upstream", "redis", "postgres"]

GATEWAYS = 2
WORKERS = 2
RELAYS = 2

# Per user. A machine does one job at a time, 0.25 s on average: a quarter of its time, so that what piles up in a
# fault of ten seconds is gone before the next one.
SUBMITS_PER_S = 0.8

# A new run every so often; with its length about six at a time, each of two sources and three watchers.
RUN_EVERY_S = 3.0
RUN_LASTS_S = (4.0, 30.0)
EVENTS_PER_S = (1.0, 20.0)
SOURCES_MAX = 3
RESUMES: tuple[Resume, ...] = ("ids", "ids", "ids", "ids", "replay", "replay", "live")
# A fault of an upstream meets one of so many runs, the newest.
UPSTREAMS_AT_FAULT = 4
WATCHERS_MAX = 4

# Longer than the faults that can lie in a job's way, so that it can still end well; a tenth has much less.
DEADLINE_S = 60.0
FAULT_EVERY_S = (1.5, 5.0)
# Let the first jobs in before the first fault, and have the last one well before the end.
QUIET_S = 2.0


class FaultShape(NamedTuple):
    """How often a kind of fault is drawn, and how long it lasts (seconds) before it is undone."""

    role: Role
    weight: int
    shortest_s: float = 0.0
    longest_s: float = 0.0


FAULTS: dict[str, FaultShape] = {
    "worker-kill": FaultShape("worker", 6, 0.0, 3.0),
    "worker-freeze": FaultShape("worker", 5, 0.5, 10.0),
    "worker-term": FaultShape("worker", 5),
    "gateway-kill": FaultShape("gateway", 5, 0.0, 2.0),
    "gateway-term": FaultShape("gateway", 4),
    "relay-kill": FaultShape("relay", 6, 0.0, 3.0),
    "relay-freeze": FaultShape("relay", 5, 0.5, 10.0),
    "relay-term": FaultShape("relay", 4),
    "upstream-close": FaultShape("upstream", 4),
    "upstream-cut": FaultShape("upstream", 4),
    "upstream-refuse": FaultShape("upstream", 4),
    "sidecar-kill": FaultShape("machine", 8, 0.0, 9.0),
    "sidecar-freeze": FaultShape("machine", 6, 0.5, 15.0),
    "sidecar-term": FaultShape("machine", 4, 0.0, 4.0),
    "socket-cut": FaultShape("machine", 6),
    "link-stall": FaultShape("machine", 4, 0.5, 8.0),
    "redis-restart": FaultShape("redis", 3, 0.0, 2.0),
    "redis-kill": FaultShape("redis", 3, 0.0, 2.0),
    "redis-flush": FaultShape("redis", 4),
    "redis-freeze": FaultShape("redis", 3, 0.2, 10.0),
    "redis-script-flush": FaultShape("redis", 2),
    "postgres-restart": FaultShape("postgres", 2, 0.0, 2.0),
    "postgres-kill": FaultShape("postgres", 2, 0.0, 2.0),
    "postgres-freeze": FaultShape("postgres", 3, 0.2, 10.0),
    "postgres-terminate": FaultShape("postgres", 3),
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to come. What is none of a read's or cancel's stands at its default there.

    Attributes:
        at_s: after the beginning.
        key: of the job that is meant.
        gateway: index of the gateway that is asked first.
        seconds: how long the tool takes.
    """

    at_s: float
    verb: Literal["submit", "read", "cancel"]
    user: str
    key: str
    gateway: int
    wait_s: int = 0
    tool: Tool = "work"
    seconds: float = 0.0
    timeout_s: float = 120.0
    deadline_s: float = DEADLINE_S
    if_offline: Literal["fail", "queue"] = "fail"


class SourcePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A source of a run to come: how it resumes, how fast it speaks, and how much before its last event."""

    resume: Resume
    rate: float
    total: int


class WatcherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher of a run. `at_s`: after the beginning; `gateway`: index of the one that is asked first."""

    at_s: float
    gateway: int


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run to come. `at_s`: after the beginning; sources by name; watchers in the order of their times."""

    at_s: float
    run: str
    sources: dict[str, SourcePlan]
    watchers: list[WatcherPlan]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault to come.

    Attributes:
        target: index within its role; of a run for `upstream`.
        lasts_s: from when it is made until it is undone.
    """

    at_s: float
    kind: str
    target: int
    lasts_s: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole soak, before it begins; requests, runs and faults in the order of their times."""

    seed: int
    seconds: float
    heartbeat_s: float
    users: list[str]
    requests: list[Request]
    runs: list[RunPlan]
    faults: list[Fault]


def make_plan(seed: int, *, seconds: float, users: int, heartbeat_s: float) -> Plan:
    """Decide everything."""
    dice = random.Random(seed)
    names = [f"soak-{number}" for number in range(1, users + 1)]
    requests: list[Request] = []
    for name in names:
        at_s, number = 0.0, 0
        while (at_s := at_s + dice.expovariate(SUBMITS_PER_S)) < seconds:
            number += 1
            # The same keys at every user: they are different jobs.
            requests += _job(dice, at_s, name, f"order-{number}")
    runs = _runs(dice, seed, seconds)
    return Plan(
        seed=seed,
        seconds=seconds,
        heartbeat_s=heartbeat_s,
        users=names,
        requests=sorted(requests, key=lambda request: request.at_s),
        runs=runs,
        faults=_faults(dice, seconds, machines=users, runs=runs),
    )


def _job(dice: random.Random, at_s: float, user: str, key: str) -> list[Request]:
    """A submission, and what else is asked about its key."""
    gateway = dice.randrange(GATEWAYS)
    submit = Request(
        at_s=at_s,
        verb="submit",
        user=user,
        key=key,
        gateway=gateway,
        wait_s=dice.choice([0, 0, 1, 3, 10, 20]),
        tool=dice.choice(["work", "work", "look"]),
        seconds=round(dice.choice([0.0, 0.0, dice.uniform(0.0, 0.4), dice.uniform(0.3, 2.0)]), 3),
        timeout_s=dice.choice([120.0] * 14 + [0.3]),
        deadline_s=dice.choice([DEADLINE_S] * 9 + [round(dice.uniform(0.5, 4.0), 1)]),
        if_offline=dice.choice(["fail", "queue"]),
    )
    requests = [submit]
    other = (gateway + 1) % GATEWAYS
    if dice.random() < 0.15:
        # At the same moment: two replicas, one key.
        requests.append(msgspec.structs.replace(submit, gateway=other))
    if dice.random() < 0.2:
        later = msgspec.structs.replace(submit, at_s=at_s + dice.expovariate(0.3), gateway=other)
        if dice.random() < 0.3:
            later = msgspec.structs.replace(later, seconds=submit.seconds + 0.001)  # another payload
        requests.append(later)
    if dice.random() < 0.12:
        cancel_s = at_s + dice.uniform(0.02, 1.5)
        requests.append(Request(at_s=cancel_s, verb="cancel", user=user, key=key, gateway=dice.randrange(GATEWAYS)))
    if dice.random() < 0.25:
        read_s = at_s + dice.expovariate(0.3)
        wait_s = dice.choice([0, 0, 2, 10])
        requests.append(
            Request(at_s=read_s, verb="read", user=user, key=key, gateway=dice.randrange(GATEWAYS), wait_s=wait_s)
        )
    return requests


def _runs(dice: random.Random, seed: int, seconds: float) -> list[RunPlan]:
    runs: list[RunPlan] = []
    at_s = dice.uniform(0.0, QUIET_S)
    while at_s < seconds:
        lasts_s = min(dice.uniform(*RUN_LASTS_S), max(RUN_LASTS_S[0], seconds - at_s))
        sources = {}
        for number in range(1, dice.randint(1, SOURCES_MAX) + 1):
            rate = round(dice.uniform(*EVENTS_PER_S), 1)
            resume = dice.choice(RESUMES)
            sources[f"source-{number}"] = SourcePlan(resume=resume, rate=rate, total=max(1, round(rate * lasts_s)))
        # From before the first event until after the last one.
        watchers = sorted(round(at_s + dice.uniform(0.0, lasts_s * 1.2), 2) for _ in range(WATCHERS_MAX - 1))
        runs.append(
            RunPlan(
                at_s=round(at_s, 2),
                run=f"soak-{seed}-{len(runs) + 1}",
                sources=sources,
                watchers=[
                    WatcherPlan(at_s=watch_s, gateway=dice.randrange(GATEWAYS))
                    for watch_s in [round(at_s, 2), *watchers]
                ],
            )
        )
        at_s += dice.expovariate(1 / RUN_EVERY_S)
    return runs


def _faults(dice: random.Random, seconds: float, *, machines: int, runs: Sequence[RunPlan]) -> list[Fault]:
    targets: dict[Role, int] = {
        "worker": WORKERS,
        "gateway": GATEWAYS,
        "relay": RELAYS,
        "machine": machines,
        "redis": 1,
        "postgres": 1,
    }
    kinds, weights = list(FAULTS), [shape.weight for shape in FAULTS.values()]
    faults = []
    at_s = QUIET_S
    while at_s < seconds - QUIET_S:
        kind = dice.choices(kinds, weights)[0]
        shape = FAULTS[kind]
        lasts_s = round(dice.uniform(shape.shortest_s, shape.longest_s), 2)
        if shape.role == "upstream":
            # One that has begun, and one of the last few: the others are over.
            begun = sum(run.at_s <= at_s for run in runs)
            target = dice.randrange(max(0, begun - UPSTREAMS_AT_FAULT), max(1, begun))
        else:
            target = dice.randrange(targets[shape.role])
        faults.append(Fault(at_s=round(at_s, 2), kind=kind, target=target, lasts_s=lasts_s))
        at_s += dice.uniform(*FAULT_EVERY_S)
    return faults
