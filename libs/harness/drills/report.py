"""What a drill found: expected against measured, and how long each recovery took (PURE but for printing nothing).

Used by:  the scene fills a `Report`; the command line and the tests read it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Check(NamedTuple):
    """One expectation."""

    what: str
    expected: str
    measured: str
    is_met: bool


class Recovery(NamedTuple):
    """How long after a cut the installation had made it good. `label` tells a drill's cuts apart."""

    label: str
    seconds: float


@dataclass(slots=True)
class Report:
    """One run of one drill."""

    drill: str
    checks: list[Check] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def violations(self) -> list[Check]:
        """What was not as promised."""
        return [check for check in self.checks if not check.is_met]

    def as_json(self) -> dict[str, Any]:
        """The whole report in plain values."""
        return {
            "drill": self.drill,
            "violated": bool(self.violations),
            "took_s": round(self.took_s, 3),
            "checks": [check._asdict() for check in self.checks],
            "recoveries": [{"label": label, "seconds": round(seconds, 3)} for label, seconds in self.recoveries],
        }


class Summary(NamedTuple):
    """All runs of one drill and kind of cut; times in seconds, None where nothing recovered."""

    drill: str
    label: str
    runs: int
    violations: int
    p50_s: float | None
    p95_s: float | None
    worst_s: float | None


def summarise(reports: Iterable[Report]) -> list[Summary]:
    """One row for each drill and kind of cut, in the order in which they were first played."""
    by_drill: dict[str, list[Report]] = {}
    for report in reports:
        by_drill.setdefault(report.drill, []).append(report)
    rows = []
    for drill, runs in by_drill.items():
        violations = sum(len(run.violations) for run in runs)
        seconds: dict[str, list[float]] = {}
        for run in runs:
            for label, taken_s in run.recoveries:
                seconds.setdefault(label, []).append(taken_s)
        for label, taken in (seconds or {"": []}).items():
            quantiles = [percentile(taken, share) for share in (0.5, 0.95, 1.0)]
            rows.append(Summary(drill, label, len(runs), violations, *quantiles))
    return rows


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is not exceeded by `share` of them (nearest rank); None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
