"""The rows of the job bench: which systems are put under which load, and what is compared with what.

Promises: in each round every run comes once, peers and ours in turn, so that both meet the same minute of the machine;
          each figure is the median over the rounds.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from harness.bench.figures import Figure, Round, Sample
from harness.bench.ground import Ground, Load, Peer
from harness.bench.ours import Status, open_small, open_stack, open_wide
from harness.bench.peers import open_bare_hop, open_naive_hub
from harness.bench.peers_queues import open_arq, open_celery, open_taskiq

SEED_001_RATE = 61.89
SEED_000_STATUS_MS = 20.0


@dataclass(frozen=True, slots=True)
class Run:
    """One system under one load. `quick_jobs`: how many jobs warm it up; also all there are in a quick bench."""

    name: str
    peer: str
    load: Load
    quick_jobs: int


# In the order of a round: first what is waited for one by one, then the crowds.
RUNS = (
    Run("naive hub, 1 in flight", "naive hub", Load(500, 1), 50),
    Run("towline, 1 in flight", "towline", Load(500, 1), 50),
    Run("bare hop, 1 in flight", "bare hop", Load(500, 1), 50),
    Run("towline unhinted, 1 in flight", "towline", Load(300, 1, "note"), 30),
    Run("naive hub, 64 in flight", "naive hub", Load(5000, 64), 300),
    Run("towline, 64 in flight", "towline", Load(5000, 64), 300),
    Run("towline, 6 in flight", "towline", Load(5000, 6, seconds=8), 300),
    Run("probes, 1 in flight", "status", Load(500, 1), 50),
    Run("towline 2+2, 64 in flight", "towline 2+2", Load(5000, 64), 300),
    Run("celery, 1 in flight", "celery", Load(300, 1), 30),
    Run("taskiq, 1 in flight", "taskiq", Load(300, 1), 30),
    Run("arq, 1 in flight", "arq", Load(300, 1), 30),
    Run("celery, 64 in flight", "celery", Load(3000, 64), 200),
    Run("taskiq, 64 in flight", "taskiq", Load(3000, 64), 200),
    Run("arq, 64 in flight", "arq", Load(3000, 64), 200),
)

_NAIVE_1, _OURS_1, _HOP_1, _UNHINTED_1, _NAIVE_64, _OURS_64, _OURS_6, _PROBES, _WIDE_64 = (run.name for run in RUNS[:9])
_CELERY_1, _TASKIQ_1, _ARQ_1, _CELERY_64, _TASKIQ_64, _ARQ_64 = (run.name for run in RUNS[9:])


def _of(name: str, pick: Callable[[Sample], float]) -> Callable[[Round], float]:
    return lambda samples: pick(samples[name])


def _sum(names: Iterable[str], pick: Callable[[Sample], float]) -> Callable[[Round], float]:
    return lambda samples: sum(pick(samples[name]) for name in names)


def _best(
    names: Iterable[str], best: Callable[[Iterable[float]], float], pick: Callable[[Sample], float]
) -> Callable[[Round], float]:
    return lambda samples: best(pick(samples[name]) for name in names)


def _p50(sample: Sample) -> float:
    return sample.p50_ms


def _p99(sample: Sample) -> float:
    return sample.p99_ms


def _rate(sample: Sample) -> float:
    return sample.rate


def _cpu(sample: Sample) -> float:
    return sample.total_cpu_us


_HUB_AND_HOP = "naive hub + bare hop"
_PEERS_1 = (_NAIVE_1, _HOP_1)

# By the word that chooses it on the command line.
ROWS: dict[str, Sequence[Figure]] = {
    "latency": (
        Figure(
            "hinted job, 1 in flight: p50",
            (_OURS_1, *_PEERS_1),
            "ms",
            _of(_OURS_1, _p50),
            _HUB_AND_HOP,
            _sum(_PEERS_1, _p50),
            goal=1.25,
            then=1.0,
        ),
        Figure(
            "hinted job, 1 in flight: p99",
            (_OURS_1, *_PEERS_1),
            "ms",
            _of(_OURS_1, _p99),
            _HUB_AND_HOP,
            _sum(_PEERS_1, _p99),
        ),
    ),
    "unhinted": (
        Figure(
            "unhinted job, 1 in flight: p50",
            (_UNHINTED_1, *_PEERS_1),
            "ms",
            _of(_UNHINTED_1, _p50),
            _HUB_AND_HOP,
            _sum(_PEERS_1, _p50),
        ),
    ),
    "load": (
        Figure(
            "hinted job, 64 in flight: CPU per job",
            (_OURS_64, _NAIVE_64),
            "µs",
            _of(_OURS_64, _cpu),
            "naive hub",
            _of(_NAIVE_64, _cpu),
            goal=1.8,
            then=1.5,
        ),
        Figure(
            "the same: jobs per second",
            (_OURS_64, _NAIVE_64),
            "/s",
            _of(_OURS_64, _rate),
            "naive hub",
            _of(_NAIVE_64, _rate),
            better="higher",
        ),
    ),
    "seed001": (
        Figure(
            "seed 001's run, 6 in flight: requests per second",
            (_OURS_6,),
            "/s",
            _of(_OURS_6, _rate),
            "seed 001",
            lambda _: SEED_001_RATE,
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
            _of(_PROBES, _p99),
            "seed 000",
            lambda _: SEED_000_STATUS_MS,
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
            _of(_WIDE_64, _rate),
            "one of each",
            _of(_OURS_64, _rate),
            better="higher",
        ),
        Figure(
            "the same: CPU per job",
            (_WIDE_64, _OURS_64),
            "µs",
            _of(_WIDE_64, _cpu),
            "one of each",
            _of(_OURS_64, _cpu),
        ),
    ),
    # Each queue as a competent user sets it up (its module says how), with a task that does nothing, through Redis
    # alone: no durable record, no idempotency key, no machine at the end of a socket.
    "queues": (
        Figure(
            "hinted job, 64 in flight: jobs per second",
            (_OURS_64, _CELERY_64),
            "/s",
            _of(_OURS_64, _rate),
            "Celery",
            _of(_CELERY_64, _rate),
            goal=4,
            then=6,
            better="higher",
        ),
        Figure(
            "the same",
            (_OURS_64, _TASKIQ_64, _ARQ_64),
            "/s",
            _of(_OURS_64, _rate),
            "the faster of taskiq and arq",
            _best((_TASKIQ_64, _ARQ_64), max, _rate),
            goal=2.5,
            then=3.3,
            better="higher",
        ),
        Figure(
            "the same: CPU per job",
            (_OURS_64, _CELERY_64, _TASKIQ_64, _ARQ_64),
            "µs",
            _of(_OURS_64, _cpu),
            "the cheapest of the three",
            _best((_CELERY_64, _TASKIQ_64, _ARQ_64), min, _cpu),
        ),
        Figure(
            "hinted job, 1 in flight: p50",
            (_OURS_1, _CELERY_1, _TASKIQ_1, _ARQ_1),
            "ms",
            _of(_OURS_1, _p50),
            "the fastest of the three",
            _best((_CELERY_1, _TASKIQ_1, _ARQ_1), min, _p50),
        ),
    ),
}


def runs_for(figures: Iterable[Figure]) -> list[Run]:
    """The runs that some figures need, each once, in the order of a round."""
    needed = {name for figure in figures for name in figure.runs}
    return [run for run in RUNS if run.name in needed]


def as_quick(runs: Iterable[Run]) -> list[Run]:
    """The same runs with the few jobs that warm a system up, or try the bench out."""
    return [replace(run, load=replace(run.load, jobs=run.quick_jobs)) for run in runs]


@asynccontextmanager
async def open_peers(ground: Ground, names: Iterable[str]) -> AsyncIterator[dict[str, Peer]]:
    """Start the systems of these names, and what they need, and stop them at the end. Raises: ProcessFailed."""
    wanted = set(names)
    peers: dict[str, Peer] = {}
    async with AsyncExitStack() as cleanup:
        if "naive hub" in wanted:
            peers["naive hub"] = await cleanup.enter_async_context(open_naive_hub(ground))
        if "bare hop" in wanted:
            peers["bare hop"] = await cleanup.enter_async_context(open_bare_hop(ground))
        for name, open_queue in (("celery", open_celery), ("taskiq", open_taskiq), ("arq", open_arq)):
            if name in wanted:
                peers[name] = await cleanup.enter_async_context(open_queue(ground))
        if wanted & {"towline", "status", "towline 2+2"}:
            stack = await cleanup.enter_async_context(open_stack(ground))
            small = await cleanup.enter_async_context(open_small(ground, stack))
            peers |= {"towline": small, "status": Status(small)}
            if "towline 2+2" in wanted:
                peers["towline 2+2"] = await cleanup.enter_async_context(open_wide(ground, stack))
        yield peers
