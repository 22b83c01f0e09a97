"""HTTP as this product serves it: Hypercorn under our own stop, on connections that badly behaved clients cannot keep.

Owns:     the listening socket and the end of every HTTP server.
Promises: `serve` returns within its budget and a second or so, whatever connections are open and whatever Hypercorn
          waits for. HTTP/2 is what a TLS handshake agreed upon, never what a connection of HTTP/1.1 turns into. What is
          no request at all is refused with a problem, too (`hypercorn_fixes`). A connection that ends with an answer
          says so in it.
Used by:  the gateway for its public port (serve); `health` for the admin port; every service (open_listener).
"""

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from typing import Any, NamedTuple, cast

import hypercorn.asyncio
import structlog
from hypercorn.config import Config
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.process import hypercorn_fixes

logger = structlog.get_logger(__name__)

# New connections that may wait while the loop is busy: a burst of reconnects after a deploy.
BACKLOG = 1024

# Sent bytes that stay unacknowledged, or a reader that takes nothing, this long: the peer is gone. Two keep-alive
# comments of a stream (15 s each) without an acknowledgement. Nothing else ever frees such a connection.
DEAD_PEER_TIMEOUT_MS = 30_000

# Longer than proxies keep their idle connections (60 s is the common default), so that they close first and none of
# them sends a request into a connection that is just being closed here.
KEEP_ALIVE_S = 75

# How much is read of a body that the application does not want, and how long its next piece and all of it may take. Its
# client can then read the answer instead of a connection reset, and use the connection for its next request.
UNWANTED_BYTES_MAX = 1024 * 1024
UNWANTED_PAUSE_S = 1.0
UNWANTED_S = 5.0

# What a request that is cut off at the end of the budget has for its `finally` blocks.
CUT_GRACE_S = 0.3

# How the kernel says that a peer is gone, where Hypercorn does not catch it; and who reports that.
_VANISHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_FROM_CONNECTION = "client_connected_cb"


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
        body = _Body(scope, receive) if _has_body(scope) else None
        try:
            await self._app(scope, body.receive if body else receive, self._sender(scope, body, send))
        finally:
            self._requests.discard(request)

    def _sender(self, scope: Scope, body: "_Body | None", send: Send) -> Send:
        closing = self._closing if scope["type"] == "http" and scope["http_version"].startswith("1") else None

        async def send_checked(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_body_over = body is None or body.has_ended or await body.discard()
                if not is_body_over or (closing and closing.is_set()):
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


class _Body:
    """The body of a request of HTTP/1.1. Until all of it has been read the connection carries no other request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        # Streams, which are GETs, watch for the end of their client meanwhile, which is told once; nor has a GET a body
        # that means anything.
        self._may_be_discarded = scope["method"] not in ("GET", "HEAD")
        self._receive = receive
        self.has_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        self.has_ended = not message.get("more_body", False)  # so has that of a client that left
        return message

    async def discard(self) -> bool:
        """Throw away what is left of it; False: that is too much, takes too long, or is not to be done."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNWANTED_S):
                while self._may_be_discarded and not self.has_ended and size <= UNWANTED_BYTES_MAX:
                    async with asyncio.timeout(UNWANTED_PAUSE_S):
                        size += len((await self.receive()).get("body", b""))
        return self.has_ended


def _has_body(scope: Scope) -> bool:
    """Whether a request of HTTP/1.1 has a body."""
    if scope["type"] != "http" or not scope["http_version"].startswith("1"):
        return False
    for name, value in scope["headers"]:
        if name == b"content-length":
            return bool(value != b"0")
        if name == b"transfer-encoding":
            return True
    return False
