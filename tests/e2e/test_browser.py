"""A real browser follows a run: its EventSource knows nothing of us but the standard, and misses nothing.

Needs Chromium or Chrome (Debian: `chromium`). Without one the test is left out, unless `REQUIRE_BROWSER` is set.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import eventually

from harness.agent import Agent, Script
from harness.balancer import Balancer
from harness.browser import find_browser, open_browser
from harness.ports import free_port
from harness.runner import temporary_directory
from harness.servers import open_servers
from harness.stack import Service, Stack

RUN = "run-1"
RATE = 20.0
# How many events are seen between cuts: enough to know that the stream runs.
BETWEEN_CUTS = 20

PAGE = b"""<!doctype html>
<title>A run</title>
<script>
  const seen = [], own = [], breaks = [];
  let source;
  function follow(url) {
    source = new EventSource(url);
    for (const type of ["output", "result"])
      source.addEventListener(type, event => seen.push([type, event.lastEventId, JSON.parse(event.data)]));
    for (const type of ["towline.gap", "towline.run.ended", "towline.end"])
      source.addEventListener(type, event => own.push([type, event.lastEventId, JSON.parse(event.data)]));
    source.onerror = () => breaks.push([seen.length, source.readyState]);
  }
</script>
"""


@pytest.mark.timeout(120)
async def test_an_eventsource_follows_a_run_through_a_gateway_kill_and_a_relay_kill() -> None:
    """The gateway that serves the browser is killed, and then the relay that follows the run, both in mid-run.

    The page sees every event once, in order; after the end its one reconnect is answered 204, and it stays away.
    """
    if (program := find_browser()) is None:
        assert not os.environ.get("REQUIRE_BROWSER"), "REQUIRE_BROWSER is set, and there is no Chromium"
        pytest.skip("no Chromium or Chrome here")
    async with contextlib.AsyncExitStack() as cleanup:
        directory = Path(cleanup.enter_context(temporary_directory()))
        urls = await cleanup.enter_async_context(open_servers(directory / "stores"))
        stack = await cleanup.enter_async_context(
            Stack(directory / "stack", postgres_url=urls.postgres_url, redis_url=urls.redis_url)
        )
        origin = await cleanup.enter_async_context(_website())
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(stack.add_gateway({"TOWLINE_CORS_ORIGINS": origin}))
                group.create_task(stack.add_relay())
        balancer = Balancer([("127.0.0.1", gateway.port) for gateway in stack.gateways])
        await balancer.start(free_port())
        cleanup.push_async_callback(balancer.stop)

        agent = await cleanup.enter_async_context(Agent())
        stream = agent.add("agent", Script(rate=RATE))
        page = await cleanup.enter_async_context(open_browser(program, directory))
        await page.open(origin)
        token = await _follow(stack, agent.url("agent"))
        url = f"http://127.0.0.1:{balancer.port}/v1/runs/{RUN}/events?access_token={token}"
        await page.evaluate(f"follow({json.dumps(url)})")

        async def has_seen(count: int) -> bool:
            return bool(await page.evaluate("seen.length") >= count)

        await eventually(lambda: has_seen(BETWEEN_CUTS), within_s=30)
        gateway = await _with_one(stack.gateways, "towline_sse_clients")
        gateway.kill()
        await gateway.wait(within_s=10)
        said = stream.emitted
        await eventually(lambda: has_seen(said + BETWEEN_CUTS), within_s=30)
        relay = await _with_one(stack.relays, "towline_relay_runs_owned")
        relay.kill()
        await relay.wait(within_s=10)
        said_by_then = stream.emitted
        await eventually(lambda: has_seen(said_by_then + BETWEEN_CUTS), within_s=30)
        last = stream.end()

        async def is_closed() -> bool:
            return bool(await page.evaluate("source.readyState === EventSource.CLOSED"))

        await eventually(is_closed, within_s=30)
        seen: list[tuple[str, str, dict[str, Any]]] = await page.evaluate("seen")
        own: list[tuple[str, str, dict[str, Any]]] = await page.evaluate("own")
        breaks: list[tuple[int, int]] = await page.evaluate("breaks")
        requests = await _event_requests(stack)

    assert [json.loads(data["data"])["n"] for _, _, data in seen] == list(range(1, last + 1))
    assert [kind for kind, _, _ in seen] == ["output"] * (last - 1) + ["result"]
    ids = [event_id for _, event_id, _ in seen]
    assert len(set(ids)) == len(ids)
    assert [kind for kind, _, _ in own] == ["towline.run.ended", "towline.end"]
    # Both cuts were in mid-run: of the gateway's the page has noticed, of the relay's the agent.
    assert BETWEEN_CUTS <= breaks[0][0] <= said
    first, second = stream.requests
    assert first.last_event_id is None
    assert said < int(second.last_event_id or 0) <= said_by_then
    # One request went on after the gateway's end, up to the run's; one was answered 204, and none followed.
    assert requests == {"200": 1, "204": 1}


async def _follow(stack: Stack, url: str) -> str:
    """Have the run followed; returns a stream token for it."""
    body = {"sources": [{"source": "agent", "url": url, "resume": "ids"}]}
    async with httpx.AsyncClient(
        base_url=stack.gateways[0].url, headers={"Authorization": f"Bearer {stack.api_key}"}
    ) as http:
        (await http.put(f"/v1/runs/{RUN}", json=body)).raise_for_status()
        response = await http.post("/v1/stream-tokens", json={"runs": [RUN]})
        return str(response.raise_for_status().json()["token"])


async def _with_one(services: Sequence[Service], metric: str) -> Service:
    """The replica whose metric is 1 while the others' are 0."""

    async def find() -> Service | None:
        values = [(await service.read_metrics())[metric] for service in services]
        return services[values.index(1)] if sorted(values) == [0] * (len(values) - 1) + [1] else None

    found = await eventually(find)
    assert found is not None
    return found


async def _event_requests(stack: Stack) -> dict[str, int]:
    """Requests for events at the gateways that are left, by status."""
    counts: dict[str, int] = {}
    for gateway in stack.gateways:
        if not gateway.is_running:
            continue
        for sample, value in (await gateway.read_metrics()).items():
            if sample.startswith("towline_http_requests_total{") and 'route="/v1/runs/{run}/events"' in sample:
                status = sample.partition('code="')[2].partition('"')[0]
                counts[status] = counts.get(status, 0) + round(value)
    return counts


@contextlib.asynccontextmanager
async def _website() -> AsyncIterator[str]:
    """A site of another origin than the gateway's; yields that origin."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(PAGE)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + PAGE)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
