"""The admin port: /livez, /readyz, /metrics; and what stands behind the probes.

Owns:     the probes and the watch over loop and stores.
Promises: a store that is away shows in the body of /readyz and in `towline_dependency_up`, never in a probe's status:
          stores are shared, and readiness tied to them would take out every replica at once.
Used by:  every service.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.errors import OtherMigrations, StoreUnavailable
from common.process.backoff import Backoff
from common.process.http_server import serve
from common.process.lifecycle import Lifecycle, State
from common.process.metrics import ProcessMetrics

logger = structlog.get_logger(__name__)

ADMIN_CLOSE_S = 0.5

# Often enough for a probe's period, rare enough to cost nothing; each check has a deadline, so one hung store does
# not hide the other.
CHECK_EVERY_S = 5.0
CHECK_TIMEOUT_S = 3.0

LOOP_TICK_S = 0.25
# From here on a lag is worth a line in the log: probes, leases and presence have deadlines of seconds.
LOOP_BLOCKED_S = 1.0

Check = Callable[[], Awaitable[object]]


async def serve_admin(
    listener: socket.socket,
    *,
    lifecycle: Lifecycle,
    registry: CollectorRegistry,
    metrics: ProcessMetrics,
    checks: Mapping[str, Check],
) -> None:
    """Serve the admin port until `lifecycle.stopped`, and watch the loop and the stores meanwhile.

    Start it before the stores are reached for: a process that still waits for them is alive, though not ready.

    Args:
        checks: one per store, by its name in `metrics.DEPENDENCIES`; raises when the store does not answer.
    """
    dependencies = Dependencies(metrics.dependency_up, checks)
    async with asyncio.TaskGroup() as group:
        watches = [
            group.create_task(run_loop_watch(metrics), name="loop-watch"),
            group.create_task(dependencies.run_checks(), name="dependency-checks"),
        ]
        app = admin_app(lifecycle, dependencies, registry)
        await serve(app, listener, stop=lifecycle.stopped, budget_s=ADMIN_CLOSE_S)
        for watch in watches:
            watch.cancel()


async def wait_for_stores(checks: Mapping[str, Check]) -> None:
    """Wait until every store is there and fit to be used; a process that waits is alive, not ready."""
    backoff = Backoff(first_s=0.2, cap_s=2.0)
    while True:
        try:
            for check in checks.values():
                await check()
        except (StoreUnavailable, OtherMigrations, ValueError) as error:
            logger.warning("waiting_for_stores", error=str(error))
            await asyncio.sleep(backoff.next_s())
        else:
            return


class Dependencies:
    """Whether each store answers, as seen by this process every few seconds."""

    def __init__(self, up: Mapping[str, Gauge], checks: Mapping[str, Check]) -> None:
        self._up = up
        self._checks = checks
        self._states: dict[str, dict[str, Any]] = {name: {"up": None} for name in checks}

    def states(self) -> dict[str, dict[str, Any]]:
        """By name: `up` (None before the first check), `since` (RFC 3339) and, when down, `problem`."""
        return self._states

    async def run_checks(self) -> None:
        """Check all stores at once, again and again, until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.gather(*(self._check_once(name, check) for name, check in self._checks.items()))
            await asyncio.sleep(max(0.0, began + CHECK_EVERY_S - time.monotonic()))

    async def _check_once(self, name: str, check: Check) -> None:
        problem = None
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await check()
        except TimeoutError:
            problem = f"no answer within {CHECK_TIMEOUT_S:g} s"
        except Exception as error:  # whatever a store's client raises means the same here: it does not answer
            problem = str(error) or type(error).__name__
        before = self._states[name]
        state = {"up": problem is None, "since": before.get("since")}
        if problem is not None:
            state["problem"] = problem
        if before["up"] is not state["up"]:
            state["since"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            if problem is not None:
                logger.warning("dependency_down", dependency=name, problem=problem)
            elif before["up"] is False:
                logger.info("dependency_back", dependency=name)
        self._states[name] = state
        self._up[name].set(problem is None)


async def run_loop_watch(metrics: ProcessMetrics) -> None:
    """Measure how late the loop is, until cancelled."""
    while True:
        due = time.monotonic() + LOOP_TICK_S
        await asyncio.sleep(LOOP_TICK_S)
        lag_s = max(0.0, time.monotonic() - due)
        metrics.loop_lag.observe(lag_s)
        if lag_s > LOOP_BLOCKED_S:
            logger.warning("loop_blocked", lag_s=round(lag_s, 3))


def admin_app(lifecycle: Lifecycle, dependencies: Dependencies, registry: CollectorRegistry) -> Starlette:
    """The application of the admin port."""

    async def livez(_request: Request) -> Response:
        # An answer at all is the proof: a loop that is stuck gives none, and the probe's own timeout counts.
        return PlainTextResponse("alive\n")

    async def readyz(_request: Request) -> Response:
        state = lifecycle.state
        body = {"state": state, "dependencies": dependencies.states()}
        return JSONResponse(body, 200 if state is State.READY else 503)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return Starlette(routes=[Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)])
