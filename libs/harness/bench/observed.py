"""What a driver of the event rows has seen: the account of one measurement, taken by the driver itself.

In the job rows the clocks of the processes are read around the driver. Here the driver reads them, because only it
knows when what is measured begins: after everybody has connected, when the first event leaves.
"""

import os
import time
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from harness.bench.cpu import cpu_seconds


class Watched(msgspec.Struct, frozen=True):
    """The processes that are accounted, by name: the system's, and the stores'."""

    system: Mapping[str, int]
    stores: Mapping[str, int]


class Observed(msgspec.Struct, frozen=True):
    """One measurement.

    Attributes:
        units: events stored, deliveries made, or clients connected.
        wall_s: from the first to the last of them.
        system_cpu_s, stores_cpu_s: used meanwhile, by process.
        driver_cpu_s: of the driver and its children.
        waits_ms: of some units, how long each took; may be empty.
        memory_kib: by how much each of the system's processes has grown, where that was what was looked at.
    """

    units: int
    wall_s: float
    system_cpu_s: Mapping[str, float]
    stores_cpu_s: Mapping[str, float]
    driver_cpu_s: float
    waits_ms: Sequence[float] = ()
    memory_kib: Mapping[str, float] = {}


class Account:
    """Runs from the moment it is made until it is closed."""

    def __init__(self, watched: Watched) -> None:
        """Read all clocks. Raises: psutil.NoSuchProcess."""
        self._watched = watched
        self._system = cpu_seconds(watched.system)
        self._stores = cpu_seconds(watched.stores)
        self._driver = _own_cpu_s()
        self._began = time.perf_counter()

    def close(
        self, units: int, waits_ms: Sequence[float] = (), memory_kib: Mapping[str, float] | None = None
    ) -> Observed:
        """Read them again. Raises: psutil.NoSuchProcess."""
        wall_s, driver_cpu_s = time.perf_counter() - self._began, _own_cpu_s() - self._driver
        system, stores = cpu_seconds(self._watched.system), cpu_seconds(self._watched.stores)
        return Observed(
            units,
            wall_s,
            {name: system[name] - before for name, before in self._system.items()},
            {name: stores[name] - before for name, before in self._stores.items()},
            driver_cpu_s,
            waits_ms,
            memory_kib or {},
        )


def memory_kib(pids: Mapping[str, int]) -> dict[str, float]:
    """Resident memory of each process and its descendants, KiB. Raises: psutil.NoSuchProcess."""
    return {name: _tree_kib(psutil.Process(pid)) for name, pid in pids.items()}


def _tree_kib(process: psutil.Process) -> float:
    return sum(float(each.memory_info().rss) for each in (process, *process.children(recursive=True))) / 1024


def _own_cpu_s() -> float:
    return cpu_seconds({"driver": os.getpid()})["driver"]
