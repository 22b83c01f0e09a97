"""A target of processes on this machine: embedded stores, real services, sidecars behind a proxy each.

Owns:     the servers, the stack on them, the balancer that sidecars dial, and a TCP proxy before every machine.
Promises: `async with open_target(...)` leaves nothing running.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from harness.agent.remote import RemoteAgent, running_agent
from harness.balancer import Balancer
from harness.drills.catalogue import CLUSTER_DRILLS
from harness.drills.laptops import Laptop, Laptops
from harness.drills.local_parts import LocalGateway, LocalRedis, LocalReplica, LocalStore, LocalWorker
from harness.drills.replicas import Place, Replicas
from harness.drills.target import Executions, Machine, Role
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.endpoint import RemoteEndpoint, running_endpoint
from harness.model.remote import RemoteModel, running_model
from harness.ports import free_port
from harness.runner import hold_directory
from harness.stack import Stack


class LocalTarget:
    """See `target.Target` and the module."""

    allowance_s = 0.0
    cannot = dict.fromkeys(CLUSTER_DRILLS, "needs a cluster")
    cluster = None

    def __init__(
        self,
        stack: Stack,
        balancer: Balancer,
        postgres: EmbeddedPostgres,
        valkey: EmbeddedValkey,
        *,
        agent: RemoteAgent,
        model: RemoteModel,
        endpoint: RemoteEndpoint,
        notes: Path,
        heartbeat_s: float,
    ) -> None:
        """Describe a target without replicas; `notes`: a directory for what the tools note."""
        self.heartbeat_s = heartbeat_s
        self.agent = agent
        self.model = model
        self.endpoint = endpoint
        self.redis = LocalRedis(valkey)
        self.postgres = LocalStore(postgres)
        self.api_key = stack.api_key
        self.postgres_url = postgres.url
        self.redis_url = valkey.url
        self._stack = stack
        self._balancer = balancer
        self._laptops = Laptops(stack.sidecars, bridge_url=f"ws://127.0.0.1:{balancer.port}", notes=notes)
        self._replicas: dict[Role, Replicas[Any]] = {
            "gateway": Replicas(self._add_gateway),
            "worker": Replicas(self._add_worker),
            "relay": Replicas(self._add_relay),
        }
        self.gateways: list[LocalGateway] = self._replicas["gateway"].running
        self.workers: list[LocalWorker] = self._replicas["worker"].running
        self.relays: list[LocalReplica] = self._replicas["relay"].running

    async def scale(self, role: Role, replicas: int) -> None:
        await self._replicas[role].scale(replicas)

    async def _add_gateway(self) -> LocalGateway:
        return LocalGateway(await self._stack.add_gateway())

    async def _add_worker(self) -> LocalWorker:
        return LocalWorker(await self._stack.add_worker(), Place(self._balancer))

    async def _add_relay(self) -> LocalReplica:
        return LocalReplica(await self._stack.add_relay())

    async def add_machine(self, user: str, *, connected: bool = True) -> Laptop:
        return await self._laptops.add(user, connected=connected)

    async def remove_machine(self, machine: Machine) -> None:
        assert isinstance(machine, Laptop), "it was made here"
        await self._laptops.remove(machine)

    async def let_go(self, user: str, mark: str) -> None:
        self._laptops.let_go(user, mark)

    async def executions(self, user: str) -> Mapping[str, Executions]:
        return self._laptops.executions(user)

    async def heal(self) -> None:
        # What everything else needs comes first.
        for store in (self.postgres, self.redis):
            if store.is_frozen:
                await store.thaw()
            if store.is_stopped:
                await store.start()
        for replica in (*self.gateways, *self.workers, *self.relays):
            if not replica.service.is_running:
                await replica.start()
            elif replica.is_frozen:
                await replica.thaw()


@contextlib.asynccontextmanager
async def open_target(
    directory: Path, *, heartbeat_s: float, gateways: int = 2, workers: int = 2, relays: int = 2
) -> AsyncIterator[LocalTarget]:
    """Start a whole installation in a state directory, and end it with the block.

    The stores find their data of the last time; logs, journals and notes of the last time are removed.

    Raises:
        DirectoryBusy: another target uses the directory.
        ProcessFailed, ServerMissing: a server or service did not start.
    """
    async with contextlib.AsyncExitStack() as cleanup:
        stores = directory / "stores"
        cleanup.enter_context(hold_directory(stores))
        for old in (directory / "stack", directory / "notes"):
            shutil.rmtree(old, ignore_errors=True)
        postgres, valkey = EmbeddedPostgres(stores), EmbeddedValkey(stores)
        for server in (postgres, valkey):
            cleanup.push_async_callback(server.stop)
            await server.start()
        stack = await cleanup.enter_async_context(
            Stack(directory / "stack", postgres_url=postgres.url, redis_url=valkey.url, heartbeat_s=heartbeat_s)
        )
        # Not the stack's own: it would still lead sidecars to a frozen worker.
        balancer = Balancer()
        await balancer.start(free_port())
        cleanup.push_async_callback(balancer.stop)
        notes = directory / "notes"
        notes.mkdir()
        agent = await cleanup.enter_async_context(running_agent(directory / "stack"))
        model = await cleanup.enter_async_context(running_model(directory / "stack"))
        endpoint = await cleanup.enter_async_context(running_endpoint(directory / "stack"))
        target = LocalTarget(
            stack,
            balancer,
            postgres,
            valkey,
            agent=agent,
            model=model,
            endpoint=endpoint,
            notes=notes,
            heartbeat_s=heartbeat_s,
        )
        await asyncio.gather(
            target.scale("gateway", gateways), target.scale("worker", workers), target.scale("relay", relays)
        )
        yield target
