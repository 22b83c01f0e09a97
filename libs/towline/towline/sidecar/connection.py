"""One socket to a worker: three tasks with one fate, and the machine's lane beside them.

    reader     reads, sorts, reads again; never awaits work. `status` is answered from memory, so it answers at once
    writer     the only one to send; what is small and urgent goes before results
    heartbeat  pings; no pong in two heartbeats ends the socket, and so does a frame that cannot be sent

Owns:     the socket and what waits to be sent. Both die with it, and so do jobs that came by it and only wait in the
          lane: the server sends again what was not answered. What has started goes on.
Promises: `run` always ends, and says how.
Used by:  sidecar.app.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from towline.sidecar.lane import Lane
from towline.sidecar.outcome import failed
from towline.sidecar.work import Delivery
from towline.wire import frames

# How long a worker may take to say welcome: one statement in its database, and some patience.
WELCOME_TIMEOUT_S = 15.0
HEARTBEATS_WITHOUT_PONG = 2
HEARTBEAT_MIN_S = 0.05

# One frame of 1 MiB over a poor line. Longer means that the peer reads no more.
SEND_TIMEOUT_S = 60.0

# Frames not yet written. Who lets so many pile up does not read.
OUTBOX_MAX = 1024

_URGENT = (frames.Pong, frames.Ping, frames.StatusResult)

_logger = structlog.get_logger("towline.sidecar")


class ConnectionLost(Exception):
    """The socket can no longer be trusted; `str()` says why."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a socket ended. `code`, `reason`: of the peer's close frame, None and "" if it sent none."""

    code: int | None
    reason: str
    session_s: float


