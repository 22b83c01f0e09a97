"""The ground that all measured systems share: stores, directory, drivers, and the account of who used the cores.

Promises: CPU is read around the load alone; a driver that fails ends the bench, with its reason; nothing secret stays
          in a file.
"""

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from harness.bench.cpu import cpu_seconds, used_us
from harness.bench.figures import Sample, percentile
from harness.bench.load import Measured, Plan
from harness.bench.observed import Observed, Watched
from harness.runner import Process
from harness.servers import Servers
from harness.stack import inherited_environment

# Past this something hangs: a bench as a whole takes less.
LOAD_WITHIN_S = 120.0
DRIVER_START_S = 30.0


class BenchFailed(Exception):
    """Something did not answer as it should, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Load:
    """One closed loop: so many jobs at most, so many of them at a time, for so many seconds at most."""

    jobs: int
    in_flight: int
    tool: str = "echo"
    seconds: float = 4.0


LoadT_contra = TypeVar("LoadT_contra", contravariant=True)


class Peer(Protocol[LoadT_contra]):
    """A system, and the kind of load that it takes. Another comparison is another one of these."""

    async def run(self, load: LoadT_contra) -> Sample:
        """Put it under a load. Raises: BenchFailed."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all peers stand on.

    Attributes:
        directory: for logs, plans and results.
        servers: the stores.
        store_pids: of the stores, where they are ours to look into.
    """

    directory: Path
    servers: Servers
    store_pids: Mapping[str, int] = field(default_factory=dict)

    def process(self, name: str, *words: str, python: str = sys.executable) -> Process:
        """Describe `python -m WORDS...`, with the stores' URLs in its environment."""
        env = inherited_environment()
        env |= {"DATABASE_URL": self.servers.postgres_url, "REDIS_URL": self.servers.redis_url}
        return Process(name, [python, "-m", *words], directory=self.directory, env=env)

    def write_plan(self, name: str, plan: Any) -> Path:
        """Write a plan as JSON that nobody else can read: it may hold a credential. Who reads it removes it."""
        path = self.directory / f"{name}.json"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(plan))
        return path

    async def measure(
        self, words: Sequence[str], plan: Any, *, pids: Mapping[str, int], python: str = sys.executable
    ) -> Sample:
        """Run a driver that writes `Measured`, and account what is used around it.

        Args:
            words, plan, python: see `drive`.
            pids: whom to account, by name.

        Raises:
            BenchFailed: the driver failed.
        """
        before, stores_before = cpu_seconds(pids), cpu_seconds(self.store_pids)
        result = await self.drive(words, plan, python=python)
        after, stores_after = cpu_seconds(pids), cpu_seconds(self.store_pids)
        measured = msgspec.json.decode(result, type=Measured)
        jobs = len(measured.latencies_ms)
        return Sample(
            units=jobs,
            wall_s=measured.wall_s,
            p50_ms=percentile(measured.latencies_ms, 50),
            p99_ms=percentile(measured.latencies_ms, 99),
            cpu_us=used_us(before, after, jobs),
            driver_cpu_us=measured.cpu_s / jobs * 1e6,
            stores_cpu_us=used_us(stores_before, stores_after, jobs),
        )

    async def drive(
        self,
        words: Sequence[str],
        plan: Any,
        *,
        python: str = sys.executable,
        at_start: Callable[[Process], Awaitable[None]] | None = None,
    ) -> bytes:
        """Run a driver: a program that takes a plan's and a result's path; return what it wrote to the latter.

        Args:
            words: module and first arguments of the driver.
            python: what runs the driver, where it needs another environment.
            at_start: what is to be done once it runs, before its end is waited for.

        Raises:
            BenchFailed: the driver failed.
        """
        plan_path, result_path = self.write_plan("plan", plan), self.directory / "measured.json"
        driver = self.process("driver", *words, str(plan_path), str(result_path), python=python)
        await driver.start()
        try:
            if at_start:
                await at_start(driver)
            code = await driver.wait(within_s=LOAD_WITHIN_S + DRIVER_START_S)
        finally:
            await driver.stop()
            plan_path.unlink()
        if code:
            raise BenchFailed(f"{' '.join(words)} ended with {code}: {driver.read_log()[-4000:]}")
        return result_path.read_bytes()

    def watched(self, pids: Mapping[str, int]) -> Watched:
        """Name these processes, and the stores, to a driver that keeps the account itself."""
        return Watched(pids, self.store_pids)

    async def measure_http(self, plan: Plan, pids: Mapping[str, int]) -> Sample:
        """Put a system under a load over HTTP. Raises: BenchFailed."""
        return await self.measure(["harness.bench.load"], plan, pids=pids)


def sample_of(observed: Observed) -> Sample:
    """Divide what a driver has observed by its units."""
    units, waits = observed.units, observed.waits_ms

    def per_unit(values: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
        return {name: value / units * factor for name, value in values.items()}

    return Sample(
        units=units,
        wall_s=observed.wall_s,
        p50_ms=percentile(waits, 50) if waits else None,
        p99_ms=percentile(waits, 99) if waits else None,
        cpu_us=per_unit(observed.system_cpu_s, 1e6),
        driver_cpu_us=observed.driver_cpu_s / units * 1e6,
        stores_cpu_us=per_unit(observed.stores_cpu_s, 1e6),
        memory_kib=per_unit(observed.memory_kib),
    )
