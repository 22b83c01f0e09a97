"""What rows are made of: runs, and what to look at in their samples.

Promises: in each round every run comes once, peers and ours in turn, so that both meet the same minute of the machine;
          each figure is the median over the rounds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from harness.bench.figures import Round, Sample


@dataclass(frozen=True, slots=True)
class Run:
    """One system under one load.

    Attributes:
        load, quick: what its peer takes; `quick` is the little that warms a system up, or tries the bench out.
        unit: what is counted in it.
    """

    name: str
    peer: str
    load: Any
    quick: Any
    unit: str = "job"


def as_quick(runs: Iterable[Run]) -> list[Run]:
    """The same runs with the little that warms a system up, or tries the bench out."""
    return [replace(run, load=run.quick) for run in runs]


def of(name: str, pick: Callable[[Sample], float]) -> Callable[[Round], float]:
    """Look at one run."""
    return lambda samples: pick(samples[name])


def total(names: Iterable[str], pick: Callable[[Sample], float]) -> Callable[[Round], float]:
    """Add up several."""
    return lambda samples: sum(pick(samples[name]) for name in names)


def best(
    names: Iterable[str], best_of: Callable[[Iterable[float]], float], pick: Callable[[Sample], float]
) -> Callable[[Round], float]:
    """Take the best of several."""
    return lambda samples: best_of(pick(samples[name]) for name in names)


def p50(sample: Sample) -> float:
    """What half of those who waited did not exceed, ms."""
    return _known(sample.p50_ms)


def p99(sample: Sample) -> float:
    """What nearly all of those who waited did not exceed, ms."""
    return _known(sample.p99_ms)


def rate(sample: Sample) -> float:
    """Units per second."""
    return sample.rate


def cpu(sample: Sample) -> float:
    """CPU per unit, µs."""
    return sample.total_cpu_us


def memory(sample: Sample) -> float:
    """Memory per unit, KiB."""
    return sample.total_memory_kib


def _known(wait_ms: float | None) -> float:
    if wait_ms is None:
        raise ValueError("nobody waits in this run")
    return wait_ms
