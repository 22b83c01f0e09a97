"""This product under load: gateways, workers and sidecars as they are shipped, on the same stores as the peers.

One installation, two shapes: the small one (a gateway, a worker) and the wide one (two of each), with sidecars of its
own, so that their rounds can alternate. What a shape does not use is idle, and not accounted to it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

from harness.bench.figures import Sample
from harness.bench.ground import LOAD_WITHIN_S, BenchFailed, Ground, Load
from harness.bench.load import Plan
from harness.bench.peers import USERS, plan_of_jobs, running
from harness.bench.sidecars import Laptop
from harness.runner import Process
from harness.stack import Gateway, Stack, Worker
from towline.client import Client

# Far more than any job of a bench takes.
WAIT_S = 60
LONG_JOB_S = 12
BUSY_WITHIN_S = 10.0


class Towline:
    """One shape of the installation, as a peer. `users`: whose sidecars are connected to it."""

    def __init__(
        self,
        ground: Ground,
        api_key: str,
        *,
        gateways: Sequence[Gateway],
        workers: Sequence[Worker],
        sidecars: Process,
        users: Sequence[str],
    ) -> None:
        self.api_key = api_key
        self.gateways = gateways
        self.workers = workers
        self.users = users
        self._ground = ground
        self._sidecars = sidecars

    async def run(self, load: Load) -> Sample:
        """Put it under a load: each job with a key of its own, each waited for. Raises: BenchFailed."""
        headers = [f"Authorization: Bearer {self.api_key}", f"Prefer: wait={WAIT_S}"]
        ports = [gateway.port for gateway in self.gateways]
        plan = plan_of_jobs(load, ports, self.users, headers=headers, key_prefix=f"bench-{uuid4().hex}-")
        return await self.measure(plan)

    async def measure(self, plan: Plan) -> Sample:
        """Carry out a plan, and account the shape's processes. Raises: BenchFailed."""
        pids = {service.name: service.pid for service in (*self.gateways, *self.workers)}
        return await self._ground.measure_http(plan, {**pids, "sidecars": self._sidecars.pid})


class Status:
    """`GET presence?probe=true` against the small shape while a job of 12 s runs on the machine, as a peer."""

    def __init__(self, towline: Towline) -> None:
        self._towline = towline

    async def run(self, load: Load) -> Sample:
        """Probe; `load.jobs` is how many probes. Raises: BenchFailed."""
        towline = self._towline
        user = towline.users[0]
        async with Client(towline.gateways[0].url, towline.api_key) as client:
            job = await client.submit(user, "sleep", {"seconds": LONG_JOB_S}, idempotency_key=f"bench-{uuid4().hex}")
            await _wait_until_busy(client, user, busy=True)
            sample = await towline.measure(self._plan(load, user))
            job = await client.cancel_job(job.job)
            if job.state == "completed":
                raise BenchFailed("the long job had ended before the probes were through")
            await _wait_until_busy(client, user, busy=False)
        return sample

    def _plan(self, load: Load, user: str) -> Plan:
        return Plan(
            ports=[self._towline.gateways[0].port],
            method="GET",
            paths=[f"/v1/users/{user}/presence?probe=true"],
            headers=[f"Authorization: Bearer {self._towline.api_key}"],
            body="",
            key_prefix="",
            in_flight=load.in_flight,
            requests=load.jobs,
            seconds=load.seconds,
            within_s=LOAD_WITHIN_S,
            expects='"probed":true',
        )


async def _wait_until_busy(client: Client, user: str, *, busy: bool) -> None:
    deadline = time.monotonic() + BUSY_WITHIN_S
    while (await client.presence(user, probe=True)).busy is not busy:
        if time.monotonic() > deadline:
            raise BenchFailed(f"the machine was not {'busy' if busy else 'free'} in time")


@asynccontextmanager
async def open_stack(ground: Ground) -> AsyncIterator[Stack]:
    """An installation without services yet, on the ground's stores."""
    urls = ground.servers
    directory = ground.directory / "stack"
    async with Stack(directory, postgres_url=urls.postgres_url, redis_url=urls.redis_url) as stack:
        yield stack


@asynccontextmanager
async def open_small(ground: Ground, stack: Stack) -> AsyncIterator[Towline]:
    """A gateway and a worker, the first of the stack, and their sidecars. Raises: ProcessFailed."""
    gateway, worker = await asyncio.gather(stack.add_gateway(), stack.add_worker())
    sidecars = await describe_sidecars(ground, stack, "sidecars-small", USERS, [worker])
    async with running(sidecars, is_ready=are_connected(sidecars, len(USERS))):
        yield Towline(ground, stack.api_key, gateways=[gateway], workers=[worker], sidecars=sidecars, users=USERS)


@asynccontextmanager
async def open_wide(ground: Ground, stack: Stack) -> AsyncIterator[Towline]:
    """The stack's gateway and worker and one more of each, and sidecars spread over both. Raises: ProcessFailed."""
    await asyncio.gather(stack.add_gateway(), stack.add_worker())
    users = [f"wide-{user}" for user in USERS]
    sidecars = await describe_sidecars(ground, stack, "sidecars-wide", users, stack.workers)
    async with running(sidecars, is_ready=are_connected(sidecars, len(users))):
        yield Towline(
            ground, stack.api_key, gateways=stack.gateways, workers=stack.workers, sidecars=sidecars, users=users
        )


async def describe_sidecars(
    ground: Ground, stack: Stack, name: str, users: Sequence[str], workers: Sequence[Worker]
) -> Process:
    """Describe one process with a sidecar for each user, who dial the workers in turn, past any balancer."""
    tokens = await asyncio.gather(*map(stack.mint_machine_token, users))
    laptops = []
    for number, (user, token) in enumerate(zip(users, tokens, strict=True)):
        state = ground.directory / f"laptop-{user}"
        state.mkdir(mode=0o700, exist_ok=True)
        laptops.append(Laptop(workers[number % len(workers)].bridge_url, token, str(state)))
    return ground.process(name, "harness.bench.sidecars", str(ground.write_plan(name, laptops)))


def are_connected(sidecars: Process, count: int) -> Callable[[], bool]:
    """Whether all of a process's sidecars have been welcomed."""
    return lambda: sidecars.read_log().count('"connected"') >= count
