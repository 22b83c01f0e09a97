"""From samples to figures: percentiles, ratios within a round, medians over rounds, and goals (PURE).

A machine that others use is twice as slow in one minute as in the next. So a ratio is taken within a round, where both
sides met the same minute, and only then is the median of the rounds taken.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest of `values` that at least `percent` % of them do not exceed.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one system.

    Attributes:
        units: how many jobs were answered, all of them rightly; or events stored, deliveries made, clients connected.
        wall_s: from the first to the last of them.
        p50_ms, p99_ms: what a caller, or an event, waited; None where nobody waits.
        cpu_us: per unit, by process, of the system and of the machine side; neither driver nor stores.
        driver_cpu_us: per unit, of the load generator, which shares the cores with what it measures.
        stores_cpu_us: per unit, by store; empty where the stores are not ours to look into.
        memory_kib: per unit, by process; empty where memory is not what is looked at.
    """

    units: int
    wall_s: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_us: Mapping[str, float]
    driver_cpu_us: float = 0.0
    stores_cpu_us: Mapping[str, float] = field(default_factory=dict)
    memory_kib: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.wall_s

    @property
    def total_cpu_us(self) -> float:
        """CPU per unit of all processes, stores excepted."""
        return sum(self.cpu_us.values())

    @property
    def total_memory_kib(self) -> float:
        """Memory per unit of all processes."""
        return sum(self.memory_kib.values())


Round = Mapping[str, Sample]
"""The samples of one round, by the name of their run."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        runs: the runs that `measured` and `reference` look at.
        unit: of both.
        against: what the reference is, for people.
        goal, then: bounds of the ratio, or of the measured value where `bounds` says so; None: there is none yet.
        better: the direction; a bound is met when the figure is at it, or beyond it in this direction.
    """

    name: str
    runs: Sequence[str]
    unit: str
    measured: Callable[[Round], float]
    against: str
    reference: Callable[[Round], float]
    goal: float | None = None
    then: float | None = None
    better: Literal["lower", "higher"] = "lower"
    bounds: Literal["ratio", "value"] = "ratio"


@dataclass(frozen=True, slots=True)
class Result:
    """A figure over all rounds; each of the three is a median of its own."""

    figure: Figure
    measured: float
    reference: float
    ratio: float
    ratios: Sequence[float]

    def meets(self, bound: float | None) -> bool | None:
        """Whether the median is within `bound`, one of the figure's own; None when there is none."""
        if bound is None:
            return None
        judged = self.ratio if self.figure.bounds == "ratio" else self.measured
        return judged <= bound if self.figure.better == "lower" else judged >= bound


def result_of(figure: Figure, rounds: Sequence[Round]) -> Result:
    """Take a figure's medians. Raises: ValueError, without rounds."""
    if not rounds:
        raise ValueError("no rounds")
    measured = [figure.measured(each) for each in rounds]
    reference = [figure.reference(each) for each in rounds]
    ratios = [ours / theirs for ours, theirs in zip(measured, reference, strict=True)]
    return Result(figure, statistics.median(measured), statistics.median(reference), statistics.median(ratios), ratios)


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The medians of one run's samples, number by number. Raises: ValueError, without samples."""
    if not samples:
        raise ValueError("no samples")

    def median(pick: Callable[[Sample], float]) -> float:
        return statistics.median(map(pick, samples))

    def median_wait(pick: Callable[[Sample], float | None]) -> float | None:
        waits = [wait for sample in samples if (wait := pick(sample)) is not None]
        return statistics.median(waits) if waits else None

    def medians(pick: Callable[[Sample], Mapping[str, float]]) -> dict[str, float]:
        return {name: statistics.median(pick(sample)[name] for sample in samples) for name in pick(samples[0])}

    return Sample(
        units=round(median(lambda sample: sample.units)),
        wall_s=median(lambda sample: sample.wall_s),
        p50_ms=median_wait(lambda sample: sample.p50_ms),
        p99_ms=median_wait(lambda sample: sample.p99_ms),
        cpu_us=medians(lambda sample: sample.cpu_us),
        driver_cpu_us=median(lambda sample: sample.driver_cpu_us),
        stores_cpu_us=medians(lambda sample: sample.stores_cpu_us),
        memory_kib=medians(lambda sample: sample.memory_kib),
    )
