"""The parts of a target on this machine: services and servers as processes.

Used by:  `local`, which makes a whole installation of them.
"""

from collections.abc import Mapping

import redis.asyncio

from harness.drills.laptops import GONE_WITHIN_S, drill_fails, wait_killed
from harness.drills.replicas import Place
from harness.drills.target import DrillFailed
from harness.embedded import EmbeddedServer
from harness.stack import Gateway, Service, Worker

# A worker's drain (25 s), its outcomes (5 s) and some: a service that takes longer was not going to leave.
LEAVES_WITHIN_S = 40.0


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
        await wait_killed(self.service, within_s=GONE_WITHIN_S)

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
    """A worker behind the balancer."""

    service: Worker

    def __init__(self, service: Worker, place: Place) -> None:
        super().__init__(service)
        self._place = place
        place.take(service.port)

    async def start(self) -> None:
        await super().start()
        self._place.take(self.service.port)

    async def term(self) -> int:
        self._place.leave()
        return await super().term()

    async def freeze(self) -> None:
        self._place.leave()
        await super().freeze()

    async def thaw(self) -> None:
        await super().thaw()
        self._place.take(self.service.port)


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
