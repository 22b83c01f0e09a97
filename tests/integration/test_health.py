"""The admin port: probes, what they say of the stores, metrics."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from plain_http import AT_ONCE_S, DEADLINE_S, HOST, get, open_request, read_until
from support import eventually

from common.process import health
from common.process.health import serve_admin
from common.process.http_server import open_listener
from common.process.lifecycle import Lifecycle
from common.process.metrics import ProcessMetrics, new_registry


class Store:
    """What a check asks; up, down or hanging as the test says."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.hangs = False

    async def check(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.problem:
            raise ConnectionError(self.problem)


class Admin(NamedTuple):
    port: int
    lifecycle: Lifecycle
    redis: Store
    postgres: Store
    task: "asyncio.Task[None]"


@pytest.fixture
async def admin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Admin]:
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(health, "LOOP_TICK_S", 0.01)
    listener = open_listener(HOST, 0)
    port = listener.getsockname()[1]
    lifecycle, redis, postgres, registry = Lifecycle(), Store(), Store(), new_registry()
    metrics = ProcessMetrics(registry, service="test", revision="unknown")
    checks = {"redis": redis.check, "postgres": postgres.check}
    task = asyncio.create_task(
        serve_admin(listener, lifecycle=lifecycle, registry=registry, metrics=metrics, checks=checks)
    )
    yield Admin(port, lifecycle, redis, postgres, task)
    lifecycle.mark_stopped()
    async with asyncio.timeout(DEADLINE_S):
        await task


async def test_readiness_follows_the_lifecycle_and_liveness_does_not(admin: Admin) -> None:
    async def statuses() -> tuple[int, int, str]:
        ready = await get(admin.port, "/readyz")
        return (await get(admin.port, "/livez")).status, ready.status, json.loads(ready.body)["state"]

    assert await statuses() == (200, 503, "starting")
    admin.lifecycle.mark_ready()
    assert await statuses() == (200, 200, "ready")
    admin.lifecycle.begin_drain("test")
    assert await statuses() == (200, 503, "draining")


async def test_a_store_that_is_away_shows_but_changes_no_status(admin: Admin) -> None:
    """Also one that answers nothing at all, and without hiding the other."""
    admin.lifecycle.mark_ready()

    async def dependencies() -> dict[str, Any]:
        ready = await get(admin.port, "/readyz")
        assert (ready.status, (await get(admin.port, "/livez")).status) == (200, 200)
        found: dict[str, Any] = json.loads(ready.body)["dependencies"]
        return found

    async def up() -> dict[str, Any]:
        return {name: state["up"] for name, state in (await dependencies()).items()}

    async def is_up(redis: bool, postgres: bool) -> bool:
        return await up() == {"redis": redis, "postgres": postgres}

    await eventually(lambda: is_up(True, True))
    since = (await dependencies())["postgres"]["since"]

    admin.redis.problem = "connection refused"
    await eventually(lambda: is_up(False, True))
    state = await dependencies()
    assert state["redis"]["problem"] == "connection refused"
    assert state["postgres"]["since"] == since
    metrics = (await get(admin.port, "/metrics")).body
    assert 'towline_dependency_up{dependency="redis"} 0.0' in metrics
    assert 'towline_dependency_up{dependency="postgres"} 1.0' in metrics

    admin.redis.problem, admin.postgres.hangs = None, True
    await eventually(lambda: is_up(True, False))
    assert "no answer" in (await dependencies())["postgres"]["problem"]


async def test_metrics_come_as_text_or_as_openmetrics(admin: Admin) -> None:
    plain = await get(admin.port, "/metrics")
    assert "content-type: text/plain" in plain.head.lower()
    assert 'towline_build_info{python="' in plain.body
    openmetrics = await get(admin.port, "/metrics", "Accept: application/openmetrics-text; version=1.0.0")
    assert "content-type: application/openmetrics-text" in openmetrics.head.lower()
    assert openmetrics.body.endswith("# EOF\n")


async def test_a_blocked_loop_shows_as_lag(admin: Admin) -> None:
    async def slow_ticks() -> float:
        lines = (await get(admin.port, "/metrics")).body.splitlines()
        counts = {
            line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if "loop_lag" in line and line[0] != "#"
        }
        return counts["towline_loop_lag_seconds_count"] - counts['towline_loop_lag_seconds_bucket{le="0.25"}']

    assert await slow_ticks() == 0
    time.sleep(0.3)  # noqa: ASYNC251  (what must never happen in a service)
    await eventually(slow_ticks)


async def test_the_admin_port_answers_until_the_end_and_then_goes(admin: Admin) -> None:
    admin.lifecycle.begin_drain("test")
    assert (await get(admin.port, "/livez")).status == 200
    reader, writer = await open_request(admin.port, "/livez")  # kept alive by a scraper
    await read_until(reader, b"alive")

    began = time.monotonic()
    admin.lifecycle.mark_stopped()
    async with asyncio.timeout(DEADLINE_S):
        await admin.task

    assert time.monotonic() - began < AT_ONCE_S
    writer.close()
