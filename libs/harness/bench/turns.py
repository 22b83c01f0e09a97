"""The rows of the turn bench: how soon an entry is accepted and its turn starts, and how many are answered a second."""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

from harness.bench import task_queues, turn_load
from harness.bench.figures import Figure, Sample
from harness.bench.ground import LOAD_WITHIN_S, Ground, Load, Peer
from harness.bench.peers import has_said, running
from harness.bench.runs import Run, cpu, of, p50, p99, rate
from harness.runner import Process
from harness.stack import Stack
from towline.client import Client
from towline.wire.threads import AgentPut

AGENT = "bench-echo"
# An earlier system's, on another machine: a constant, not measured beside ours.
EARLIER_HOP_MS = 500.0
# What the product promises of an entry: "201 within milliseconds".
ACCEPTED_WITHIN_MS = 50.0

RUNS = (
    Run("absurd's own worker, 1 turn", "absurd", Load(40, 1, seconds=8), Load(4, 1), "turn"),
    Run("towline, 1 turn", "towline turns", Load(400, 1), Load(20, 1), "turn"),
    Run("absurd's own worker, 1 turn, spaced", "absurd, spaced", Load(40, 1, seconds=8), Load(4, 1), "turn"),
    Run("NOTIFY alone", "notify", Load(500, 1), Load(20, 1), "turn"),
    Run("absurd's own worker, 32 turns", "absurd", Load(2000, 32), Load(100, 32), "turn"),
    Run("towline, 32 turns", "towline turns", Load(3000, 32), Load(100, 32), "turn"),
    Run("towline, 4 entries", "towline entries", Load(400, 4), Load(20, 4), "entry"),
)
_ABSURD_1, _OURS_1, _SPACED, _NOTIFY, _ABSURD_32, _OURS_32, _ENTRIES = (run.name for run in RUNS)

# By the word that chooses it on the command line.
ROWS: dict[str, Sequence[Figure]] = {
    "turn-hop": (
        Figure(
            "turn hop, commit → started, 1 at a time: p50",
            (_OURS_1, _SPACED),
            "ms",
            of(_OURS_1, p50),
            "Absurd's own worker",
            of(_SPACED, p50),
            goal=5,
            then=2.5,
            bounds="value",
        ),
        Figure(
            "the same: p99",
            (_OURS_1,),
            "ms",
            of(_OURS_1, p99),
            "an earlier system (constant)",
            lambda _: EARLIER_HOP_MS,
            goal=25,
            bounds="value",
        ),
        Figure(
            "the same: p50",
            (_OURS_1, _NOTIFY),
            "ms",
            of(_OURS_1, p50),
            "NOTIFY alone",
            of(_NOTIFY, p50),
        ),
    ),
    "turns": (
        Figure(
            "turns, 1 at a time: turns per second",
            (_OURS_1, _ABSURD_1),
            "/s",
            of(_OURS_1, rate),
            "Absurd's own worker",
            of(_ABSURD_1, rate),
            better="higher",
        ),
        Figure(
            "turns, 32 at once: turns per second",
            (_OURS_32, _ABSURD_32),
            "/s",
            of(_OURS_32, rate),
            "Absurd's own worker",
            of(_ABSURD_32, rate),
            better="higher",
        ),
        Figure(
            "the same: CPU per turn",
            (_OURS_32, _ABSURD_32),
            "µs",
            of(_OURS_32, cpu),
            "Absurd's own worker",
            of(_ABSURD_32, cpu),
        ),
        Figure(
            "the same: hop, p50",
            (_OURS_32, _ABSURD_32),
            "ms",
            of(_OURS_32, p50),
            "Absurd's own worker",
            of(_ABSURD_32, p50),
        ),
        Figure(
            "entries, 4 at once: asked → 201, p99",
            (_ENTRIES,),
            "ms",
            of(_ENTRIES, p99),
            "the promise",
            lambda _: ACCEPTED_WITHIN_MS,
            goal=1,
        ),
    ),
}


class OurTurns:
    """This product: a gateway, a worker, and an agent that gives back what it is told. `waits`: which are reported."""

    def __init__(self, ground: Ground, stack: Stack, waits: Literal["hop", "accept"]) -> None:
        self._ground = ground
        self._stack = stack
        self._waits = waits

    async def run(self, load: Load) -> Sample:
        """Put it under a load. Raises: BenchFailed."""
        gateway, worker = self._stack.gateways[0], self._stack.workers[0]
        plan = turn_load.Plan(_loop(load), gateway.port, self._stack.api_key, AGENT, self._waits)
        pids = {service.name: service.pid for service in (gateway, worker)}
        return await self._ground.measure(["harness.bench.turn_load"], plan, pids=pids)


class Absurd:
    """Absurd's own worker; the client counts as Absurd's, as spawning is half of its work. `role`: of the driver."""

    def __init__(self, ground: Ground, worker: Process, role: str) -> None:
        self._ground = ground
        self._worker = worker
        self._role = role
        worker.freeze()

    async def run(self, load: Load) -> Sample:
        """Put it under a load; it is frozen otherwise, for it polls. Raises: BenchFailed."""
        self._worker.thaw()
        try:
            words = ["harness.bench.peers_absurd", self._role]
            sample = await self._ground.measure(words, _loop(load), pids={"worker": self._worker.pid})
        finally:
            self._worker.freeze()
        return dataclasses.replace(sample, cpu_us={"client": sample.driver_cpu_us, **sample.cpu_us}, driver_cpu_us=0.0)


class Notify:
    """A commit that wakes a connection, and nothing else."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def run(self, load: Load) -> Sample:
        """Wake it one at a time. Raises: BenchFailed."""
        words = ["harness.bench.peers_absurd", "notify"]
        sample = await self._ground.measure(words, _loop(load), pids={})
        return dataclasses.replace(sample, cpu_us={"both ends": sample.driver_cpu_us}, driver_cpu_us=0.0)


def _loop(load: Load) -> task_queues.Plan:
    return task_queues.Plan(load.jobs, load.in_flight, load.seconds, LOAD_WITHIN_S)


async def open_peers(
    ground: Ground, stack: Stack, wanted: AbstractSet[str], cleanup: AsyncExitStack
) -> dict[str, Peer[Load]]:
    """Start those of the turn systems that are wanted, until `cleanup` is closed. Raises: ProcessFailed."""
    peers: dict[str, Peer[Load]] = {}
    if wanted & {"towline turns", "towline entries"}:
        if not stack.gateways:
            await stack.add_gateway()
        if not stack.workers:
            await stack.add_worker()
        async with Client(stack.gateways[0].url, stack.api_key) as client:
            await client.put_agent(AGENT, AgentPut("echo"))
        peers["towline turns"] = OurTurns(ground, stack, "hop")
        peers["towline entries"] = OurTurns(ground, stack, "accept")
    if wanted & {"absurd", "absurd, spaced"}:
        worker = await cleanup.enter_async_context(_running_absurd(ground))
        peers["absurd"] = Absurd(ground, worker, "drive")
        peers["absurd, spaced"] = Absurd(ground, worker, "drive-spaced")
    if "notify" in wanted:
        peers["notify"] = Notify(ground)
    return peers


@asynccontextmanager
async def _running_absurd(ground: Ground) -> AsyncIterator[Process]:
    worker = ground.process("absurd-worker", "harness.bench.peers_absurd", "work")
    async with running(worker, is_ready=has_said(worker, task_queues.READY)):
        yield worker
