"""The whole product on this machine: any number of gateways, workers, relays and sidecars as real processes.

Owns:     one state directory with their logs, pid files, sidecars' journals and the installation's keys, and the
          environment each is given.
Promises: `async with Stack(...)` leaves nothing running; a service keeps its ports over kill and restart.
"""

import base64
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from common.store.postgres import migrate
from harness.balancer import Balancer
from harness.ports import free_port, is_http_ready
from harness.runner import Process, ProcessFailed, hold_directory
from harness.sidecars import Sidecar, Sidecars, mint_api_key, mint_machine_token

READY_WITHIN_S = 30.0
START_ATTEMPTS = 3
# Ours, whatever the shell that started the harness has set for itself.
OWN_VARIABLES = ("TOWLINE_", "REDIS_URL", "DATABASE_URL")


def inherited_environment() -> dict[str, str]:
    """Return the harness' environment without the variables that configure the product."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}


def _keys_of_installation(path: Path) -> dict[str, str]:
    """Read the keys, or make them: what the stores keep encrypted must be read again by the next start."""
    try:
        keys: dict[str, str] = json.loads(path.read_text())
    except FileNotFoundError:
        keys = {
            name: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
            for name in ("TOWLINE_TOKEN_KEYS", "TOWLINE_SECRET_KEYS")
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(keys))
    return keys


async def read_metrics(port: int) -> dict[str, float]:
    """Return what a service measures, by sample, such as `towline_sse_clients` or `x_total{route="/y"}`.

    Args:
        port: a loopback port that leads to its admin port.

    Raises:
        OSError: it does not answer.
    """
    try:
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text
    except httpx.HTTPError as error:
        raise OSError(f"no metrics on port {port}") from error
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


class Service(Process):
    """A gateway, worker or relay: `python -m {module}`, probed on one loopback port and serving, if at all, on another.

    Attributes:
        port: where it serves; chosen at the first start and kept; 0 for one that only calls others.
        admin_port: `/livez`, `/readyz`, `/metrics`.
    """

    def __init__(
        self, name: str, module: str, *, port_variable: str | None, directory: Path, env: Mapping[str, str]
    ) -> None:
        """Describe a service; `port_variable` tells it the port it serves on, None: it serves nothing."""
        super().__init__(name, [sys.executable, "-m", module], directory=directory, env=env)
        self._port_variable = port_variable
        self.port = 0
        self.admin_port = 0

    async def start_ready(self) -> None:
        """Start it and wait until `/readyz` says yes. At the first start another program may take a port: try again.

        Raises:
            ProcessFailed: it did not get ready; the message has the end of its log.
        """
        is_first = not self.admin_port
        for attempts_left in reversed(range(START_ATTEMPTS if is_first else 1)):
            if is_first:
                self.admin_port = free_port()
                self.env["TOWLINE_ADMIN_PORT"] = str(self.admin_port)
                if self._port_variable is not None:
                    self.port = free_port()
                    self.env[self._port_variable] = str(self.port)
            await self.start()
            try:
                await self.wait_ready(lambda: is_http_ready(self.admin_port), within_s=READY_WITHIN_S)
            except ProcessFailed:
                await self.stop()
                if not (attempts_left and "address already in use" in self.read_log().lower()):
                    raise
            else:
                return

    async def read_metrics(self) -> dict[str, float]:
        """As the function of that name. Raises: OSError: it does not answer."""
        return await read_metrics(self.admin_port)


class Gateway(Service):
    """One gateway replica."""

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://127.0.0.1:{self.port}"


class Worker(Service):
    """One worker replica."""

    @property
    def bridge_url(self) -> str:
        """What a sidecar dials to reach this worker and no other."""
        return f"ws://127.0.0.1:{self.port}"


class Relay(Service):
    """One relay replica; it calls upstreams and is called by nobody."""


class Stack:
    """All processes of one installation, on given stores. Any number of them may be added at the same time.

    Attributes:
        gateways, workers, relays, sidecars: in the order they were added, those that are not running included.
        api_key: an API key with every scope, for every user.
        bridge_url: what sidecars dial: a balancer in front of all workers.
    """

    def __init__(self, directory: Path, *, postgres_url: str, redis_url: str, heartbeat_s: float = 10.0) -> None:
        """Describe an installation whose logs and journals go to `directory`; `async with` makes it ready for use."""
        self._directory = directory
        self._postgres_url = postgres_url
        self._env = {
            **inherited_environment(),
            "DATABASE_URL": postgres_url,
            "REDIS_URL": redis_url,
            "TOWLINE_ADMIN_HOST": "127.0.0.1",
            "TOWLINE_LOG_FORMAT": "json",
            # Upstreams are this machine's own; nothing else is called for anybody.
            "TOWLINE_EGRESS_ALLOW": "127.0.0.1,localhost",
        }
        # Each service is given only what it reads: it warns of what it does not know.
        self._heartbeat = {"TOWLINE_HEARTBEAT_S": f"{heartbeat_s:g}"}
        self._keys_of_gateways: dict[str, str] = {}
        self._balancer = Balancer()
        self.sidecars = Sidecars(directory, postgres_url=postgres_url, env=inherited_environment())
        self._cleanup = AsyncExitStack()
        self.gateways: list[Gateway] = []
        self.workers: list[Worker] = []
        self.relays: list[Relay] = []
        self.api_key = ""

    @property
    def bridge_url(self) -> str:
        """What sidecars dial."""
        return f"ws://127.0.0.1:{self._balancer.port}"

    async def __aenter__(self) -> Self:
        """Bring the schema up to date and make an API key; nothing serves yet."""
        async with AsyncExitStack() as cleanup:
            cleanup.enter_context(hold_directory(self._directory))
            keys = _keys_of_installation(self._directory / "keys.json")
            self._keys_of_gateways = {"TOWLINE_TOKEN_KEYS": keys.pop("TOWLINE_TOKEN_KEYS")}
            self._env |= keys
            await migrate(self._postgres_url)
            await self._balancer.start(free_port())
            cleanup.push_async_callback(self._balancer.stop)
            _, self.api_key = await mint_api_key(self._postgres_url)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything: sidecars, and then the services, the last started first."""
        try:
            await self.sidecars.stop()
        finally:
            await self._cleanup.aclose()

    async def add_gateway(self, env: Mapping[str, str] | None = None) -> Gateway:
        """Start one more gateway and wait until it is ready; `env` overrides settings, such as `REDIS_URL`."""
        gateway = Gateway(
            f"gateway-{len(self.gateways) + 1}",
            "gateway",
            port_variable="TOWLINE_HTTP_PORT",
            directory=self._directory,
            env={
                **self._env,
                **self._heartbeat,
                **self._keys_of_gateways,
                "TOWLINE_HTTP_HOST": "127.0.0.1",
                "TOWLINE_UNREADY_S": "0",  # no balancer learns of its leaving, so it waits for none
                **(env or {}),
            },
        )
        self.gateways.append(gateway)
        self._cleanup.push_async_callback(gateway.stop)
        await gateway.start_ready()
        return gateway

    async def add_worker(self, env: Mapping[str, str] | None = None) -> Worker:
        """Start one more worker behind the balancer and wait until it is ready; `env` as for a gateway."""
        worker = Worker(
            f"worker-{len(self.workers) + 1}",
            "worker",
            port_variable="TOWLINE_BRIDGE_PORT",
            directory=self._directory,
            env={**self._env, **self._heartbeat, "TOWLINE_BRIDGE_HOST": "127.0.0.1", **(env or {})},
        )
        self.workers.append(worker)
        self._cleanup.push_async_callback(worker.stop)
        await worker.start_ready()
        self._balancer.backends.append(("127.0.0.1", worker.port))
        return worker

    async def add_relay(self, env: Mapping[str, str] | None = None) -> Relay:
        """Start one more relay and wait until it is ready; `env` as for a gateway."""
        relay = Relay(
            f"relay-{len(self.relays) + 1}",
            "relay",
            port_variable=None,
            directory=self._directory,
            env={**self._env, **(env or {})},
        )
        self.relays.append(relay)
        self._cleanup.push_async_callback(relay.stop)
        await relay.start_ready()
        return relay

    async def add_sidecar(
        self,
        user: str,
        *,
        tools: Sequence[str] = (),
        bridge_url: str | None = None,
        env: Mapping[str, str] | None = None,
        connected: bool = True,
    ) -> Sidecar:
        """Start a sidecar for a user and, if `connected`, wait until a worker has welcomed it.

        Args:
            user: gets a machine token of its own with each sidecar.
            tools: modules or files for `--tools`.
            bridge_url: one worker or a proxy, in place of the balancer.
            env: further variables.
        """
        return await self.sidecars.add(user, bridge_url or self.bridge_url, tools=tools, env=env, connected=connected)

    async def mint_machine_token(self, user: str) -> str:
        """Make a machine token for a user, as `towline tokens` does."""
        return await mint_machine_token(self._postgres_url, user)
