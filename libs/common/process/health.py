"""HTTP as this product serves it (Hypercorn under our own stop), and the admin port: /livez, /readyz, /metrics.

Owns:     the listening socket, the end of every HTTP server, the probes and the watch over loop and stores.
Promises: `serve` returns within its budget and a second or so, whatever connections are open and whatever Hypercorn
          waits for. A store that is away shows in the body of /readyz and in `towline_dependency_up`, never in a
          probe's status: stores are shared, and readiness tied to them would take out every replica at once.
          HTTP/2 is what a TLS handshake agreed upon, never what a connection of HTTP/1.1 turns into. What is no request
          at all is refused with a problem, too (`hypercorn_fixes`).
Used by:  every service (open_listener, serve_admin); the gateway for its public port (serve).
"""

import asyncio
import errno
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import hypercorn.asyncio
import structlog
from hypercorn.config import Config
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import StoreUnavailable
from common.process import hypercorn_fixes
from common.process.backoff import Backoff
from common.process.lifecycle import Lifecycle, State
from common.process.metrics import ProcessMetrics

logger = structlog.get_logger(__name__)

# New connections that may wait while the loop is busy: a burst of reconnects after a deploy.
BACKLOG = 1024

# Sent bytes that stay unacknowledged, or a reader that takes nothing, this long: the peer is gone. Two keep-alive
# comments of a stream (15 s each) without an acknowledgement. Nothing else ever frees such a connection.
DEAD_PEER_TIMEOUT_MS = 30_000

# Longer than proxies keep their idle connections (60 s is the common default), so that they close first and none of
# them sends a request into a connection that is just being closed here.
KEEP_ALIVE_S = 75

# What a request that is cut off at the end of the budget has for its `finally` blocks.
CUT_GRACE_S = 0.3

ADMIN_CLOSE_S = 0.5

# Often enough for a probe's period, rare enough to cost nothing; each check has a deadline, so one hung store does
# not hide the other.
CHECK_EVERY_S = 5.0
CHECK_TIMEOUT_S = 3.0

# How the kernel says that a peer is gone, where Hypercorn does not catch it; and who reports that.
_VANISHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_FROM_CONNECTION = "client_connected_cb"

LOOP_TICK_S = 0.25
# From here on a lag is worth a line in the log: probes, leases and presence have deadlines of seconds.
LOOP_BLOCKED_S = 1.0

Check = Callable[[], Awaitable[object]]


class Tls(NamedTuple):
    """Files (PEM) of a certificate chain and its private key; with them HTTP/2 is offered, too."""

    cert_file: str
    key_file: str


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen: from now on connections are queued, not refused. Port 0 takes a free one.

    Raises:
        OSError: the address is taken or not of this machine; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # SO_REUSEADDR is set by create_server.
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
    # Accepted connections inherit it; asyncio sets it by itself only where the protocol number says TCP, and here it
    # says 0. Without it every small answer waits 40 ms for the peer's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_TIMEOUT_MS)
    return listener


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    budget_s: float,
    closing: asyncio.Event | None = None,
    tls: Tls | None = None,
) -> None:
    """Serve until `stop` is set, then close the listener, wait for open requests and return.

    The application gets no lifespan events: what it needs is built and closed by the service itself.

    Args:
        listener: from `open_listener`; owned by this call from now on.
        budget_s: how long open requests may take after `stop`; then they are cancelled and their clients cut off.
            Streams must end by themselves before: only they can say goodbye.
        closing: from when on responses tell their clients to close the connection (HTTP/1.1), so that kept-alive
            ones move to another replica before this one stops.
        tls: None: plain HTTP.

    Raises:
        OSError, ssl.SSLError: the certificate or its key cannot be read.
    """
    asyncio.get_running_loop().set_exception_handler(_handle_loop_error)
    hypercorn_fixes.install()
    door = _Door(app, closing)
    trigger = asyncio.Event()
    serving = hypercorn.asyncio.serve(
        cast("Any", door), _config(listener, budget_s, tls), shutdown_trigger=trigger.wait
    )
    server = asyncio.create_task(serving, name="hypercorn")
    stopping = asyncio.create_task(stop.wait(), name="http-stop")
    try:
        await asyncio.wait({server, stopping}, return_when=asyncio.FIRST_COMPLETED)
        trigger.set()
        await asyncio.wait({server}, timeout=budget_s)
    finally:
        stopping.cancel()
        trigger.set()
        if not server.done():
            # On Python 3.12 and newer Hypercorn waits here without any limit for the last connection to close.
            logger.warning("http_requests_cut", requests=door.cut())
            await asyncio.wait({server}, timeout=CUT_GRACE_S)
            server.cancel()
            await asyncio.wait({server}, timeout=CUT_GRACE_S)
    if server.done() and not server.cancelled() and (error := server.exception()):
        if not stop.is_set():
            raise error
        logger.warning("http_close_failed", exc_info=error)


def _handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Leave out what is none: Hypercorn closes a connection whose peer vanished, and the kernel says that it did."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _VANISHED and _FROM_CONNECTION in context.get("message", ""):
        return
    loop.default_exception_handler(context)


def _config(listener: socket.socket, budget_s: float, tls: Tls | None) -> Config:
    config = Config()
    if tls is not None:
        config.certfile, config.keyfile = tls
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.accesslog = None  # it would write query strings
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    # Hypercorn's own limit of a thousand does not end a connection of HTTP/2, but leaves it open and says nothing on it
    # any more, on its event streams neither.
    config.keep_alive_max_requests = sys.maxsize
    # Ours comes first: Hypercorn's is not heeded on every Python, and cancels connections instead of requests.
    config.graceful_timeout = budget_s + 2 * CUT_GRACE_S
    return config


class _Door:
    """What stands between Hypercorn and the application: knows the open requests and can end them."""

    def __init__(self, app: ASGIApp, closing: asyncio.Event | None) -> None:
        self._app = app
        self._closing = closing
        self._requests: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        try:
            await self._app(scope, receive, self._sender(scope, send))
        finally:
            self._requests.discard(request)

    def _sender(self, scope: Scope, send: Send) -> Send:
        closing = self._closing if scope["type"] == "http" and scope["http_version"].startswith("1") else None

        async def send_checked(message: Message) -> None:
            if closing and closing.is_set() and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            # A peer that the kernel gave up (ETIMEDOUT) is a client that left like any other: sending does nothing
            # and the application hears `http.disconnect`. Of all ways to lose one, Hypercorn lets just this through.
            try:
                await send(message)
            except TimeoutError:
                await asyncio.sleep(0)  # fails at once every time: the loop needs a turn to deliver the disconnect

        return send_checked

    def cut(self) -> int:
        """Cancel every open request; returns how many there were."""
        for request in self._requests:
            request.cancel()
        return len(self._requests)


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
        except (StoreUnavailable, ValueError) as error:
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
