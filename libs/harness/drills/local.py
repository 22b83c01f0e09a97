"""A target of processes on this machine: embedded stores, real services, sidecars behind a proxy each.

Owns:     the servers, the stack on them, the balancer that sidecars dial, and a TCP proxy before every machine.
Promises: `async with open_target(...)` leaves nothing running.
"""

import asyncio
import contextlib
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import redis.asyncio

from harness.balancer import Balancer
from harness.drills.target import DrillFailed, Executions, Machine, Role
from harness.drills.tools import NOTES_VARIABLE
from harness.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from harness.faults import TcpProxy
from harness.ports import free_port
from harness.runner import Process, ProcessFailed, hold_directory
from harness.stack import Gateway, Service, Sidecar, Stack, Worker

GONE_WITHIN_S = 10.0
# A worker's drain (25 s), its outcomes (5 s) and some: a service that takes longer was not going to leave.
LEAVES_WITHIN_S = 40.0
CONNECTS_WITHIN_S = 30.0


@contextlib.contextmanager
def _drill_fails() -> Iterator[None]:
    try:
        yield
    except ProcessFailed as error:
        raise DrillFailed(str(error)) from error


async def _wait_killed(process: Process, *, within_s: float) -> None:
    with _drill_fails():
        code = await process.wait(within_s=within_s)
    if code != -signal.SIGKILL:
        raise DrillFailed(f"{process.name} ended with {code}, not by SIGKILL")


class LocalReplica:
    """One gateway or worker as a process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.is_frozen = False

    @property
    def name(self) -> str:
        return self.service.name

    async def is_running(self) -> bool:
        return self.service.is_running

    async def start(self) -> None:
        with _drill_fails():
            await self.service.start_ready()
        self.is_frozen = False

    async def kill(self) -> None:
        self.service.kill()
        await _wait_killed(self.service, within_s=GONE_WITHIN_S)

    async def term(self) -> int:
        self.service.term()
        with _drill_fails():
            return await self.service.wait(within_s=LEAVES_WITHIN_S)

    async def freeze(self) -> None:
        self.service.freeze()
        self.is_frozen = True

    async def thaw(self) -> None:
        self.service.thaw()
        self.is_frozen = False

    async def logs(self) -> str:
        return self.service.read_log()


class LocalGateway(LocalReplica):
    """A gateway."""

    service: Gateway

    @property
    def url(self) -> str:
        return self.service.url


class LocalWorker(LocalReplica):
    """A worker behind the balancer, which leads no new sockets to it while it leaves or is frozen.

    In Kubernetes a pod that is told to leave is taken out of its Service at the same time, and one that does not answer
    after its readiness probe has failed.
    """

    service: Worker

    def __init__(self, service: Worker, balancer: Balancer) -> None:
        super().__init__(service)
        self._balancer = balancer
        self._lead_here()

    async def start(self) -> None:
        await super().start()
        self._lead_here()

    async def term(self) -> int:
        self._balancer.backends.remove(self._address)
        return await super().term()

    async def freeze(self) -> None:
        self._balancer.backends.remove(self._address)
        await super().freeze()

    async def thaw(self) -> None:
        await super().thaw()
        self._lead_here()

    @property
    def _address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.service.port)

    def _lead_here(self) -> None:
        if self._address not in self._balancer.backends:
            self._balancer.backends.append(self._address)


class LocalStore:
    """An embedded server."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.is_stopped = False

    async def stop(self) -> None:
        self.is_stopped = True
        await self.server.stop()

    async def start(self) -> None:
        with _drill_fails():
            await self.server.start()
        self.is_stopped = False


class LocalRedis(LocalStore):
    """The embedded Valkey."""

    async def flush(self) -> None:
        async with redis.asyncio.Redis.from_url(self.server.url) as client:
            await client.flushall()


