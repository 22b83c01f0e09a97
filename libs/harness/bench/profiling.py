"""Where the time of one process goes: a long load, with that process under cProfile.

The profiler makes calls of Python functions dearer than they are; trust the order, not the shares.
"""

import asyncio
import io
import pstats
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from harness.bench.figures import Sample
from harness.bench.ground import Ground, Load
from harness.bench.ours import Towline, are_connected, describe_sidecars, open_stack
from harness.bench.ours_events import OurRelay, OurStreams, Runs
from harness.bench.peers import USERS, running
from harness.bench.relays import Ingest, IngestPeer
from harness.bench.rounds import open_ground
from harness.bench.streams import FanOut, FanOutPeer
from harness.runner import Process
from harness.stack import Service, Stack

JOBS = Load(jobs=10_000, in_flight=64, seconds=60)
INGEST = Ingest(events=200_000)
FAN_OUT = FanOut(events=100, per_s=10)
FUNCTIONS = 25


class Profiled(StrEnum):
    """The processes that can be looked into; `streams` is the gateway, too, under clients of a stream."""

    gateway = "gateway"
    worker = "worker"
    sidecar = "sidecar"
    relay = "relay"
    streams = "streams"


async def run_profile(console: Console, directory: Path, results: Path, profiled: Profiled) -> None:
    """Print the functions that took the most time of their own, and leave the whole profile in `results`.

    Raises:
        BenchFailed: a wrong answer.
        DirectoryBusy, ProcessFailed, ServerMissing: something did not start.
    """
    results.mkdir(exist_ok=True)
    path = results.absolute() / f"{profiled}.pstats"
    console.print(f"a long load, with the {profiled} under cProfile", highlight=False)
    async with open_ground(directory) as ground, open_stack(ground) as stack:
        measure = _measure_events if profiled in (Profiled.relay, Profiled.streams) else _measure_jobs
        sample = await measure(ground, stack, profiled, path)
    text = io.StringIO()
    pstats.Stats(str(path), stream=text).strip_dirs().sort_stats("tottime").print_stats(FUNCTIONS)
    console.print(text.getvalue(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{sample.rate:.0f} a second under the profiler; {path}", highlight=False)


async def _measure_jobs(ground: Ground, stack: Stack, profiled: Profiled, path: Path) -> Sample:
    gateway, worker = await asyncio.gather(stack.add_gateway(), stack.add_worker())
    for service in (gateway, worker):
        if service.name.startswith(profiled):
            await _restart_under_profiler(service, path)
    sidecars = await describe_sidecars(ground, stack, "sidecars", USERS, [worker])
    if profiled is Profiled.sidecar:
        _put_under_profiler(sidecars, path)
    async with running(sidecars, is_ready=are_connected(sidecars, len(USERS))):
        towline = Towline(ground, stack.api_key, gateways=[gateway], workers=[worker], sidecars=sidecars, users=USERS)
        sample = await towline.run(JOBS)
    await _end(gateway, worker)
    return sample


async def _measure_events(ground: Ground, stack: Stack, profiled: Profiled, path: Path) -> Sample:
    gateway, relay = await asyncio.gather(stack.add_gateway(), stack.add_relay())
    runs = Runs(stack, gateway)
    if profiled is Profiled.relay:
        await _restart_under_profiler(relay, path)
        sample = await IngestPeer(ground, OurRelay(runs, relay)).run(INGEST)
    else:
        await _restart_under_profiler(gateway, path)
        sample = await FanOutPeer(ground, OurStreams(runs, gateway, relay)).run(FAN_OUT)
    await _end(gateway, relay)
    return sample


async def _end(*services: Service) -> None:
    """Stop them: a profile is written at the end of its process."""
    for service in services:
        await service.stop()


async def _restart_under_profiler(service: Service, path: Path) -> None:
    await service.stop()
    _put_under_profiler(service, path)
    await service.start_ready()


def _put_under_profiler(process: Process, path: Path) -> None:
    """Change what its next start runs: `python -m cProfile -o PATH -m MODULE...`."""
    process.argv[1:1] = ["-m", "cProfile", "-o", str(path)]
