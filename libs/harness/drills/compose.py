"""A target of containers under Docker Compose: attaches to the stack that `make compose-up` has started.

Owns:     while it is attached, the stack with `deploy/compose/drill.yaml` over it, which publishes every replica and
          store on loopback ports; at the end the stack is as it was, with two replicas of each service.
Used by:  `towline drill --target compose`.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from harness.drills.attached import AttachedTarget, Attachment, Ways, attach, clean_directory
from harness.drills.catalogue import CLUSTER_DRILLS
from harness.drills.compose_parts import ComposeRedis, ComposeReplica, ComposeStore, Docker
from harness.drills.containers import Container, read_containers
from harness.drills.programs import call, find
from harness.drills.reach import (
    AGENT_PORT,
    ENDPOINT_PORT,
    GATEWAY_PORT,
    MODEL_PORT,
    POSTGRES_PORT,
    REDIS_PORT,
    WORKER_PORT,
    does_postgres_answer,
    does_redis_answer,
)
from harness.drills.replicas import Place, Replicas
from harness.drills.target import ROLES, DrillFailed, Role

FILES = Path(__file__).parents[3] / "deploy" / "compose"
PORTS: Mapping[Role, int] = {"gateway": GATEWAY_PORT, "worker": WORKER_PORT, "relay": 0}
# What must be up before anything is drilled.
SERVICES = ("postgres", "redis", "stand-in", *ROLES)
REPLICAS = 2
# Containers are made anew when ports are published.
UP_WITHIN_S = 180.0


class Compose:
    """The stack, by `docker compose`. Every method raises DrillFailed where that refuses."""

    def __init__(self, docker: Docker, program: Sequence[str]) -> None:
        """`program`: how Compose is called on this machine."""
        self.docker = docker
        self._program = program

    async def containers(self, service: str) -> list[Container]:
        """Those of a service, stopped ones included."""
        ids = (await self._call("ps", "--all", "--quiet", service)).split()
        return read_containers(await call(self.docker.program, "inspect", *ids)) if ids else []

    async def up(self, *words: str, published: bool = True) -> None:
        """Have services run; whether they are ready is asked of each. `published`: with our ports."""
        files = ["--file", str(FILES / "compose.yaml")]
        if published:
            files += ["--file", str(FILES / "drill.yaml")]
        await self._call(*files, "up", "--detach", "--no-build", *words, within_s=UP_WITHIN_S)

    async def environment(self, service: str) -> dict[str, str]:
        """What a running container of a service has been given."""
        lines = (await self._call("exec", "--no-TTY", service, "env")).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    async def _call(self, *words: str, within_s: float = 60.0) -> str:
        files = [] if words[0] == "--file" else ["--file", str(FILES / "compose.yaml")]
        return await call(*self._program, *files, *words, within_s=within_s)


async def find_compose() -> Compose:
    """Find Docker and its Compose: what `COMPOSE` says, or the plug-in, or the program. Raises: DrillFailed."""
    docker = Docker()
    if "COMPOSE" not in os.environ:
        with contextlib.suppress(DrillFailed):
            await call(docker.program, "compose", "version")
            return Compose(docker, [docker.program, "compose"])
    return Compose(docker, find("docker-compose", variable="COMPOSE"))


class ComposeTarget(AttachedTarget):
    """See `target.Target` and the module."""

    # Docker's own programs, one after the other, on a busy machine.
    allowance_s = 2.0
    cannot = dict.fromkeys(CLUSTER_DRILLS, "needs a cluster")
    cluster = None

    def __init__(self, compose: Compose, attachment: Attachment, postgres: ComposeStore, redis: ComposeRedis) -> None:
        """Describe a target whose replicas are not known yet."""
        super().__init__(attachment)
        self.postgres = postgres
        self.redis = redis
        self._compose = compose
        self._directory = attachment.directory
        self._balancer = attachment.balancer
        self._known: set[str] = set()
        self._replicas = {role: self._replicas_of(role) for role in ROLES}
        self.gateways = self._replicas["gateway"].running
        self.workers = self._replicas["worker"].running
        self.relays = self._replicas["relay"].running

    def _replicas_of(self, role: Role) -> Replicas[ComposeReplica]:
        async def add() -> ComposeReplica:
            return await self._add(role)

        return Replicas(add)

    async def scale(self, role: Role, replicas: int) -> None:
        await self._replicas[role].scale(replicas)

    async def _add(self, role: Role) -> ComposeReplica:
        """Get to know one more container, and have it made if there is none."""
        while not (unknown := [each for each in await self._compose.containers(role) if each.id not in self._known]):
            count = len(await self._compose.containers(role)) + 1
            await self._compose.up("--no-deps", "--no-recreate", "--scale", f"{role}={count}", role)
        container = unknown[0]
        self._known.add(container.id)
        place = Place(self._balancer) if role == "worker" else None
        replica = ComposeReplica(self._compose.docker, container, self._directory, port=PORTS[role], place=place)
        await replica.begin()
        return replica

    async def heal(self) -> None:
        # What everything else needs comes first.
        await asyncio.gather(self.postgres.heal(), self.redis.heal())
        for role in ROLES:
            await asyncio.gather(*(replica.heal() for replica in self._replicas[role].running))
            await self.scale(role, REPLICAS)

    async def close(self) -> None:
        """Leave what is scaled away to Compose."""
        for replicas in self._replicas.values():
            for replica in (*replicas.running, *replicas.spare):
                await replica.close()


@contextlib.asynccontextmanager
async def open_compose_target(directory: Path) -> AsyncIterator[ComposeTarget]:
    """Attach to the stack that is up; at the end it is as it was.

    Args:
        directory: takes logs, journals and notes; those of the last time are removed.

    Raises:
        DirectoryBusy: another target uses the directory.
        DrillFailed: there is no stack, or it does not get well.
    """
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(clean_directory(directory))
        compose = await find_compose()
        if not all([await compose.containers(service) for service in SERVICES]):
            raise DrillFailed("no stack is up under Compose: `make compose-up` first")
        counts = [word for role in ROLES for word in ("--scale", f"{role}={REPLICAS}")]
        cleanup.push_async_callback(compose.up, *counts, *SERVICES, published=False)
        await compose.up(*counts, *SERVICES)
        postgres = ComposeStore(
            compose.docker, (await compose.containers("postgres"))[0].name, POSTGRES_PORT, does_postgres_answer
        )
        redis = ComposeRedis(compose.docker, (await compose.containers("redis"))[0].name, REDIS_PORT, does_redis_answer)
        for store in (postgres, redis):
            cleanup.push_async_callback(store.close)
        stand_in = (await compose.containers("stand-in"))[0].ports
        ways = Ways(
            postgres=await postgres.open(),
            redis=await redis.open(),
            agent=stand_in[AGENT_PORT],
            model=stand_in[MODEL_PORT],
            endpoint=stand_in[ENDPOINT_PORT],
            environment=await compose.environment("gateway"),
        )
        attachment = await cleanup.enter_async_context(attach(directory, ways))
        postgres.url, redis.url = attachment.postgres_url, attachment.redis_url
        target = ComposeTarget(compose, attachment, postgres, redis)
        cleanup.push_async_callback(target.close)
        await asyncio.gather(*(target.scale(role, REPLICAS) for role in ROLES))
        yield target
