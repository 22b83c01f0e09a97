"""Installations that are up already, in containers: what all targets of that kind have in common.

Owns:     an API key, made at the beginning and revoked at the end; the users' machines and the balancer that they dial;
          a file with the log of every replica.
Used by:  `compose` and `kube`.
"""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.process.settings import CommonSettings
from common.store.postgres import open_postgres
from common.store.tokens import Tokens
from harness.agent.remote import RemoteAgent
from harness.balancer import Balancer
from harness.drills.laptops import Laptop, Laptops
from harness.drills.reach import AGENT_PORT, ENDPOINT_PORT, MODEL_PORT, led_by
from harness.drills.replicas import Place
from harness.drills.target import DrillFailed, Executions, Machine
from harness.endpoint import RemoteEndpoint
from harness.model.remote import RemoteModel
from harness.ports import free_port
from harness.runner import Process, hold_directory
from harness.sidecars import Sidecars, mint_api_key
from harness.stack import inherited_environment, read_metrics
from harness.stand_in import ANSWER_WITHIN_S

# Where the stand-ins are for whoever is in the same network.
STAND_IN = "http://stand-in"


@dataclass(frozen=True, slots=True)
class Ways:
    """Loopback ports of ours that lead into the installation, and its environment (of a gateway)."""

    postgres: int
    redis: int
    agent: int
    model: int
    endpoint: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a target has of its own, while it is attached."""

    directory: Path
    heartbeat_s: float
    api_key: str
    postgres_url: str
    redis_url: str
    agent: RemoteAgent
    model: RemoteModel
    endpoint: RemoteEndpoint
    balancer: Balancer
    laptops: Laptops


@contextlib.contextmanager
def clean_directory(directory: Path) -> Iterator[None]:
    """Hold a state directory, without what the last time left in it. Raises: DirectoryBusy."""
    with hold_directory(directory):
        for old in directory.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old.name != "lock":
                old.unlink()
        yield


@contextlib.asynccontextmanager
async def attach(directory: Path, ways: Ways) -> AsyncIterator[Attachment]:
    """Make what a target needs of its own, and take all of it away at the end.

    Raises:
        StoreUnavailable: the ways lead nowhere.
    """
    environment = ways.environment
    postgres_url = led_by(environment["DATABASE_URL"], ways.postgres)
    key_id, api_key = await mint_api_key(postgres_url)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(_revoke, postgres_url, key_id)
        balancer = Balancer()
        await balancer.start(free_port())
        cleanup.push_async_callback(balancer.stop)
        sidecars = Sidecars(directory, postgres_url=postgres_url, env=inherited_environment())
        cleanup.push_async_callback(sidecars.stop)
        notes = directory / "notes"
        notes.mkdir()

        async def stand_in(port: int) -> httpx.AsyncClient:
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_WITHIN_S)
            return await cleanup.enter_async_context(client)

        yield Attachment(
            directory=directory,
            heartbeat_s=float(
                environment.get("TOWLINE_HEARTBEAT_S", CommonSettings.model_fields["heartbeat_s"].default)
            ),
            api_key=api_key,
            postgres_url=postgres_url,
            redis_url=led_by(environment["REDIS_URL"], ways.redis),
            agent=RemoteAgent(f"{STAND_IN}:{AGENT_PORT}", await stand_in(ways.agent)),
            model=RemoteModel(f"{STAND_IN}:{MODEL_PORT}", await stand_in(ways.model)),
            endpoint=RemoteEndpoint(f"{STAND_IN}:{ENDPOINT_PORT}", await stand_in(ways.endpoint)),
            balancer=balancer,
            laptops=Laptops(sidecars, bridge_url=f"ws://127.0.0.1:{balancer.port}", notes=notes),
        )


async def _revoke(postgres_url: str, key_id: str) -> None:
    async with open_postgres(postgres_url) as postgres:
        await Tokens(postgres).revoke_api_key(key_id)


class AttachedTarget:
    """The half of `target.Target` that is the same for all of them."""

    def __init__(self, attachment: Attachment) -> None:
        self.heartbeat_s = attachment.heartbeat_s
        self.agent = attachment.agent
        self.model = attachment.model
        self.endpoint = attachment.endpoint
        self.api_key = attachment.api_key
        self.postgres_url = attachment.postgres_url
        self.redis_url = attachment.redis_url
        self._laptops = attachment.laptops

    async def add_machine(self, user: str, *, connected: bool = True) -> Laptop:
        return await self._laptops.add(user, connected=connected)

    async def remove_machine(self, machine: Machine) -> None:
        assert isinstance(machine, Laptop), "it was made here"
        await self._laptops.remove(machine)

    async def let_go(self, user: str, mark: str) -> None:
        self._laptops.let_go(user, mark)

    async def executions(self, user: str) -> Mapping[str, Executions]:
        return self._laptops.executions(user)


class AttachedReplica:
    """The half of `target.Replica` that is the same for all of them, workers and gateways included.

    Attributes:
        name: for people; changes where a replica is replaced by another one.
        port: a loopback port that leads to where it serves.
        admin_port: likewise, to its probes and metrics.
        is_frozen: it was, and has not been woken.
    """

    def __init__(self, slot: str, directory: Path, place: Place | None) -> None:
        """Describe one that is not known yet.

        Args:
            slot: names the file that takes its log.
            place: of a worker, behind the balancer.
        """
        self.name = slot
        self.port = 0
        self.admin_port = 0
        self.is_frozen = False
        self._place = place
        self._log = Process(slot, [], directory=directory, env=os.environ)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def logs(self) -> str:
        return self._log.read_log()

    async def metrics(self) -> Mapping[str, float]:
        try:
            return await read_metrics(self.admin_port)
        except OSError as error:
            raise DrillFailed(f"{self.name}: {error}") from error

    async def serve(self, follow: list[str]) -> None:
        """Call it good: it is ready, and has been started; `follow`: a program that prints its log as it grows."""
        await self._log.stop()
        self._log.argv = follow
        await self._log.start()
        self.is_frozen = False
        self.lead_here()

    async def close(self) -> None:
        """Have nothing to do with it any more."""
        self.lead_away()
        await self._log.stop()

    def lead_here(self) -> None:
        """Lead sidecars to it, if it is a worker."""
        if self._place:
            self._place.take(self.port)

    def lead_away(self) -> None:
        """Lead no new sidecar to it."""
        if self._place:
            self._place.leave()
