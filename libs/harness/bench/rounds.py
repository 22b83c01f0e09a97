"""The bench from start to end: its ground, its rounds, its report.

Used by: harness.commands, which gives it a terminal.
"""

import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.bench.cpu import store_pids
from harness.bench.figures import Figure, Round, Sample, median_sample, result_of
from harness.bench.ground import Ground, Peer
from harness.bench.report import write_json, write_plot
from harness.bench.rows import ROWS, open_peers, runs_for, unavailable
from harness.bench.runs import Run, as_quick
from harness.bench.table import figures_table, runs_table
from harness.runner import hold_directory
from harness.servers import open_servers

ROUNDS = 5
QUICK_ROUNDS = 2


@asynccontextmanager
async def open_ground(directory: Path) -> AsyncIterator[Ground]:
    """Stores in `directory`, on the disk that it is on: fsync is to cost what it costs there.

    After a success everything is removed, so that the next bench begins with empty tables; after a failure it can be
    looked into.

    Raises:
        DirectoryBusy: another bench is running.
        ProcessFailed, ServerMissing: a store did not start.
    """
    with hold_directory(directory):
        async with open_servers(directory / "stores") as servers:
            yield Ground(directory, servers, store_pids(directory / "stores"))
        for used in directory.iterdir():
            if used.is_dir():
                shutil.rmtree(used)


async def run_bench(console: Console, directory: Path, results: Path, rows: Sequence[str], *, quick: bool) -> None:
    """Measure the rows, show them, and leave JSON and a plot in `results`.

    Raises:
        BenchFailed: something answered wrongly, or not at all.
        DirectoryBusy, ProcessFailed, ServerMissing: something did not start.
    """
    figures, left_out = measurable([figure for row in rows for figure in ROWS[row]])
    runs = runs_for(figures)
    if quick:
        runs = as_quick(runs)
    began = time.monotonic()
    console.print("starting the stores, the peers, and ours")
    async with open_ground(directory) as ground, open_peers(ground, {run.peer for run in runs}) as peers:
        rounds = await _run_rounds(console, runs, peers, QUICK_ROUNDS if quick else ROUNDS)
    outcome = [result_of(figure, rounds) for figure in figures]
    samples = {run.name: median_sample([each[run.name] for each in rounds]) for run in runs}
    results.mkdir(exist_ok=True)
    name = f"bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    write_json(results / f"{name}.json", outcome, rounds)
    for unit in dict.fromkeys(run.unit for run in runs):
        of_unit = {run.name: samples[run.name] for run in runs if run.unit == unit}
        console.print(runs_table(of_unit, unit))
        write_plot(results / f"{name}-{unit}.png", of_unit, unit)
    console.print(figures_table(outcome, left_out))
    console.print(f"{results / name}.json and .png; {time.monotonic() - began:.0f} s in all", highlight=False)
    if quick:
        console.print("quick: too few jobs for figures that mean something")


def measurable(figures: Sequence[Figure]) -> tuple[list[Figure], list[tuple[Figure, str]]]:
    """Part the figures into those whose systems this machine has, and the others, with the reason."""
    missing = unavailable()
    has, left_out = [], []
    for figure in figures:
        reasons = [missing[run.peer] for run in runs_for([figure]) if run.peer in missing]
        if reasons:
            left_out.append((figure, reasons[0]))
        else:
            has.append(figure)
    return has, left_out


async def _run_rounds(
    console: Console, runs: Sequence[Run], peers: Mapping[str, Peer[Any]], count: int
) -> Sequence[Round]:
    with console.status("warming up") as status:

        async def play(title: str, runs: Sequence[Run]) -> Round:
            samples: dict[str, Sample] = {}
            for run in runs:
                status.update(f"{title}: {run.name}")
                samples[run.name] = await peers[run.peer].run(run.load)
            return samples

        # The first jobs pay for imports, prepared statements and empty caches.
        await play("warming up", as_quick(runs))
        rounds = []
        for number in range(1, count + 1):
            began = time.monotonic()
            rounds.append(await play(f"round {number} of {count}", runs))
            console.print(f"round {number} of {count} took {time.monotonic() - began:.1f} s", highlight=False)
    return rounds
