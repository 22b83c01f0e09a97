"""CPU time of processes, as the operating system accounts it.

On Linux it is counted in steps of 10 ms: a measurement should use a second or more of it.
"""

from collections.abc import Mapping
from pathlib import Path

import psutil


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """User and system time that each process has used since it began, with its descendants, also ended ones.

    Raises:
        psutil.NoSuchProcess: one has ended.
    """
    return {name: _tree_seconds(psutil.Process(pid)) for name, pid in pids.items()}


def used_us(before: Mapping[str, float], after: Mapping[str, float], jobs: int) -> dict[str, float]:
    """Microseconds per job between two readings of the same processes."""
    return {name: (after[name] - before[name]) / jobs * 1e6 for name in before}


def store_pids(directory: Path) -> dict[str, int]:
    """The embedded stores that run in a state directory, by name; those named by the environment are not there."""
    return {path.stem: int(path.read_text().split()[0]) for path in sorted(directory.glob("*.pid"))}


def _tree_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    # Linux: what children that have ended had used, such as the backends of closed connections.
    ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    alive = sum(_own_seconds(child) for child in process.children(recursive=True))
    return float(times.user + times.system + ended + alive)


def _own_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # by now among the ended ones
    return float(times.user + times.system)
