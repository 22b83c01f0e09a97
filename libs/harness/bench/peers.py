"""The peers: simpler systems that take the same jobs, each in processes of its own."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from harness.bench import bare_hop, naive_hub
from harness.bench.figures import Sample
from harness.bench.ground import LOAD_WITHIN_S, Ground, Load
from harness.bench.load import Plan
from harness.ports import free_port
from harness.runner import Process

READY_WITHIN_S = 30.0
# Enough that one user's order of jobs is not what limits the rate, few enough to be one process.
USERS = tuple(f"user-{number}" for number in range(1, 17))


def plan_of_jobs(
    load: Load, ports: Sequence[int], users: Sequence[str], *, headers: Sequence[str] = (), key_prefix: str = ""
) -> Plan:
    """Jobs for a system that takes them as this product does. One in flight: they are all the first user's."""
    return Plan(
        ports=ports,
        method="POST",
        paths=[f"/v1/users/{user}/jobs" for user in (users if load.in_flight > 1 else users[:1])],
        headers=["Content-Type: application/json", *headers],
        body=f'{{"name":"{load.tool}","args":{{"value":"hello"}}}}',
        key_prefix=key_prefix,
        in_flight=load.in_flight,
        requests=load.jobs,
        seconds=load.seconds,
        within_s=LOAD_WITHIN_S,
        expects='"state":"completed"',
    )


class NaiveHub:
    """`naive_hub`: one process that remembers nothing, and one with the laptops of all users."""

    def __init__(self, ground: Ground, port: int, hub: Process, laptops: Process) -> None:
        self._ground = ground
        self._port = port
        self._pids = {"hub": hub.pid, "laptops": laptops.pid}

    async def run(self, load: Load) -> Sample:
        """Put it under a load. Raises: BenchFailed."""
        return await self._ground.measure_http(plan_of_jobs(load, [self._port], USERS), self._pids)


@asynccontextmanager
async def open_naive_hub(ground: Ground) -> AsyncIterator[NaiveHub]:
    """Run the naive hub until the block ends. Raises: ProcessFailed."""
    port = free_port()
    hub = ground.process("naive-hub", "harness.bench.naive_hub", "hub", str(port))
    laptops = ground.process("naive-laptops", "harness.bench.naive_hub", "laptop", str(port), *USERS)
    async with (
        running(hub, is_ready=has_said(hub, naive_hub.HUB_READY)),
        running(laptops, is_ready=has_said(laptops, naive_hub.LAPTOPS_READY)),
    ):
        yield NaiveHub(ground, port, hub, laptops)


class BareHop:
    """`bare_hop`: two processes and the stores; its driver is one of the two."""

    def __init__(self, ground: Ground, far: Process) -> None:
        self._ground = ground
        self._pids = {"far": far.pid}

    async def run(self, load: Load) -> Sample:
        """Put it under a load, one in flight. Raises: BenchFailed."""
        if load.in_flight != 1:
            raise ValueError("the bare hop carries one job at a time")
        plan = bare_hop.Plan(load.jobs, load.seconds, LOAD_WITHIN_S)
        sample = await self._ground.measure(["harness.bench.bare_hop", "near"], plan, pids=self._pids)
        return dataclasses.replace(sample, cpu_us={"near": sample.driver_cpu_us, **sample.cpu_us}, driver_cpu_us=0.0)


@asynccontextmanager
async def open_bare_hop(ground: Ground) -> AsyncIterator[BareHop]:
    """Run the far end of the bare hop until the block ends. Raises: ProcessFailed."""
    far = ground.process("bare-hop-far", "harness.bench.bare_hop", "far")
    async with running(far, is_ready=has_said(far, bare_hop.FAR_READY)):
        yield BareHop(ground, far)


@asynccontextmanager
async def running(process: Process, *, is_ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Run a process until the block ends, which begins when it is ready. Raises: ProcessFailed."""

    async def probe() -> bool:
        return is_ready()

    await process.start()
    try:
        await process.wait_ready(probe, within_s=READY_WITHIN_S)
        yield
    finally:
        await process.stop()


def has_said(process: Process, line: str) -> Callable[[], bool]:
    """Whether a process has written this since its last start."""
    return lambda: line in process.read_log()
