"""What the probes of the manifests see while a store fails: nothing to restart or to take away, but the reason."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from manifests import SERVICES, kind_objects, pod_of
from support import eventually

from harness.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from harness.faults import TcpProxy
from harness.runner import temporary_directory
from harness.sidecars import Sidecar
from harness.stack import Service, Stack

# Longer than a check and its timeout together; the probes of a kubelet come a few times in it.
FAULT_S = 12.0
TOLD_WITHIN_S = 10.0
SLOW_S = 3.0


class Probe(NamedTuple):
    """A probe as the manifest of a service has it."""

    path: str
    timeout_s: float


def _probe(service: str, name: str) -> Probe:
    (container,) = pod_of(f"Deployment/{service}", kind_objects()).containers
    probe = container[f"{name}Probe"]
    return Probe(probe["httpGet"]["path"], probe["timeoutSeconds"])


class World:
    """One of each service and a sidecar, on stores of their own behind proxies."""

    def __init__(
        self, stack: Stack, sidecar: Sidecar, stores: dict[str, EmbeddedServer], proxies: dict[str, TcpProxy]
    ) -> None:
        self.stores = stores
        self.proxies = proxies
        self.services: dict[str, Service] = dict(
            zip(SERVICES, (stack.gateways[0], stack.workers[0], stack.relays[0]), strict=True)
        )
        self.sidecar = sidecar

    async def dependencies(self, service: str) -> Any:
        """What `/readyz` says of the stores."""
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"http://127.0.0.1:{self.services[service].admin_port}/readyz")
        return answer.json()["dependencies"]

    async def tells(self, store: str, *, up: bool) -> None:
        """Wait until every service says so, as a probe's reader and as a metric."""
        for name, service in self.services.items():

            async def is_told(name: str = name, service: Service = service) -> bool:
                said = (await self.dependencies(name))[store]
                value = (await service.read_metrics())[f'towline_dependency_up{{dependency="{store}"}}']
                return bool(said["up"] is up and value == up and ("problem" in said) is not up)

            await eventually(is_told, within_s=TOLD_WITHIN_S)

    async def probe_for(self, seconds: float) -> list[str]:
        """Probe every service each second, as a kubelet does; returns what failed."""
        failures = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            answers = await asyncio.gather(
                *(self.ask(service, probe) for service in SERVICES for probe in ("liveness", "readiness"))
            )
            failures += [answer for answer in answers if answer]
            await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))
        return failures

    async def ask(self, service: str, name: str) -> str:
        """Have a probe answered within its own timeout; returns why it failed, nothing if it did not."""
        probe = _probe(service, name)
        try:
            async with asyncio.timeout(probe.timeout_s), httpx.AsyncClient(timeout=None) as http:
                answer = await http.get(f"http://127.0.0.1:{self.services[service].admin_port}{probe.path}")
        except (TimeoutError, httpx.HTTPError) as error:
            return f"{name} of the {service}: {error!r}"
        return "" if answer.status_code == 200 else f"{name} of the {service}: {answer.status_code}"


@pytest.fixture(scope="module")
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as cleanup:
        directory = Path(cleanup.enter_context(temporary_directory()))
        stores: dict[str, EmbeddedServer] = {
            "redis": EmbeddedValkey(directory),
            "postgres": EmbeddedPostgres(directory),
        }
        proxies = {}
        for name, store in stores.items():
            cleanup.push_async_callback(store.stop)
            proxies[name] = TcpProxy(await store.start())
            await proxies[name].start()
            cleanup.push_async_callback(proxies[name].stop)
        stack = await cleanup.enter_async_context(
            Stack(directory / "stack", postgres_url=proxies["postgres"].url, redis_url=proxies["redis"].url)
        )
        await asyncio.gather(stack.add_gateway(), stack.add_worker(), stack.add_relay())
        sidecar = await stack.add_sidecar("ada")
        yield World(stack, sidecar, stores, proxies)


@pytest.mark.parametrize("store", ["redis", "postgres"])
async def test_a_store_that_hangs_changes_no_probe_and_is_told_of(world: World, store: str) -> None:
    """Restarting every pod, or taking all out of service at once, would not bring it back. The socket stays."""
    await world.tells(store, up=True)
    connected = world.sidecar.read_log().count('"event":"connected"')
    world.stores[store].freeze()
    try:
        probing = asyncio.create_task(world.probe_for(FAULT_S))
        await world.tells(store, up=False)
        assert await probing == []
    finally:
        world.stores[store].thaw()
    await world.tells(store, up=True)
    assert world.sidecar.read_log().count('"event":"connected"') == connected


async def test_stores_that_are_slow_change_no_probe(world: World) -> None:
    """Three seconds a reply, from both."""
    for proxy in world.proxies.values():
        proxy.delay(SLOW_S, "to_client")
    try:
        assert await world.probe_for(FAULT_S) == []
    finally:
        for proxy in world.proxies.values():
            await proxy.heal()
    for store in world.stores:
        await world.tells(store, up=True)


async def test_a_loop_that_does_not_turn_fails_both_probes(world: World) -> None:
    """Nothing but the loop itself answers them: a process that stands still is restarted."""
    for service in SERVICES:
        world.services[service].freeze()
        try:
            for name in ("liveness", "readiness"):
                assert "TimeoutError" in await world.ask(service, name)
        finally:
            world.services[service].thaw()
        await eventually(lambda service=service: _passes(world, service))


async def _passes(world: World, service: str) -> bool:
    return not any([await world.ask(service, name) for name in ("liveness", "readiness")])
