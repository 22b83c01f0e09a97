"""The sockets: handshakes, hellos, and the end of each session.

Promises: nothing unauthorised gets past the HTTP status of the handshake; a refusal there is a problem, and repeats
          nothing of what was sent; a socket that is slow to say hello is cut; a session that ends leaves presence as
          `reconnecting`, or absent when the machine said goodbye.
"""

import asyncio
import contextlib
import http
import socket as stdlib_socket
from collections.abc import AsyncIterator, Sequence

import structlog
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import Subprotocol

from common import problems
from common.errors import StoreUnavailable
from common.ids import GatewayId, MachineId, WorkerId
from common.problems import ProblemType
from common.process.lifecycle import Lifecycle
from common.store import keys
from common.store.control import tell_gateway
from common.store.presence import leave
from common.store.redis import Redis
from common.store.requests import Requests
from common.store.tokens import Minted, Tokens
from towline.wire import frames
from worker.hello import read_hello
from worker.metrics import WorkerMetrics
from worker.outcomes import Outcomes
from worker.pump import Pump
from worker.session import Session
from worker.settings import WorkerSettings

logger = structlog.get_logger(__name__)

RETRY_AFTER_S = 5
# Between two waves of a drain: each wave's machines have been welcomed elsewhere when the next one leaves.
DRAIN_WAVE_S = 0.25
DRAIN_WAVES = 20
# What the library answers to a request that is none of RFC 6455.
_NO_HANDSHAKE = (400, 405, 426, 505)


class Connection(ServerConnection):
    """A socket, and whose it is once its token has been checked.

    Attributes:
        hasty: something came behind the request before that was answered. It was dropped, and no session begins.
    """

    minted: Minted | None = None
    hasty = False

    def data_received(self, data: bytes) -> None:
        """Keep the request apart from what is behind it, which the library takes for frames at once.

        It would end the connection for them, and then fail to answer with an AssertionError in the log.
        """
        while data and self.request is None and not self.protocol.eof_sent:
            end = data.find(b"\n") + 1 or len(data)
            super().data_received(data[:end])
            data = data[end:]
        if data and self.state is State.CONNECTING and not self.protocol.eof_sent:
            self.hasty = True
        elif data:
            super().data_received(data)


