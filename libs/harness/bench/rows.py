"""All rows of the bench, and the systems that they need."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from harness.bench import events, jobs, recovery, turns
from harness.bench.figures import Figure
from harness.bench.ground import Ground, Peer
from harness.bench.ours import open_stack
from harness.bench.runs import Run

# By the word that chooses it on the command line.
ROWS: Mapping[str, Sequence[Figure]] = {**jobs.ROWS, **events.ROWS, **turns.ROWS, **recovery.ROWS}
# In the order of a round.
RUNS: Sequence[Run] = (*jobs.RUNS, *events.RUNS, *turns.RUNS, *recovery.RUNS)


def runs_for(figures: Iterable[Figure]) -> list[Run]:
    """The runs that some figures need, each once, in the order of a round."""
    needed = {name for figure in figures for name in figure.runs}
    return [run for run in RUNS if run.name in needed]


def unavailable() -> dict[str, str]:
    """Peers that this machine does not have, and why; what needs them is left out, and said to be."""
    return events.unavailable()


@asynccontextmanager
async def open_peers(ground: Ground, names: Iterable[str]) -> AsyncIterator[dict[str, Peer[Any]]]:
    """Start the systems of these names, and what they need, and stop them at the end. Raises: ProcessFailed."""
    wanted = set(names)
    async with AsyncExitStack() as cleanup:
        # No service runs in it before somebody wants one.
        stack = await cleanup.enter_async_context(open_stack(ground))
        peers: dict[str, Peer[Any]] = {
            **await jobs.open_peers(ground, stack, wanted, cleanup),
            **await events.open_peers(ground, stack, wanted, cleanup),
            **await turns.open_peers(ground, stack, wanted, cleanup),
        }
        if "drills" in wanted:
            peers["drills"] = await cleanup.enter_async_context(recovery.open_drills(ground))
        yield peers
