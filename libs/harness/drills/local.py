"""A target of processes on this machine: embedded stores, real services, sidecars behind a proxy each.

Owns:     the servers, the stack on them, the balancer that sidecars dial, and a TCP proxy before every machine.
Promises: `async with open_target(...)` leaves nothing running.
"""

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from harness.agent.remote import RemoteAgent, running_agent
from harness.balancer import Balancer
from harness.drills.local_parts import (
    LocalGateway,
    LocalMachine,
    LocalRedis,
    LocalReplica,
    LocalReplicas,
    LocalStore,
    LocalWorker,
    drill_fails,
)
from harness.drills.target import Executions, Machine, Role
from harness.drills.tools import NOTES_VARIABLE
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.endpoint import RemoteEndpoint, running_endpoint
from harness.faults import TcpProxy
from harness.model.remote import RemoteModel, running_model
from harness.ports import free_port
from harness.runner import hold_directory
from harness.stack import Stack


class LocalTarget:
    """See `target.Target` and the module."""

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
        self._notes = notes
        self._replicas: dict[Role, LocalReplicas[Any]] = {
            "gateway": LocalReplicas(self._add_gateway),
            "worker": LocalReplicas(self._add_worker),
            "relay": LocalReplicas(self._add_relay),
        }
        self.gateways: list[LocalGateway] = self._replicas["gateway"].running
        self.workers: list[LocalWorker] = self._replicas["worker"].running
        self.relays: list[LocalReplica] = self._replicas["relay"].running

    async def scale(self, role: Role, replicas: int) -> None:
        await self._replicas[role].scale(replicas)

    async def _add_gateway(self) -> LocalGateway:
        return LocalGateway(await self._stack.add_gateway())

    async def _add_worker(self) -> LocalWorker:
        return LocalWorker(await self._stack.add_worker(), self._balancer)

    async def _add_relay(self) -> LocalReplica:
        return LocalReplica(await self._stack.add_relay())

    async def add_machine(self, user: str, *, connected: bool = True) -> LocalMachine:
        proxy = TcpProxy(f"ws://127.0.0.1:{self._balancer.port}")
        with drill_fails():
            sidecar = await self._stack.add_sidecar(
                user,
                tools=["harness.drills.tools"],
                bridge_url=await proxy.start(),
                env={NOTES_VARIABLE: str(self._notes / user)},
                connected=connected,
            )
        return LocalMachine(user, sidecar, proxy)

    async def remove_machine(self, machine: Machine) -> None:
        assert isinstance(machine, LocalMachine), "it was made here"
        await machine.sidecar.stop()
        await machine.proxy.stop()

    async def executions(self, user: str) -> Mapping[str, Executions]:
        try:
            lines = (self._notes / user).read_text().splitlines()
        except FileNotFoundError:
            return {}
        notes = Counter(lines)
        marks = {line.partition(" ")[2] for line in lines}
        return {mark: Executions(notes[f"began {mark}"], notes[f"ended {mark}"]) for mark in marks}

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