class Sockets:
    """The WebSocket server of a worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        lifecycle: Lifecycle,
        worker: WorkerId,
        *,
        redis: Redis,
        tokens: Tokens,
        requests: Requests,
        outcomes: Outcomes,
        pump: Pump,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._worker = worker
        self._redis = redis
        self._tokens = tokens
        self._requests = requests
        self._outcomes = outcomes
        self._pump = pump
        self._metrics = metrics
        self._timing = keys.Timing(settings.heartbeat_s)
        self._server: Server | None = None

    @contextlib.asynccontextmanager
    async def listening(self, listener: stdlib_socket.socket) -> AsyncIterator[None]:
        """Accept machines on a bound socket while the context is open."""
        async with serve(
            self._handle,
            create_connection=Connection,
            sock=listener,
            process_request=self._admit,
            process_response=_describe_refusal,
            subprotocols=[Subprotocol(frames.SUBPROTOCOL)],
            compression=None,  # a small frame could inflate without end, and each socket would cost 40 KiB more
            max_size=frames.FRAME_BYTES_MAX,
            max_queue=16,
            write_limit=64 * 1024,
            open_timeout=self._settings.handshake_timeout_s,
            close_timeout=2,
            ping_interval=None,  # signs of life are frames of ours, with a deadline (Session.beat)
            server_header=None,
        ) as self._server:
            yield

    # ---- handshake

    async def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.split("?", 1)[0]
        if path != frames.PATH:
            return _refused(connection, problems.NOT_FOUND, f"there is only {frames.PATH} here")
        if self._lifecycle.draining.is_set():
            return _refused(connection, problems.DRAINING, "this worker is leaving; connect again", retry_after_s=1)
        # Counted by the server, whose connections are open ones: a handshake that breaks off takes no place.
        if self._server is not None and len(self._server.connections) >= self._settings.sockets_max:
            return _refused(connection, problems.TOO_MANY_SOCKETS, "this worker is full", retry_after_s=RETRY_AFTER_S)
        offered = ",".join(request.headers.get_all("Sec-WebSocket-Protocol"))
        if frames.SUBPROTOCOL not in (part.strip() for part in offered.split(",")):
            return _refused(connection, problems.BAD_SUBPROTOCOL, f"the subprotocol {frames.SUBPROTOCOL} is needed")
        given = request.headers.get_all("Authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            detail = "one machine token is needed: Authorization: Bearer ..."
            return _refused(connection, problems.UNAUTHORIZED, detail)
        try:
            minted = await self._tokens.mint_session(token.strip())
        except StoreUnavailable:
            return _refused(connection, problems.STORE_UNAVAILABLE, "tokens cannot be checked now", retry_after_s=2)
        if minted is None:
            return _refused(connection, problems.UNAUTHORIZED, "the machine token is not valid")
        assert isinstance(connection, Connection)
        connection.minted = minted
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        assert isinstance(connection, Connection)
        minted = connection.minted
        assert minted is not None
        # Nobody needs the headers any more: they are kilobytes a socket, and hold the token. The library's parser
        # keeps the request itself for as long as the socket is open.
        assert connection.request is not None
        connection.request.headers.clear()
        connection.response = None
        try:
            session = await self._greet(connection, minted)
        except ConnectionClosed:
            return
        if session is None:
            return
        if self._lifecycle.draining.is_set():  # it was greeted while the others were sent away
            await connection.close(frames.Close.RESTARTING, "this worker is leaving")
            return
        self._pump.join(session)
        label = "error"
        try:
            label = await session.serve()
        finally:
            self._pump.leave(session)
            self._metrics.sessions_total[label].inc()
            logger.info("session_ended", user=session.user, session=session.id, reason=label)
            if session.asserted and label not in ("replaced", "other_machine"):
                left_for_good = session.said_goodbye or label == "token_refused"
                grace = None if left_for_good else self._timing.reconnecting_ms
                with contextlib.suppress(StoreUnavailable):  # then its time to live says it
                    await leave(self._redis, session.user, session.epoch, grace_ms=grace)

    async def _greet(self, connection: ServerConnection, minted: Minted) -> Session | None:
        """Wait for the hello and make its session; None when there is none to be made."""
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                hello = read_hello(await connection.recv())
        except frames.FrameError as error:
            self._metrics.sessions_total["bad_frame"].inc()
            await connection.close(frames.Close.BAD_FRAME, frames.close_reason(str(error)))
            return None
        except TimeoutError:
            # No fault of the program's: a lid that was closed just then. It is to dial again.
            self._metrics.sessions_total["no_pong"].inc()
            await connection.close(frames.Close.NO_PONG, "no hello in time")
            return None

        # Kept for as long as the session lives, so not with the hello and its catalogue in it.
        machine, name, version = MachineId(hello.machine), hello.name, hello.version

        async def announce(tools: Sequence[frames.Tool]) -> None:
            await self._tokens.see_machine(
                minted.user, machine, name=name, version=version, tools=tools, epoch=minted.epoch
            )

        async def tell(gateway: GatewayId, fields: dict[str, str]) -> None:
            with contextlib.suppress(StoreUnavailable):  # the gateway's own deadline answers then
                await tell_gateway(self._redis, gateway, fields)

        try:
            await announce(hello.tools)
        except StoreUnavailable:
            await connection.close(frames.Close.TRY_LATER, "the machine cannot be recorded now")
            return None
        session = Session(
            connection,
            hello,
            minted,
            worker=self._worker,
            timing=self._timing,
            requests=self._requests,
            outcomes=self._outcomes,
            metrics=self._metrics,
            desk=self._pump,
            announce=announce,
            tell=tell,
        )
        logger.info("session_began", user=session.user, session=session.id, epoch=session.epoch, machine=hello.machine)
        return session

    # ---- drain

    async def drain(self) -> None:
        """Send every machine elsewhere, in waves; what runs there is answered over its next socket."""
        sessions = self._pump.sessions
        wave = max(1, -(-len(sessions) // DRAIN_WAVES))
        for start in range(0, len(sessions), wave):
            for session in sessions[start : start + wave]:
                session.drain()
            await asyncio.sleep(DRAIN_WAVE_S)
            for session in sessions[start : start + wave]:
                session.end(frames.Close.RESTARTING, "this worker is leaving")
        await self._pump.empty.wait()


def _refused(
    connection: ServerConnection, kind: ProblemType, detail: str, *, retry_after_s: int | None = None
) -> Response:
    response = connection.respond(http.HTTPStatus(kind.status), "")
    _describe(response, kind, detail)
    if kind.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response


def _describe_refusal(connection: ServerConnection, _request: Request, response: Response) -> Response | None:
    """Describe what the library refuses by itself, too: what it says of it quotes what was sent."""
    assert isinstance(connection, Connection)
    if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS and connection.hasty:
        return _refused(connection, problems.BAD_HANDSHAKE, "nothing may be sent before the handshake is answered")
    if response.status_code in _NO_HANDSHAKE and response.headers["Content-Type"] != problems.MEDIA_TYPE:
        _describe(response, problems.BAD_HANDSHAKE, "a WebSocket's handshake by RFC 6455 is needed here")
    return None


def _describe(response: Response, kind: ProblemType, detail: str) -> None:
    response.body = kind.body(detail, status=response.status_code)
    for name, value in (("Content-Type", problems.MEDIA_TYPE), ("Content-Length", str(len(response.body)))):
        del response.headers[name]
        response.headers[name] = value
