"""The rows of the job bench: which systems are put under which load, and what is compared with what."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from dataclasses import replace

from harness.bench.figures import Figure
from harness.bench.ground import Ground, Load, Peer
from harness.bench.ours import Status, open_small, open_wide
from harness.bench.peers import open_bare_hop, open_naive_hub
from harness.bench.peers_queues import open_arq, open_celery, open_taskiq
from harness.bench.runs import Run, best, cpu, of, p50, p99, rate, total
from harness.stack import Stack

# What earlier systems of this kind did, on other machines: constants, not measured beside ours.
EARLIER_RATE = 61.89
EARLIER_PROBE_MS = 20.0


def _run(name: str, peer: str, load: Load, quick_jobs: int) -> Run:
    return Run(name, peer, load, replace(load, jobs=quick_jobs))


# In the order of a round: first what is waited for one by one, then the crowds.
RUNS = (
    _run("naive hub, 1 in flight", "naive hub", Load(500, 1), 50),
    _run("towline, 1 in flight", "towline", Load(500, 1), 50),
    _run("bare hop, 1 in flight", "bare hop", Load(500, 1), 50),
    _run("towline unhinted, 1 in flight", "towline", Load(300, 1, "note"), 30),
    _run("naive hub, 64 in flight", "naive hub", Load(5000, 64), 300),
    _run("towline, 64 in flight", "towline", Load(5000, 64), 300),
    _run("towline, 6 in flight", "towline", Load(5000, 6, seconds=30), 300),
    _run("probes, 1 in flight", "status", Load(500, 1), 50),
    _run("towline 2+2, 64 in flight", "towline 2+2", Load(5000, 64), 300),
    _run("celery, 1 in flight", "celery", Load(300, 1), 30),
    _run("taskiq, 1 in flight", "taskiq", Load(300, 1), 30),
    _run("arq, 1 in flight", "arq", Load(300, 1), 30),
    _run("celery, 64 in flight", "celery", Load(3000, 64), 200),
    _run("taskiq, 64 in flight", "taskiq", Load(3000, 64), 200),
    _run("arq, 64 in flight", "arq", Load(3000, 64), 200),
)

_NAIVE_1, _OURS_1, _HOP_1, _UNHINTED_1, _NAIVE_64, _OURS_64, _OURS_6, _PROBES, _WIDE_64 = (run.name for run in RUNS[:9])
_CELERY_1, _TASKIQ_1, _ARQ_1, _CELERY_64, _TASKIQ_64, _ARQ_64 = (run.name for run in RUNS[9:])

_HUB_AND_HOP = "naive hub + bare hop"
_PEERS_1 = (_NAIVE_1, _HOP_1)

# By the word that chooses it on the command line.
ROWS: dict[str, Sequence[Figure]] = {
    "latency": (
        Figure(
            "hinted job, 1 in flight: p50",
            (_OURS_1, *_PEERS_1),
            "ms",
            of(_OURS_1, p50),
            _HUB_AND_HOP,
            total(_PEERS_1, p50),
            goal=1.25,
            then=1.0,
        ),
        Figure(
            "hinted job, 1 in flight: p99",
            (_OURS_1, *_PEERS_1),
            "ms",
            of(_OURS_1, p99),
            _HUB_AND_HOP,
            total(_PEERS_1, p99),
        ),
    ),
    "unhinted": (
        Figure(
            "unhinted job, 1 in flight: p50",
            (_UNHINTED_1, *_PEERS_1),
            "ms",
            of(_UNHINTED_1, p50),
            _HUB_AND_HOP,
            total(_PEERS_1, p50),
        ),
    ),
    "load": (
        Figure(
            "hinted job, 64 in flight: CPU per job",
            (_OURS_64, _NAIVE_64),
            "µs",
            of(_OURS_64, cpu),
            "naive hub",
            of(_NAIVE_64, cpu),
            goal=1.8,
            then=1.5,
        ),
        Figure(
            "the same: jobs per second",
            (_OURS_64, _NAIVE_64),
            "/s",
            of(_OURS_64, rate),
            "naive hub",
            of(_NAIVE_64, rate),
            better="higher",
        ),
    ),
    "six": (
        Figure(
            "unique jobs, 6 in flight: requests per second",
            (_OURS_6,),
            "/s",
            of(_OURS_6, rate),
            "an earlier system (constant)",
            lambda _: EARLIER_RATE,
            goal=25,
            then=35,
            better="higher",
        ),
    ),
    "status": (
        Figure(
            "probe while a 12 s job runs: p99",
            (_PROBES,),
            "ms",
            of(_PROBES, p99),
            "an earlier system (constant)",
            lambda _: EARLIER_PROBE_MS,
            goal=3.0,
            then=1.5,
            bounds="value",
        ),
    ),
    "wide": (
        Figure(
            "2 gateways and 2 workers, 64 in flight: jobs per second",
            (_WIDE_64, _OURS_64),
            "/s",
            of(_WIDE_64, rate),
            "one of each",
            of(_OURS_64, rate),
            better="higher",
        ),
        Figure(
            "the same: CPU per job",
            (_WIDE_64, _OURS_64),
            "µs",
            of(_WIDE_64, cpu),
            "one of each",
            of(_OURS_64, cpu),
        ),
    ),
    # Each queue as a competent user sets it up (its module says how), with a task that does nothing, through Redis
    # alone: no durable record, no idempotency key, no machine at the end of a socket.
    "queues": (
        Figure(
            "hinted job, 64 in flight: jobs per second",
            (_OURS_64, _CELERY_64),
            "/s",
            of(_OURS_64, rate),
            "Celery",
            of(_CELERY_64, rate),
            goal=4,
            then=6,
            better="higher",
        ),
        Figure(
            "the same",
            (_OURS_64, _TASKIQ_64, _ARQ_64),
            "/s",
            of(_OURS_64, rate),
            "the faster of taskiq and arq",
            best((_TASKIQ_64, _ARQ_64), max, rate),
            goal=2.5,
            then=3.3,
            better="higher",
        ),
        Figure(
            "the same: CPU per job",
            (_OURS_64, _CELERY_64, _TASKIQ_64, _ARQ_64),
            "µs",
            of(_OURS_64, cpu),
            "the cheapest of the three",
            best((_CELERY_64, _TASKIQ_64, _ARQ_64), min, cpu),
        ),
        Figure(
            "hinted job, 1 in flight: p50",
            (_OURS_1, _CELERY_1, _TASKIQ_1, _ARQ_1),
            "ms",
            of(_OURS_1, p50),
            "the fastest of the three",
            best((_CELERY_1, _TASKIQ_1, _ARQ_1), min, p50),
        ),
    ),
}


async def open_peers(
    ground: Ground, stack: Stack, wanted: AbstractSet[str], cleanup: AsyncExitStack
) -> dict[str, Peer[Load]]:
    """Start those of the job systems that are wanted, until `cleanup` is closed. Raises: ProcessFailed."""
    peers: dict[str, Peer[Load]] = {}
    if "naive hub" in wanted:
        peers["naive hub"] = await cleanup.enter_async_context(open_naive_hub(ground))
    if "bare hop" in wanted:
        peers["bare hop"] = await cleanup.enter_async_context(open_bare_hop(ground))
    for name, open_queue in (("celery", open_celery), ("taskiq", open_taskiq), ("arq", open_arq)):
        if name in wanted:
            peers[name] = await cleanup.enter_async_context(open_queue(ground))
    if wanted & {"towline", "status", "towline 2+2"}:
        small = await cleanup.enter_async_context(open_small(ground, stack))
        peers |= {"towline": small, "status": Status(small)}
        if "towline 2+2" in wanted:
            peers["towline 2+2"] = await cleanup.enter_async_context(open_wide(ground, stack))
    return peers