class LocalMachine:
    """A sidecar as a process, behind a proxy of its own."""

    def __init__(self, user: str, sidecar: Sidecar, proxy: TcpProxy) -> None:
        self.sidecar = sidecar
        self.proxy = proxy
        self._user = user

    @property
    def name(self) -> str:
        return self.sidecar.name

    @property
    def user(self) -> str:
        return self._user

    async def is_running(self) -> bool:
        return self.sidecar.is_running

    async def start(self, *, connected: bool = True) -> None:
        if connected:
            with _drill_fails():
                await self.sidecar.start_connected(within_s=CONNECTS_WITHIN_S)
        else:
            await self.sidecar.start()

    async def stop(self) -> None:
        await self.sidecar.stop()

    async def kill(self) -> None:
        self.sidecar.kill()
        await self.killed(within_s=GONE_WITHIN_S)

    async def killed(self, *, within_s: float) -> None:
        await _wait_killed(self.sidecar, within_s=within_s)

    async def freeze(self) -> None:
        self.sidecar.freeze()

    async def thaw(self) -> None:
        self.sidecar.thaw()

    async def cut(self) -> None:
        self.proxy.cut()

    async def unplug(self) -> None:
        self.proxy.refuse()
        self.proxy.cut()

    async def plug(self) -> None:
        await self.proxy.heal()

    async def logs(self) -> str:
        return self.sidecar.log.read_text()


class LocalTarget:
    """See `target.Target` and the module."""

    def __init__(
        self,
        stack: Stack,
        balancer: Balancer,
        postgres: EmbeddedPostgres,
        valkey: EmbeddedValkey,
        *,
        notes: Path,
        heartbeat_s: float,
    ) -> None:
        """Describe a target without replicas; `notes`: a directory for what the tools note."""
        self.heartbeat_s = heartbeat_s
        self.gateways: list[LocalGateway] = []
        self.workers: list[LocalWorker] = []
        self.redis = LocalRedis(valkey)
        self.postgres = LocalStore(postgres)
        self.api_key = stack.api_key
        self.postgres_url = postgres.url
        self.redis_url = valkey.url
        self._stack = stack
        self._balancer = balancer
        self._notes = notes
        # Scaled away; they come back as they were.
        self._spare_gateways: list[LocalGateway] = []
        self._spare_workers: list[LocalWorker] = []

    async def scale(self, role: Role, replicas: int) -> None:
        if role == "gateway":
            while len(self.gateways) < replicas:
                self.gateways.append(await self._one_more_gateway())
            while len(self.gateways) > replicas:
                gateway = self.gateways.pop()
                self._spare_gateways.append(gateway)
                await gateway.term()
        else:
            while len(self.workers) < replicas:
                self.workers.append(await self._one_more_worker())
            while len(self.workers) > replicas:
                worker = self.workers.pop()
                self._spare_workers.append(worker)
                await worker.term()

    async def _one_more_gateway(self) -> LocalGateway:
        if not self._spare_gateways:
            return LocalGateway(await self._stack.add_gateway())
        gateway = self._spare_gateways.pop()
        await gateway.start()
        return gateway

    async def _one_more_worker(self) -> LocalWorker:
        if not self._spare_workers:
            return LocalWorker(await self._stack.add_worker(), self._balancer)
        worker = self._spare_workers.pop()
        await worker.start()
        return worker

    async def add_machine(self, user: str, *, connected: bool = True) -> LocalMachine:
        proxy = TcpProxy(f"ws://127.0.0.1:{self._balancer.port}")
        with _drill_fails():
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
        for replica in (*self.gateways, *self.workers):
            if not replica.service.is_running:
                await replica.start()
            elif replica.is_frozen:
                await replica.thaw()
        for store in (self.postgres, self.redis):
            if store.is_stopped:
                await store.start()


@contextlib.asynccontextmanager
async def open_target(
    directory: Path, *, heartbeat_s: float, gateways: int = 2, workers: int = 2
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
        target = LocalTarget(stack, balancer, postgres, valkey, notes=notes, heartbeat_s=heartbeat_s)
        await asyncio.gather(target.scale("gateway", gateways), target.scale("worker", workers))
        yield target
