"""A worker's stand-in for tests of the sidecar: a real WebSocket server that speaks the wire format.

It keeps no job and no rule of delivery: a test says what is sent, closed, refused or left unanswered, and asks what
came.
"""

import asyncio
import itertools
import time
from collections import Counter
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Self

import msgspec
from support import eventually
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from towline.wire import frames, json

USER = "ada"


def instant(seconds: float) -> str:
    """Seconds since the epoch as the wire's text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Session:
    """One socket of a sidecar, welcomed."""

    def __init__(self, socket: ServerConnection, hello: frames.Hello) -> None:
        self.socket = socket
        self.hello = hello
        self.received: list[frames.FromSidecar] = []
        self.answers_pings = True
        self.closed = asyncio.Event()
        self._frame_ids = itertools.count(1)

    async def send(self, frame: frames.Frame) -> None:
        await self.socket.send(frames.encode(frame))

    async def deliver(
        self,
        name: str,
        args: Any = None,
        *,
        job: str = "job-1",
        hinted: bool = False,
        timeout_s: float = 30,
        deadline_s: float = 60,
        accepted_ago_s: float = 0,
        attempt: int = 1,
        traceparent: str = "",
    ) -> str:
        """Send a job; returns the fresh frame id."""
        frame_id = f"{id(self):x}-{next(self._frame_ids)}"
        now = time.time()
        await self.send(
            frames.Job(
                id=frame_id,
                job=job,
                idempotency_key=f"key-of-{job}",
                accepted_at=instant(now - accepted_ago_s),
                name=name,
                args=msgspec.Raw(json.dumps(args or {})),
                timeout_s=timeout_s,
                deadline_at=instant(now + deadline_s),
                attempt=attempt,
                hinted=hinted,
                traceparent=traceparent,
            )
        )
        return frame_id

    def results(self, *, frame: str = "", job: str = "") -> list[frames.JobResult]:
        """What has come so far under this frame id, or by job."""
        return [r for r in self.received if isinstance(r, frames.JobResult) and (r.id, r.job) == (frame, job)]

    async def result(self, *, frame: str = "", job: str = "", nth: int = 1, within_s: float = 10) -> frames.JobResult:
        """Wait for the nth result under this frame id, or by job."""
        await eventually(lambda: len(self.results(frame=frame, job=job)) >= nth, within_s)
        return self.results(frame=frame, job=job)[nth - 1]

    async def run(self, name: str, args: Any = None, **facts: Any) -> frames.JobResult:
        """Deliver and wait for the answer."""
        return await self.result(frame=await self.deliver(name, args, **facts))

    async def status(self) -> frames.StatusResult:
        """Ask and wait."""
        frame_id = f"status-{next(self._frame_ids)}"
        await self.send(frames.Status(frame_id))

        def answer() -> list[frames.StatusResult]:
            return [r for r in self.received if isinstance(r, frames.StatusResult) and r.id == frame_id]

        return (await eventually(answer))[0]

    async def drop(self) -> None:
        """Cut the line, without a close frame."""
        self.socket.transport.abort()
        await self.closed.wait()


class Hub:
    """The server.

    Attributes:
        sessions: all that were welcomed, oldest first.
        handshakes: when somebody dialled, monotonic seconds.
        hellos: how many said hello, welcomed or not.
        answer_upgrade: set it to refuse: status and headers.
        close_at_hello: set it to close in place of a welcome: code and reason.
        may_welcome: clear it to leave hellos without an answer.
        heartbeat_s: said in the welcome.
        server_time_skew_s: how far the server's clock is ahead of this machine's.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.handshakes: list[float] = []
        self.hellos = 0
        self.authorizations: Counter[str] = Counter()
        self.answer_upgrade: tuple[HTTPStatus, dict[str, str]] | None = None
        self.close_at_hello: tuple[int, str] | None = None
        self.may_welcome = asyncio.Event()
        self.may_welcome.set()
        self.heartbeat_s = 10.0
        self.server_time_skew_s = 0.0
        self.max_frame_bytes = frames.FRAME_BYTES_MAX
        self.port = 0
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self.port,
            process_request=self._process_request,
            subprotocols=[frames.SUBPROTOCOL],  # type: ignore[list-item]
            max_size=frames.FRAME_BYTES_MAX,
            compression=None,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, code: int = 1001) -> None:
        assert self._server is not None
        self._server.close(code=code)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def session(self, nth: int = 1, within_s: float = 10) -> Session:
        """Wait for the nth session."""
        await eventually(lambda: len(self.sessions) >= nth, within_s)
        return self.sessions[nth - 1]

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        self.handshakes.append(time.monotonic())
        self.authorizations[request.headers.get("Authorization", "")] += 1
        if self.answer_upgrade is None:
            return None
        status, headers = self.answer_upgrade
        response = connection.respond(status, "refused by the test\n")
        response.headers.update(headers)
        return response

    async def _serve(self, socket: ServerConnection) -> None:
        try:
            hello = frames.decode_from_sidecar(str(await socket.recv()))
            assert isinstance(hello, frames.Hello)
            self.hellos += 1
            if self.close_at_hello:
                await socket.close(*self.close_at_hello)
                return
            await self.may_welcome.wait()
            session = Session(socket, hello)
            await session.send(
                frames.Welcome(
                    session=f"session-{len(self.sessions) + 1}",
                    epoch=len(self.sessions) + 1,
                    heartbeat_s=self.heartbeat_s,
                    max_frame_bytes=self.max_frame_bytes,
                    server_time=time.time() + self.server_time_skew_s,
                    user=USER,
                )
            )
        except ConnectionClosed:
            return
        self.sessions.append(session)
        try:
            while True:
                frame = frames.decode_from_sidecar(str(await socket.recv()))
                assert frame is not None
                session.received.append(frame)
                if isinstance(frame, frames.Ping) and session.answers_pings:
                    await session.send(frames.Pong(frame.n))
        except ConnectionClosed:
            pass
        finally:
            session.closed.set()
