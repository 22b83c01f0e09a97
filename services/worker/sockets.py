"""The sockets: handshakes, hellos, and the end of each session.

Promises: nothing unauthorised gets past the HTTP status of the handshake; a socket that is slow to say hello is cut;
          a session that ends leaves presence as `reconnecting`, or absent when the machine said goodbye.
"""

import asyncio
import contextlib
import http
import socket as stdlib_socket
from collections.abc import AsyncIterator, Sequence

import msgspec
import structlog
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from common.errors import StoreUnavailable
from common.ids import GatewayId, MachineId, WorkerId, is_uuid
from common.process.lifecycle import Lifecycle
from common.store import keys
from common.store.control import tell_gateway
from common.store.presence import leave
from common.store.redis import Redis
from common.store.requests import Requests
from common.store.tokens import Minted, Tokens
from towline.wire import frames, json
from towline.wire.ids import is_id
from worker.metrics import WorkerMetrics
from worker.outcomes import Outcomes
from worker.pump import Pump
from worker.session import Session, catalogue_problem
from worker.settings import WorkerSettings

logger = structlog.get_logger(__name__)

RUNNING_MAX = 64
RETRY_AFTER_S = 5
# Between two waves of a drain: each wave's machines have been welcomed elsewhere when the next one leaves.
DRAIN_WAVE_S = 0.25
DRAIN_WAVES = 20
_NO_REQUEST = Request(frames.PATH, Headers())


class Connection(ServerConnection):
    """A socket, and whose it is once its token has been checked."""

    minted: Minted | None = None


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
            return _problem(connection, 404, "not-found", f"there is only {frames.PATH} here")
        if self._lifecycle.draining.is_set():
            return _problem(connection, 503, "draining", "this worker is leaving; connect again", retry_after_s=1)
        # Counted by the server, whose connections are open ones: a handshake that breaks off takes no place.
        if self._server is not None and len(self._server.connections) >= self._settings.sockets_max:
            return _problem(connection, 503, "too-many-sockets", "this worker is full", retry_after_s=RETRY_AFTER_S)
        offered = ",".join(request.headers.get_all("Sec-WebSocket-Protocol"))
        if frames.SUBPROTOCOL not in (part.strip() for part in offered.split(",")):
            return _problem(connection, 400, "bad-subprotocol", f"the subprotocol {frames.SUBPROTOCOL} is needed")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return _problem(connection, 401, "unauthorized", "a machine token is needed: Authorization: Bearer ...")
        try:
            minted = await self._tokens.mint_session(token.strip())
        except StoreUnavailable:
            return _problem(connection, 503, "store-unavailable", "tokens cannot be checked now", retry_after_s=2)
        if minted is None:
            return _problem(connection, 401, "unauthorized", "the machine token is not valid")
        assert isinstance(connection, Connection)
        connection.minted = minted
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        assert isinstance(connection, Connection)
        minted = connection.minted
        assert minted is not None
        # Nobody needs the headers any more: they are kilobytes a socket, and hold the token.
        connection.request, connection.response = _NO_REQUEST, None
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
                hello, problem = _read_hello(await connection.recv())
        except TimeoutError:
            # No fault of the program's: a lid that was closed just then. It is to dial again.
            self._metrics.sessions_total["no_pong"].inc()
            await connection.close(frames.Close.NO_PONG, "no hello in time")
            return None
        if hello is None:
            self._metrics.sessions_total["bad_frame"].inc()
            await connection.close(frames.Close.BAD_FRAME, frames.close_reason(problem))
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
                session.end(frames.Close.RESTARTING, "this worker is leaving", "draining")
        await self._pump.empty.wait()


def _read_hello(text: str | bytes) -> tuple[frames.Hello | None, str]:
    if not isinstance(text, str):
        return None, "a binary frame: frames are JSON text"
    try:
        hello = frames.decode_from_sidecar(text)
    except frames.FrameError as error:
        return None, f"a bad hello: {error}"
    if not isinstance(hello, frames.Hello):
        return None, "the first frame must be hello"
    if not is_id(hello.machine) or not is_id(hello.journal):
        return None, "hello: machine and journal must be ids (1-200 of A-Z a-z 0-9 . _ : @ -)"
    if problem := catalogue_problem(hello.tools):
        return None, f"hello: {problem}"
    if len(hello.running) > RUNNING_MAX or not all(is_uuid(job) for job in hello.running):
        return None, f"hello: running must be at most {RUNNING_MAX} job ids"
    # Postgres stores no U+0000; a machine is not turned away for one in its name.
    raw, mended = json.check_raw(json.dumps(hello))
    return (msgspec.json.decode(raw, type=frames.Hello) if mended else hello), ""


def _problem(
    connection: ServerConnection, status: int, slug: str, detail: str, *, retry_after_s: int | None = None
) -> Response:
    title = http.HTTPStatus(status).phrase
    body = {"type": f"/problems/{slug}", "title": title, "status": status, "detail": detail}
    response = connection.respond(http.HTTPStatus(status), json.dumps(body).decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/problem+json"
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response
