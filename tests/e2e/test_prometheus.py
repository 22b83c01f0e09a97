"""What a real Prometheus sees of the whole product: the documented metrics, no ids, and counters that only grow.

The tests stand in order: each one's cut is the next one's past. See `prometheus_server.py` for what they need.
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
import sidecar_tools
import websockets
from prometheus_server import SCRAPE_CONFIGURATION, Prometheus, Series, promtool, read_documentation, require
from support import eventually

from harness.agent import Agent, Script
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.runner import temporary_directory
from harness.stack import Service, Stack
from towline.client import AgentPut, Client, SourceFollow

pytestmark = pytest.mark.timeout(300)

# In every id, address and text that the tests make up: none of it may be in a metric.
MARK = "zq7"
USER = f"{MARK}-ada@example.com"
EACH = 5_000
CONNECTIONS = 16
# New status codes of known routes, at most.
GROWTH_MAX = 50
SCRAPE_WITHIN_S = 0.5
# The metric's name goes to a label, for `resets` drops it.
RESETS = """
    resets(
      label_replace({__name__=~"towline_.+_(total|bucket|count|sum)"}, "metric", "$1", "__name__", "(.+)")[10m:1s]
    ) > 0
"""
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Scene:
    """Two gateways, two workers, two relays, a machine and an agent, under a Prometheus."""

    def __init__(self, stack: Stack, agent: Agent, stores: Sequence[EmbeddedPostgres | EmbeddedValkey]) -> None:
        self.stack = stack
        self.agent = agent
        self.stores = stores
        self.services = {"gateway": stack.gateways, "worker": stack.workers, "relay": stack.relays}
        self.prometheus: Prometheus

    def all_services(self) -> Iterator[Service]:
        return itertools.chain(*self.services.values())

    async def text(self) -> str:
        """What all processes show, one after the other."""
        async with httpx.AsyncClient() as http:
            return "".join([(await http.get(_metrics_url(service))).text for service in self.all_services()])

    async def scraped(self) -> None:
        """Return when every process has been scraped, from its head, after this call."""
        began = time.time()

        async def have_been() -> bool:
            # Of `up` itself: the timestamp of any other expression is that of the query.
            newest = await self.prometheus.query("timestamp(up) and up == 1")
            return len(newest) == 6 and min(series.value for series in newest) > began

        await eventually(have_been, within_s=30)

    async def samples(self) -> int:
        """How many series all processes have together."""
        await self.scraped()
        (total,) = await self.prometheus.query("sum(scrape_samples_scraped)")
        return round(total.value)


def _metrics_url(service: Service) -> str:
    return f"http://127.0.0.1:{service.admin_port}/metrics"


@pytest.fixture(scope="module")
async def scene() -> AsyncIterator[Scene]:
    require("prometheus")
    async with contextlib.AsyncExitStack() as cleanup:
        directory = Path(cleanup.enter_context(temporary_directory()))
        postgres, valkey = EmbeddedPostgres(directory), EmbeddedValkey(directory)
        for server in (postgres, valkey):
            cleanup.push_async_callback(server.stop)
            await server.start()
        stack = await cleanup.enter_async_context(
            Stack(directory / "stack", postgres_url=postgres.url, redis_url=valkey.url)
        )
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(stack.add_gateway())
                group.create_task(stack.add_worker())
                group.create_task(stack.add_relay())
        executions = directory / "executions"
        executions.touch()
        env = {"EXECUTIONS": str(executions), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        await stack.add_sidecar(USER, tools=[sidecar_tools.__file__], env=env)
        scene = Scene(stack, await cleanup.enter_async_context(Agent()), [postgres, valkey])
        scene.prometheus = Prometheus(directory, scene.services)
        cleanup.push_async_callback(scene.prometheus.process.stop)
        await scene.prometheus.start()
        for number, gateway in enumerate(stack.gateways):
            async with asyncio.timeout(60), Client(gateway.url, stack.api_key) as client:
                await _some_of_each(scene, client, f"{MARK}-{number}")
        yield scene


async def _some_of_each(scene: Scene, client: Client, name: str) -> None:
    """A job, a run and a turn to their ends, and jobs that end otherwise."""
    await client.submit(USER, "look", idempotency_key=f"{name}-look", wait_s=30)
    await client.submit(USER, "give", {"kind": "error"}, idempotency_key=f"{name}-give", wait_s=30)
    waiting = await client.submit(f"{name}-away", "look", idempotency_key=f"{name}", if_offline="queue")
    await client.cancel_job(waiting.job)
    await client.presence(USER, probe=True)

    scene.agent.add(name, Script(rate=50, total=20))
    await client.follow_run(name, [SourceFollow("agent", scene.agent.url(name), "ids")])
    async for _ in client.events(name):
        pass

    await client.put_agent(name, AgentPut("echo"))
    thread = await client.create_thread(name, user=USER)
    posted = await client.post_entry(thread.thread, "Hello", idempotency_key=f"{name}-entry")
    turn = await client.read_turn(posted.turn.turn, wait_s=30)
    assert turn.state == "completed"


# ---- what is there


async def test_every_documented_metric_is_there_with_its_type_and_labels(scene: Scene) -> None:
    """On every replica that the table names, also of what has not happened yet; and none that the table lacks."""
    await scene.scraped()
    documented = read_documentation()
    assert len(documented) > 30
    types = await scene.prometheus.types()
    for metric in documented:
        assert types.get(metric.name.removesuffix("_total")) == metric.type, metric.name
        suffix = "_count" if metric.type == "histogram" else ""
        for service in metric.services:
            for replica in scene.services[service]:
                selector = f'{metric.name}{suffix}{{job="{service}", instance="127.0.0.1:{replica.admin_port}"}}'
                found = await scene.prometheus.query(selector)
                assert found, f"{replica.name} has no {metric.name}"
                for series in found:
                    assert series.labels.keys() - {"__name__", "job", "instance"} == metric.labels, series.labels
                if metric.values:
                    (label,) = metric.labels
                    assert {series.labels[label] for series in found} <= metric.values, metric.name
    assert types.keys() == {metric.name.removesuffix("_total") for metric in documented}


async def test_promtool_finds_no_fault_with_any_replicas_metrics(scene: Scene) -> None:
    """Names, help texts and units are as Prometheus recommends them."""
    async with httpx.AsyncClient() as http:
        for service in scene.all_services():
            text = (await http.get(_metrics_url(service))).text
            ours = [line for line in text.splitlines(keepends=True) if "towline_" in line]
            assert ours
            promtool("check", "metrics", text="".join(ours))


def test_promtool_takes_the_scrape_configuration() -> None:
    promtool("check", "config", "--syntax-only", str(SCRAPE_CONFIGURATION))


# ---- what is not


async def test_thousands_of_users_jobs_runs_paths_and_methods_add_no_series(scene: Scene) -> None:
    """Each known route is asked once before, so that what grows afterwards grows by what is asked for."""
    await _crowd(scene, range(3))
    await _hostile_machines(scene, range(2))
    before = await scene.samples()

    await _crowd(scene, range(3, 3 + EACH))
    await _hostile_machines(scene, range(2, 40))

    grown = await scene.samples() - before
    assert grown < GROWTH_MAX
    async with httpx.AsyncClient(base_url=scene.stack.gateways[0].url) as http:
        assert (await http.get(f"/{MARK}/nowhere")).status_code == 404
    text = await scene.text()
    assert MARK not in text
    assert "@" not in text
    assert not UUID.findall(text)
    assert scene.stack.api_key not in text
    (unrouted,) = await scene.prometheus.query('sum(towline_http_requests_total{route="unrouted"})')
    assert unrouted.value >= EACH


async def _crowd(scene: Scene, numbers: range) -> None:
    """Of each kind one request per number: a job for a user and a tool of its own, its run, a wild path and method."""

    def requests(number: int) -> list[tuple[str, str, str]]:
        wild = random.Random(number).randbytes(8).hex()
        body = f'{{"name":"{MARK}-tool-{number}","if_offline":"queue"}}'
        return [
            ("POST", f"/v1/users/{MARK}-user-{number}@example.com/jobs", body),
            ("GET", f"/v1/users/{MARK}-user-{number}@example.com/presence", ""),
            ("GET", f"/v1/runs/{MARK}-run-{number}/events", ""),
            ("GET", f"/v1/{MARK}-{wild}/{number}?{MARK}={wild}", ""),
            (f"{MARK}{number}".upper(), "/v1/runs", ""),
        ]

    async def send(share: Sequence[int], port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in share:
            for method, path, body in requests(number):
                writer.write(
                    f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {scene.stack.api_key}\r\n"
                    f"Idempotency-Key: {MARK}-{number}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
                )
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                status = int(head.split()[1])
                assert status in {200, 202, 404, 405}, (method, path, head)
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
        writer.close()

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        ports = itertools.cycle([gateway.port for gateway in scene.stack.gateways])
        # An even number of connections: each kind of request reaches both gateways also when there are few.
        for first in range(min(CONNECTIONS, len(numbers))):
            group.create_task(send(numbers[first::CONNECTIONS], next(ports)))


async def _hostile_machines(scene: Scene, numbers: range) -> None:
    """Machines whose paths, tokens, subprotocols and frames are texts of their own."""
    token = await scene.stack.mint_machine_token(f"{MARK}-hostile")
    for number in numbers:
        url = scene.stack.workers[number % 2].bridge_url
        for path, credential, protocol in (
            ("/v1/bridge", f"{MARK}-token-{number}", "towline.v1"),
            (f"/v1/{MARK}-{number}", token, "towline.v1"),
            ("/v1/bridge", token, f"{MARK}.v{number}"),
        ):
            with contextlib.suppress(websockets.InvalidStatus, websockets.InvalidHandshake):
                await websockets.connect(
                    url + path,
                    additional_headers={"Authorization": f"Bearer {credential}"},
                    subprotocols=[websockets.Subprotocol(protocol)],
                )
        async with websockets.connect(
            f"{url}/v1/bridge",
            additional_headers={"Authorization": f"Bearer {token}"},
            subprotocols=[websockets.Subprotocol("towline.v1")],
        ) as socket:
            await socket.send(f'{{"type":"hello","machine":["{MARK}-{number}"]}}')
            with contextlib.suppress(websockets.ConnectionClosed):
                await socket.recv()


async def test_a_scrape_is_quick_and_asks_no_store(scene: Scene) -> None:
    """With thousands of queued jobs, and both stores standing still: nothing in it can have come from them."""
    async with httpx.AsyncClient(timeout=10) as http:

        async def seconds(service: Service) -> float:
            began = time.monotonic()
            assert "towline_build_info" in (await http.get(_metrics_url(service))).text
            return time.monotonic() - began

        async def is_known() -> bool:
            depth = await scene.prometheus.query('max(towline_queue_depth{queue="queued"})')
            return bool(depth) and depth[0].value >= EACH

        await eventually(is_known, within_s=60)
        for store in scene.stores:
            store.freeze()
        try:
            for service in scene.all_services():
                # The best of three: this machine has other things to do, too.
                assert min([await seconds(service) for _ in range(3)]) < SCRAPE_WITHIN_S, service.name
        finally:
            for store in scene.stores:
                store.thaw()


# ---- over time


async def test_no_replica_writes_a_file(scene: Scene) -> None:
    """One process per replica has its metrics in memory: nothing to be wiped, nothing left behind by the dead."""
    for service in scene.all_services():
        for process in (root := psutil.Process(service.pid), *root.children(recursive=True)):
            written = [file.path for file in process.open_files() if set(file.mode) & set("wa+")]
            assert set(written) <= {str(service.log)}, service.name


async def test_counters_never_go_backwards_in_the_life_of_a_process(scene: Scene) -> None:
    """A killed worker's gauges are gone before it is back, and only its own counters begin anew."""
    await scene.scraped()
    assert not await scene.prometheus.query(RESETS)

    killed = scene.stack.workers[0]
    instance = f"127.0.0.1:{killed.admin_port}"
    gauges = f'towline_bridge_sockets{{instance="{instance}"}}'
    assert await scene.prometheus.query(gauges)
    killed.kill()
    await killed.wait(within_s=10)

    await _until(lambda: scene.prometheus.query(gauges), lambda found: not found)
    await killed.start_ready()
    await scene.scraped()
    begun_anew = await _until(lambda: scene.prometheus.query(RESETS), bool)
    assert {series.labels["instance"] for series in begun_anew} == {instance}


async def _until(
    query: Callable[[], Awaitable[list[Series]]], condition: Callable[[list[Series]], bool]
) -> list[Series]:
    """The first answer that is as it should be."""
    answers: list[list[Series]] = []

    async def is_so() -> bool:
        answers.append(await query())
        return condition(answers[-1])

    await eventually(is_so, within_s=30)
    return answers[-1]
