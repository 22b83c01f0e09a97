"""Metrics that more than one service has; each service's own stand in its `metrics.py`.

Promises: every series whose labels come from a closed set exists from the start, at zero, so that a rate over its
first event is not lost; no label carries an id of a user, job, run or replica.
"""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from towline.wire.api import TERMINAL_STATES
from towline.wire.threads import TURN_TERMINAL_STATES

# From a warm store's round trip (2 ms) to the longest a caller may wait (300 s) or a tool run (600 s): doublings at
# first, where the promises are made, wider where only the order of magnitude matters.
DURATION_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

# Half a beat of 50 ms is invisible; from 1 s on leases and probes are at stake.
LOOP_LAG_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15)

DEPENDENCIES = ("redis", "postgres")

M = TypeVar("M", Counter, Gauge, Histogram)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own numbers (CPU, memory, file descriptors, garbage collector)."""
    # One time stamp beside each counter doubles the text and nobody reads them.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class ProcessMetrics:
    """What every process says of itself. `revision`: of the source, as far as the settings know it."""

    def __init__(self, registry: CollectorRegistry, *, service: str, revision: str) -> None:
        labels = ["service", "version", "revision", "python"]
        info = Gauge("towline_build_info", "What runs here; always 1.", labels, registry=registry)
        info.labels(service, package_version(), revision, platform.python_version()).set(1)
        self.dependency_up = children(
            Gauge(
                "towline_dependency_up", "Whether the store answers (1) or not (0).", ["dependency"], registry=registry
            ),
            DEPENDENCIES,
        )
        self.loop_lag = Histogram(
            "towline_loop_lag_seconds",
            "How late a timer of the event loop fired.",
            buckets=LOOP_LAG_BUCKETS_S,
            registry=registry,
        )


def jobs_total(registry: CollectorRegistry) -> dict[str, Counter]:
    """The counter of ended jobs, by outcome.

    Counted by whoever won the guarded write of the terminal state (a worker, its sweeper, or a gateway that cancelled
    a queued job), so that the sum over all replicas is the number of jobs that ended.
    """
    return children(
        Counter("towline_jobs_total", "Jobs that ended.", ["outcome"], registry=registry), sorted(TERMINAL_STATES)
    )


def turns_total(registry: CollectorRegistry) -> dict[str, Counter]:
    """The counter of ended turns, by outcome; counted as `jobs_total` is."""
    return children(
        Counter("towline_turns_total", "Turns that ended.", ["outcome"], registry=registry),
        sorted(TURN_TERMINAL_STATES),
    )


def children(metric: M, values: Sequence[str]) -> dict[str, M]:
    """The children of a metric with one label, by its value; making them once is what makes them cheap."""
    return {value: metric.labels(value) for value in values}


def package_version() -> str:
    """The version of the services that run here, as `towline_build_info` and the OpenAPI document tell it."""
    try:
        return version("towline-services")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
