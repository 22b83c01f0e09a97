"""The gateway as a process: start without stores, metrics, CORS, and what its logs never say."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from gateway_door import Door, open_door
from support import eventually
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from harness.faults import TcpProxy
from harness.servers import Servers

ORIGIN = "https://app.example.com"


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway that browsers of one origin may call."""
    env = {"TOWLINE_CORS_ORIGINS": ORIGIN}
    async with open_door(servers, postgres_url, state_directory / "process", env=env) as opened:
        yield opened


@pytest.mark.parametrize("store", ["REDIS_URL", "DATABASE_URL"])
async def test_a_gateway_waits_for_its_stores(door: Door, store: str) -> None:
    """Started while a store is away it lives, says why it is not ready, and is ready ten seconds after the store."""
    proxy = TcpProxy(door.stack._env[store])
    url = await proxy.start()
    proxy.refuse()
    starting = asyncio.create_task(door.stack.add_gateway({store: url}))
    try:
        admin_port = await eventually(lambda: len(door.stack.gateways) == 2 and door.stack.gateways[1].admin_port)

        async def reason() -> str:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}") as client:
                try:
                    assert (await client.get("/livez")).status_code == 200
                    answer = await client.get("/readyz")
                except httpx.ConnectError as error:
                    raise AssertionError("not listening yet") from error
            assert (answer.status_code, answer.json()["state"]) == (503, "starting")
            dependency = answer.json()["dependencies"][{"REDIS_URL": "redis", "DATABASE_URL": "postgres"}[store]]
            return str(dependency.get("problem", ""))

        assert await eventually(reason, within_s=15)
        await proxy.heal()
        healed_at = time.monotonic()
        await starting
        assert time.monotonic() - healed_at < 10
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        for gateway in door.stack.gateways[1:]:
            await gateway.stop()
        del door.stack.gateways[1:]
        await proxy.stop()


async def test_a_store_that_comes_back_needs_no_restart(door: Door) -> None:
    """Postgres is out of reach and returns: 503 with Retry-After meanwhile; the process stays ready; work goes on."""
    proxy = TcpProxy(door.stack._env["DATABASE_URL"])
    gateway = await door.add_gateway({"DATABASE_URL": await proxy.start()})
    try:
        async with door.client(gateway) as client:

            async def submit() -> httpx.Response:
                return await client.post(
                    "/v1/users/back/jobs",
                    json={"name": "write", "if_offline": "queue"},
                    headers={"idempotency-key": "k"},
                )

            assert (await submit()).status_code == 202
            proxy.refuse()
            proxy.cut()
            answer = await submit()
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/store-unavailable")
            assert answer.headers["retry-after"]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}") as admin:
                assert (await admin.get("/readyz")).status_code == 200
            await proxy.heal()

            async def is_back() -> bool:
                return (await submit()).status_code == 202

            await eventually(is_back, within_s=15)
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def test_metrics_have_templates_and_no_ids(door: Door) -> None:
    """Whatever paths and methods are tried, the number of series stays small."""
    async with door.client() as client:
        await client.get("/v1/users/secret-user/presence?probe=false")
        for n in range(5):
            await client.get(f"/made/up/{n}")
            await client.request(f"ODD{n}", "/v1/users/secret-user/jobs")
    async with httpx.AsyncClient() as admin:
        text = (await admin.get(f"http://127.0.0.1:{door.stack.gateways[0].admin_port}/metrics")).text
    assert 'towline_http_requests_total{code="200",method="GET",route="/v1/users/{user}/presence"}' in text
    assert 'towline_http_requests_total{code="404",method="GET",route="unrouted"} 5.0' in text
    assert 'towline_http_requests_total{code="405",method="other",route="/v1/users/{user}/jobs"} 5.0' in text
    assert "secret-user" not in text
    assert "ODD" not in text


async def test_logs_have_ids_and_no_secrets(door: Door) -> None:
    """One line per accepted job, with what finds it again; never a key, a header, a query or arguments."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with door.client() as client:
        answer = await client.post(
            "/v1/users/log/jobs",
            json={"name": "write", "args": {"x": "hidden-argument"}, "if_offline": "queue"},
            headers={
                "idempotency-key": "hidden-key",
                "traceparent": trace,
                "x-request-id": "req-1",
                "x-own": "hidden-header",
            },
        )
        assert (await client.get("/v1/users/log/jobs?state=hidden-query")).status_code == 400
    log = door.stack.gateways[0].read_log()
    (line,) = [line for line in log.splitlines() if answer.json()["job"] in line]
    for expected in ('"user":"log"', trace, '"request_id":"req-1"', '"event":"job_accepted"'):
        assert expected in line
    assert "hidden" not in log
    assert door.stack.api_key not in log


async def test_browsers_of_the_allowed_origin_may_call(door: Door) -> None:
    """Preflight and answer, refusals included; another origin gets no permission."""
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,idempotency-key",
    }
    async with httpx.AsyncClient(base_url=door.stack.gateways[0].url) as client:
        allowed = await client.options("/v1/users/a/jobs", headers={"origin": ORIGIN, **preflight})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert allowed.headers["x-request-id"]
        refused = await client.get("/v1/users/a/presence", headers={"origin": ORIGIN})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert "Retry-After" in refused.headers["access-control-expose-headers"]
        other = await client.get("/v1/users/a/presence", headers={"origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_sidecar_that_dials_a_gateway_is_told_so(door: Door) -> None:
    """404 and why; a bare 403 reads like a refused token."""
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"{door.stack.gateways[0].url.replace('http', 'ws')}/v1/bridge")
    assert refused.value.response.status_code == 404
    assert refused.value.response.headers["X-Request-Id"]
    assert b"a sidecar dials a worker" in (refused.value.response.body or b"")
