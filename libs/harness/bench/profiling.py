"""Where the time of one process goes: the load of 64 in flight, with that process under cProfile.

The profiler makes calls of Python functions dearer than they are; trust the order, not the shares.
"""

import asyncio
import io
import pstats
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from harness.bench.ground import Load
from harness.bench.ours import Towline, are_connected, describe_sidecars, open_stack
from harness.bench.peers import USERS, running
from harness.bench.rounds import open_ground
from harness.runner import Process

LOAD = Load(jobs=10_000, in_flight=64, seconds=60)
FUNCTIONS = 25


class Profiled(StrEnum):
    """The processes that can be looked into."""

    gateway = "gateway"
    worker = "worker"
    sidecar = "sidecar"


async def run_profile(console: Console, directory: Path, results: Path, profiled: Profiled) -> None:
    """Print the functions that took the most time of their own, and leave the whole profile in `results`.

    Raises:
        BenchFailed: a wrong answer.
        DirectoryBusy, ProcessFailed, ServerMissing: something did not start.
    """
    results.mkdir(exist_ok=True)
    path = results.absolute() / f"jobs-{profiled}.pstats"
    console.print(f"{LOAD.jobs} jobs, {LOAD.in_flight} in flight, with the {profiled} under cProfile")
    async with open_ground(directory) as ground, open_stack(ground) as stack:
        gateway, worker = await asyncio.gather(stack.add_gateway(), stack.add_worker())
        for service in (gateway, worker):
            if service.name.startswith(profiled):
                await service.stop()
                _put_under_profiler(service, path)
                await service.start_ready()
        sidecars = await describe_sidecars(ground, stack, "sidecars", USERS, [worker])
        if profiled is Profiled.sidecar:
            _put_under_profiler(sidecars, path)
        async with running(sidecars, is_ready=are_connected(sidecars, len(USERS))):
            towline = Towline(
                ground, stack.api_key, gateways=[gateway], workers=[worker], sidecars=sidecars, users=USERS
            )
            sample = await towline.run(LOAD)
        # The profile is written at the end of the process.
        await gateway.stop()
        await worker.stop()
    text = io.StringIO()
    pstats.Stats(str(path), stream=text).strip_dirs().sort_stats("tottime").print_stats(FUNCTIONS)
    console.print(text.getvalue(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{sample.rate:.0f} jobs/s under the profiler; {path}", highlight=False)


def _put_under_profiler(process: Process, path: Path) -> None:
    """Change what its next start runs: `python -m cProfile -o PATH -m MODULE...`."""
    process.argv[1:1] = ["-m", "cProfile", "-o", str(path)]
