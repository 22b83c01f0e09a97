"""The parts of a target on this machine: services and servers as processes, sidecars behind a proxy each.

Used by:  `local`, which makes a whole installation of them.
"""

import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Generic, TypeVar

import redis.asyncio

from harness.balancer import Balancer
from harness.drills.target import DrillFailed
from harness.embedded import EmbeddedServer
from harness.faults import TcpProxy
from harness.runner import Process, ProcessFailed
from harness.stack import Gateway, Service, Sidecar, Worker

GONE_WITHIN_S = 10.0
# A worker's drain (25 s), its outcomes (5 s) and some: a service that takes longer was not going to leave.
LEAVES_WITHIN_S = 40.0
CONNECTS_WITHIN_S = 30.0


@contextlib.contextmanager
def drill_fails() -> Iterator[None]:
    """Say `DrillFailed` of a process that did not do its part."""
    try:
        yield
    except ProcessFailed as error:
        raise DrillFailed(str(error)) from error


async def _wait_killed(process: Process, *, within_s: float) -> None:
    with drill_fails():
        code = await process.wait(within_s=within_s)
    if code != -signal.SIGKILL:
        raise DrillFailed(f"{process.name} ended with {code}, not by SIGKILL")


class LocalReplica:
    """One gateway, worker or relay as a process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.is_frozen = False

    @property
    def name(self) -> str:
        return self.service.name

    async def is_running(self) -> bool:
        return self.service.is_running

    async def start(self) -> None:
        with drill_fails():
            await self.service.start_ready()
        self.is_frozen = False

    async def kill(self) -> None:
        self.service.kill()
        await _wait_killed(self.service, within_s=GONE_WITHIN_S)

    async def term(self) -> int:
        self.service.term()
        with drill_fails():
            return await self.service.wait(within_s=LEAVES_WITHIN_S)

    async def freeze(self) -> None:
        self.service.freeze()
        self.is_frozen = True

    async def thaw(self) -> None:
        self.service.thaw()
        self.is_frozen = False

    async def logs(self) -> str:
        return self.service.read_log()

    async def metrics(self) -> Mapping[str, float]:
        try:
            return await self.service.read_metrics()
        except OSError as error:
            raise DrillFailed(str(error)) from error


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


R = TypeVar("R", bound=LocalReplica)


class LocalReplicas(Generic[R]):
    """All replicas of one role.

    Attributes:
        running: those that are meant to run; the same list always.
    """

    def __init__(self, add: Callable[[], Awaitable[R]]) -> None:
        """`add`: starts one more."""
        self.running: list[R] = []
        self._add = add
        # Scaled away; they come back as they were.
        self._spare: list[R] = []

    async def scale(self, replicas: int) -> None:
        """See `Target.scale`."""
        while len(self.running) < replicas:
            if self._spare:
                replica = self._spare.pop()
                await replica.start()
            else:
                replica = await self._add()
            self.running.append(replica)
        while len(self.running) > replicas:
            replica = self.running.pop()
            self._spare.append(replica)
            await replica.term()


class LocalStore:
    """An embedded server."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.is_stopped = False
        self.is_frozen = False

    async def freeze(self) -> None:
        self.is_frozen = True
        self.server.freeze()

    async def thaw(self) -> None:
        self.server.thaw()
        self.is_frozen = False

    async def stop(self) -> None:
        self.is_stopped = True
        await self.server.stop()

    async def start(self) -> None:
        with drill_fails():
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
            with drill_fails():
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
