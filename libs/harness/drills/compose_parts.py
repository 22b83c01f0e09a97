"""The parts of a target under Docker Compose: replicas and stores as containers, cut by Docker.

Used by:  `compose`, which makes a whole installation of them.
"""

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from harness.drills.attached import AttachedReplica
from harness.drills.containers import Container, read_containers
from harness.drills.programs import call, find
from harness.drills.reach import ADMIN_PORT, flush, wait_ready, wait_until
from harness.drills.replicas import Place
from harness.drills.target import DrillFailed
from harness.faults import TcpProxy

# A worker's drain (25 s), its outcomes (5 s) and some: a service that takes longer was not going to leave.
LEAVES_WITHIN_S = 40
# A store writes its data down.
STOPS_WITHIN_S = 20


class Docker:
    """The containers of this machine, by name or id. Every method raises DrillFailed where Docker refuses."""

    def __init__(self) -> None:
        (self.program,) = find("docker")

    async def look(self, name: str) -> Container:
        """What it is doing."""
        (container,) = read_containers(await call(self.program, "inspect", name))
        return container

    async def start(self, name: str) -> None:
        await call(self.program, "start", name)

    async def stop(self, name: str, *, within_s: int) -> int:
        """SIGTERM, and SIGKILL after that time; returns the exit code."""
        await call(self.program, "stop", "-t", str(within_s), name, within_s=within_s + 30)
        return (await self.look(name)).exit_code

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when it is gone. Raises: DrillFailed: something else has ended it, too."""
        await call(self.program, "kill", "-s", "KILL", name)
        code = int(await call(self.program, "wait", name))
        if code != 128 + signal.SIGKILL:
            raise DrillFailed(f"{name} ended with {code}, not by SIGKILL")

    async def pause(self, name: str) -> None:
        await call(self.program, "pause", name)

    async def unpause(self, name: str) -> None:
        await call(self.program, "unpause", name)


class ComposeReplica(AttachedReplica):
    """One gateway, worker or relay as a container, which stays the same over its starts; its ports do not."""

    def __init__(
        self, docker: Docker, container: Container, directory: Path, *, port: int, place: Place | None
    ) -> None:
        """`port`: where it serves inside; 0 for one that only calls others."""
        super().__init__(container.name, directory, place)
        self._docker = docker
        self._inner_port = port

    async def is_running(self) -> bool:
        return (await self._docker.look(self.name)).is_running

    async def start(self) -> None:
        await self._docker.start(self.name)
        await self.begin()

    async def begin(self) -> None:
        """Find out where it is after a start, and wait until it is ready."""
        container = await self._docker.look(self.name)
        self.admin_port = _published(container, ADMIN_PORT)
        self.port = _published(container, self._inner_port) if self._inner_port else 0
        await wait_ready(self.name, lambda: self.admin_port)
        await self.serve([self._docker.program, "logs", "--follow", "--since", container.started_at, self.name])

    async def kill(self) -> None:
        await self._docker.kill(self.name)

    async def term(self) -> int:
        self.lead_away()
        return await self._docker.stop(self.name, within_s=LEAVES_WITHIN_S)

    async def freeze(self) -> None:
        self.lead_away()
        await self._docker.pause(self.name)
        self.is_frozen = True

    async def thaw(self) -> None:
        await self._docker.unpause(self.name)
        self.is_frozen = False
        self.lead_here()

    async def heal(self) -> None:
        """Have it run, whatever was done to it."""
        container = await self._docker.look(self.name)
        if container.is_paused:
            await self.thaw()
        elif not container.is_running:
            await self.start()


class ComposeStore:
    """PostgreSQL or Redis as a container, behind a proxy of ours: a published port is another one at every start."""

    def __init__(self, docker: Docker, name: str, port: int, answers: Callable[[str], Awaitable[bool]]) -> None:
        """Describe a store.

        Args:
            name: of its container.
            port: where it serves inside.
            answers: whether the store behind a URL does.
        """
        self.url = ""
        self._docker = docker
        self._name = name
        self._port = port
        self._answers = answers
        self._proxy: TcpProxy | None = None

    async def open(self) -> int:
        """Lead to it; returns the port by which to go."""
        port = _published(await self._docker.look(self._name), self._port)
        self._proxy = TcpProxy(f"tcp://127.0.0.1:{port}")
        await self._proxy.start()
        return self._proxy.port

    async def close(self) -> None:
        if self._proxy:
            await self._proxy.stop()

    async def stop(self) -> None:
        await self._docker.stop(self._name, within_s=STOPS_WITHIN_S)

    async def start(self) -> None:
        await self._docker.start(self._name)
        assert self._proxy is not None, "opened before it is cut"
        self._proxy.lead_to(f"tcp://127.0.0.1:{_published(await self._docker.look(self._name), self._port)}")
        await wait_until(f"{self._name} answers", lambda: self._answers(self.url))

    async def freeze(self) -> None:
        await self._docker.pause(self._name)

    async def thaw(self) -> None:
        await self._docker.unpause(self._name)

    async def heal(self) -> None:
        """Have it run, whatever was done to it."""
        container = await self._docker.look(self._name)
        if container.is_paused:
            await self.thaw()
        elif not container.is_running:
            await self.start()


class ComposeRedis(ComposeStore):
    """Redis."""

    async def flush(self) -> None:
        await flush(self.url)


def _published(container: Container, port: int) -> int:
    try:
        return container.ports[port]
    except KeyError:
        raise DrillFailed(f"{container.name} has no published port for {port}") from None