class Connection:
    """A session, from `greet` to the end of `run`.

    Attributes:
        user: whose token it is.
        starts_jobs: False once this socket is being left: what it still delivers must not start.
        draining: done when the worker has asked us to connect elsewhere.
        ended: done when `run` is.
    """

    def __init__(
        self, socket: ClientConnection, lane: Lane, *, started_at: float, renew_token: Callable[[str], None]
    ) -> None:
        """
        Args:
            started_at: of the process, monotonic clock.
            renew_token: told a token for the next dial.
        """
        self._socket = socket
        self._lane = lane
        self._started_at = started_at
        self._renew_token = renew_token
        self._welcome: frames.Welcome | None = None
        self._welcomed_at = 0.0
        # The server's clock less ours, monotonic.
        self._server_ahead_s = 0.0
        self._outbox: deque[frames.Frame] = deque()
        self._unsent = asyncio.Event()
        self.user = ""
        self.starts_jobs = True
        self._retiring = False
        self._ping = frames.Ping(0)
        self._pinged = asyncio.Event()
        self._ponged = asyncio.Event()
        self.draining: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    @property
    def welcome(self) -> frames.Welcome:
        assert self._welcome is not None, "greet() comes first"
        return self._welcome

    def server_now(self) -> float:
        """Seconds since the epoch by the server's clock; right until this machine sleeps."""
        return time.monotonic() + self._server_ahead_s

    async def greet(self, hello: frames.Hello) -> None:
        """Say hello, wait for the welcome, and answer what runs already.

        Raises:
            ConnectionClosed: the worker did not want us; its close code says what next.
            TimeoutError: it said nothing.
        """
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            await self._socket.send(frames.encode(hello))
            while self._welcome is None:
                frame = self._decode(await self._socket.recv())
                if isinstance(frame, frames.Welcome):
                    self._welcome, self._welcomed_at, self.user = frame, time.monotonic(), frame.user
                    self._server_ahead_s = frame.server_time - self._welcomed_at
        self._lane.attach(self, hello.running)

    async def run(self) -> None:
        """Serve until the socket ends, for whatever reason; sets `ended`."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._run_reader(), name="reader")
                group.create_task(self._run_writer(), name="writer")
                group.create_task(self._run_heartbeat(), name="heartbeat")
        except* ConnectionClosed:
            pass
        except* ConnectionLost as lost:
            _logger.warning("connection_lost", reason="; ".join(map(str, lost.exceptions)))
        finally:
            self.drop()
            self._lane.detach(self)
            code = self._socket.close_code
            session_s = time.monotonic() - self._welcomed_at
            self.ended.set_result(Ending(None if code == 1006 else code, self._socket.close_reason or "", session_s))

    def send(self, frame: frames.Frame) -> None:
        """Queue a frame for the writer."""
        if len(self._outbox) >= OUTBOX_MAX:
            _logger.warning("connection_lost", reason="the worker does not read")
            self.drop()
            return
        if isinstance(frame, _URGENT):
            self._outbox.appendleft(frame)
        else:
            self._outbox.append(frame)
        self._unsent.set()

    def stop_starting(self) -> None:
        """Start nothing more of what came, or comes, by this socket."""
        self.starts_jobs = False
        self._lane.forget(self)

    def retire(self) -> None:
        """Send what is queued, then close; what waits is dropped."""
        self.stop_starting()
        self._retiring = True
        self._unsent.set()

    def drop(self) -> None:
        """End the socket now, without a word."""
        self.stop_starting()
        self._socket.transport.abort()

    async def _run_reader(self) -> None:
        while True:
            self._receive(self._decode(await self._socket.recv()))

    def _decode(self, message: str | bytes) -> frames.FromWorker | None:
        try:
            if isinstance(message, str):
                return frames.decode_from_worker(message)
            _logger.warning("frame_ignored", reason="binary")
        except frames.FrameError as error:
            _logger.warning("frame_ignored", error=str(error))
        return None

    def _receive(self, frame: frames.FromWorker | None) -> None:
        match frame:
            case frames.Job():
                self._receive_job(frame)
            case frames.Status(id=id_):
                uptime_s = time.monotonic() - self._started_at
                self.send(frames.StatusResult(id_, bool(self._lane.running()), self._lane.queue, uptime_s))
            case frames.JobResultAck(jobs=jobs):
                for job in jobs:
                    self._lane.acknowledge(self.user, job)
            case frames.JobCancel(id=id_):
                self._lane.cancel(self, id_)
            case frames.Ping(n=n):
                self.send(frames.Pong(n))
            case frames.Pong(n=n):
                if n == self._ping.n:
                    self._ponged.set()
            case frames.Token(token=token):
                self._renew_token(token)
            case frames.Draining():
                if not self.draining.done():
                    self.draining.set_result(None)
            case frames.Welcome() | None:
                pass  # a second welcome, or what a newer worker says

    def _receive_job(self, frame: frames.Job) -> None:
        try:
            delivery = Delivery.read(self, frame)
        except (ValueError, OverflowError) as error:
            self.send(failed("bad-frame", f"accepted_at or deadline_at: {error}").frame(id_=frame.id))
            return
        self._lane.deliver(delivery)

    async def _run_writer(self) -> None:
        while True:
            while self._outbox:
                frame = self._outbox.popleft()
                await self._socket.send(self._encode(frame))
                if frame is self._ping:
                    self._pinged.set()
            if self._retiring:
                await self._socket.close()
            self._unsent.clear()
            await self._unsent.wait()

    def _encode(self, frame: frames.Frame) -> str:
        text = frames.encode(frame)
        limit = self.welcome.max_frame_bytes
        # A character has at most four bytes; counting them is for the few that come near.
        if isinstance(frame, frames.JobResult) and 4 * len(text) > limit and len(text.encode()) > limit:
            too_large = failed("result-too-large", f"the worker takes frames of at most {limit} bytes")
            return frames.encode(too_large.frame(id_=frame.id, job=frame.job, lane_busy=frame.lane_busy))
        return text

    async def _run_heartbeat(self) -> None:
        every_s = max(self.welcome.heartbeat_s, HEARTBEAT_MIN_S)
        while True:
            await asyncio.sleep(every_s)
            self._pinged.clear()
            self._ponged.clear()
            self._ping = frames.Ping(self._ping.n + 1)
            self.send(self._ping)
            try:
                # It goes before all that waits, so at most one frame is in its way.
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._pinged.wait()
            except TimeoutError as error:
                raise ConnectionLost("the worker does not read") from error
            try:
                # Counted from when it was written: a large result before it may take its time.
                async with asyncio.timeout(HEARTBEATS_WITHOUT_PONG * every_s):
                    await self._ponged.wait()
            except TimeoutError as error:
                raise ConnectionLost(f"no pong within {HEARTBEATS_WITHOUT_PONG} heartbeats") from error
