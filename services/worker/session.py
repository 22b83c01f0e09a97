"""One sidecar's session: reader, writer and what is in flight between them.

Promises: the reader never awaits work; one task owns `send`; a session that is outranked stops.
Used by:  worker.sockets makes it, worker.pump feeds it (served) and its dispatch (taken), and is told what it owes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from common.errors import StoreUnavailable
from common.ids import GatewayId, JobId, MachineId, SessionId, UserId, WorkerId, new_id
from common.process.backoff import Backoff
from common.store import keys
from common.store.presence import Assertion, Served
from common.store.requests import Requests
from common.store.tokens import Minted
from towline.wire import frames
from worker.dispatch import Dispatch, Machine
from worker.hello import read_catalogue
from worker.metrics import CLOSE_OF_CODE, WorkerMetrics
from worker.outcomes import Outcomes

logger = structlog.get_logger(__name__)

# A machine that takes nothing off its socket this long holds up its own jobs; the socket is cut and its work claimed.
SEND_TIMEOUT_S = 20.0
# Frames that may wait for the writer: the window's, status calls and acknowledgements, with room to spare.
SEND_QUEUE_MAX = 256
# With so many waiting no probe is added: a burst of probes must leave the jobs their places, and cut nobody off.
PROBE_QUEUE_MAX = SEND_QUEUE_MAX // 2
# How long a stand-by machine is asked to wait before it tries again.
STAND_BY_S = 20


class Desk(Protocol):
    """What a session asks of its pump."""

    def owe_serve(self, session: "Session") -> None:
        """Assert, claim and take soon."""

    def owe_take(self, session: "Session") -> None:
        """Take soon."""


class Refused(Exception):
    """The session must end with this close code and reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Session:
    """One connected machine. `serve` runs it to its end."""

    def __init__(
        self,
        socket: ServerConnection,
        hello: frames.Hello,
        minted: Minted,
        *,
        worker: WorkerId,
        timing: keys.Timing,
        requests: Requests,
        outcomes: Outcomes,
        metrics: WorkerMetrics,
        desk: Desk,
        announce: Callable[[Sequence[frames.Tool]], Coroutine[Any, Any, None]],
        tell: Callable[[GatewayId, dict[str, str]], Coroutine[Any, Any, None]],
    ) -> None:
        self.id = SessionId(new_id())
        self.user: UserId = minted.user
        self.epoch = minted.epoch
        self.token_id = minted.token_id
        self.token_hash = minted.hash  # of the value that the machine has: this one, then what the pump sends it
        self.machine = MachineId(hello.machine)
        self.owes_serve = False
        self.owes_take = False
        self.left_behind = False
        self.asserted = False
        self._socket = socket
        self._worker = worker
        self._timing = timing
        self._metrics = metrics
        self._desk = desk
        self._announce = announce
        self._tell = tell
        self._catalogue = _hints(hello.tools)
        self._tools: dict[str, bool] | None = self._catalogue  # what the next assertion writes; None: unchanged
        self._asserted_tools: dict[str, bool] | None = None
        self._announcing: Sequence[frames.Tool] | None = None
        self._unreadable: Sequence[str] = ()  # entries that the next assertion removes
        self._since_ms = int(time.time() * 1000)
        self._heard = time.monotonic()
        self._pinged = False
        self._probes: dict[str, tuple[GatewayId, str]] = {}
        # A list and an event: an `asyncio.Queue` would cost every idle socket two kilobytes more.
        self._outbox: list[frames.Frame] = []
        self._has_frames = asyncio.Event()
        self._end: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._goodbye = False
        self.dispatch = Dispatch(
            Machine(self.user, self.machine, hello.journal),
            requests=requests,
            outcomes=outcomes,
            metrics=metrics,
            send=self.send,
            spawn=self._spawn,
            place_freed=self.place_freed,
        )
        self.window = self.dispatch.window
        self.window.add_running(JobId(job) for job in hello.running)

    # ---- its life

    async def serve(self) -> str:
        """Run until the socket or the session ends; returns why (a label of the metric)."""
        label = "lost"
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._read(), name=f"reader:{self.user}")
                group.create_task(self._write(), name=f"writer:{self.user}")
                self._desk.owe_serve(self)
                raise await self._end
        except* Refused as refusals:
            refusal = refusals.exceptions[0]
            while isinstance(refusal, BaseExceptionGroup):
                refusal = refusal.exceptions[0]
            assert isinstance(refusal, Refused)
            label = CLOSE_OF_CODE[refusal.code]
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1):
                    await self._socket.close(refusal.code, frames.close_reason(refusal.reason))
        except* ConnectionClosed:
            label = "goodbye" if self._goodbye else "lost"
        finally:
            self._group = None
            self._socket.transport.abort()
        return label

    @property
    def alive(self) -> bool:
        """Whether the session still serves."""
        return self._group is not None and not self._end.done()

    @property
    def said_goodbye(self) -> bool:
        """Whether the machine left on purpose."""
        return self._goodbye

    def end(self, code: int, reason: str) -> None:
        """End the session with a close code; the first reason counts."""
        if not self._end.done():
            self._end.set_result(Refused(code, reason))

    def drain(self) -> None:
        """Ask the machine to connect elsewhere; until it has, everything goes on."""
        self.dispatch.leave()
        self.send(frames.Draining())

    def send(self, frame: frames.Frame) -> None:
        """Queue a frame. A machine so slow that the queue is full is cut off; without a session nothing happens."""
        if not self.alive:
            return
        if len(self._outbox) >= SEND_QUEUE_MAX:
            self.end(frames.Close.TOO_SLOW, "frames wait too long")
            return
        self._outbox.append(frame)
        self._has_frames.set()

    async def _write(self) -> None:
        while True:
            if not self._outbox:
                self._has_frames.clear()
                await self._has_frames.wait()
            frame = self._outbox.pop(0)
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._socket.send(frames.encode(frame))
            except TimeoutError:
                # A blocked send would hold up the keep-alive too, for ever.
                self._socket.transport.abort()
                raise Refused(frames.Close.TOO_SLOW, "the machine takes no frames") from None

    async def _read(self) -> None:
        async for text in self._socket:
            self._heard = time.monotonic()
            self._pinged = False
            if not isinstance(text, str):
                raise Refused(frames.Close.BAD_FRAME, "a binary frame: frames are JSON text")
            try:
                frame = frames.decode_from_sidecar(text)
            except frames.FrameError as error:
                raise Refused(frames.Close.BAD_FRAME, f"a bad frame: {error}") from error
            self._handle(frame)
        raise ConnectionClosed(None, None)

    def _handle(self, frame: frames.FromSidecar | None) -> None:
        match frame:
            case frames.JobResult():
                self.dispatch.result(frame)
            case frames.Ping():
                self.send(frames.Pong(n=frame.n))
            case frames.StatusResult():
                self._probed(frame)
            case frames.Tools():
                self._change_catalogue(frame)
            case frames.Goodbye():
                self._goodbye = True
            case frames.Hello():
                raise Refused(frames.Close.BAD_FRAME, "a second hello")
            case frames.Pong():
                pass
            case None:
                self._metrics.unknown_frames_total.inc()
                logger.debug("frame_of_unknown_type", user=self.user, session=self.id)

    def _change_catalogue(self, frame: frames.Tools) -> None:
        try:
            tools = read_catalogue(frame.tools)
        except frames.FrameError as error:
            raise Refused(frames.Close.BAD_FRAME, f"tools: {error}") from error
        self._catalogue = self._tools = _hints(tools)
        self._announcing = tools
        self._spawn(self._record_catalogue(tools), "announce")
        self._desk.owe_serve(self)

    async def _record_catalogue(self, tools: Sequence[frames.Tool]) -> None:
        """Keep the newest catalogue; the door has it from Redis, so its record may follow when Postgres is back."""
        backoff = Backoff(first_s=0.05, cap_s=2.0)
        while tools is self._announcing:
            try:
                await self._announce(tools)
                self._announcing = None
            except StoreUnavailable as error:
                logger.warning("catalogue_waits", user=self.user, error=str(error))
                await asyncio.sleep(backoff.next_s())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            if self._group is not None:
                self._group.create_task(work, name=f"{name}:{self.user}")
                return
        except RuntimeError:
            pass  # the session is ending and its group takes no more; what is in flight goes to the next session
        work.close()

    # ---- presence and delivery: called by the pump

    def beat(self) -> None:
        """Once per heartbeat: stay present while the machine shows signs of life, else end."""
        silent_s = time.monotonic() - self._heard
        if silent_s > self._timing.sign_of_life_max_age_s:
            self.end(frames.Close.NO_PONG, "no sign of life")
            return
        if silent_s > self._timing.heartbeat_s / 2 and not self._pinged:
            self._pinged = True
            self.send(frames.Ping())
        self.dispatch.acknowledge()
        self._desk.owe_serve(self)

    def assertion(self) -> Assertion:
        """What to assert now."""
        now = time.time()
        self._asserted_tools = self._tools
        return Assertion(
            user=self.user,
            machine=self.machine,
            worker=self._worker,
            session=self.id,
            epoch=self.epoch,
            first=not self.asserted,
            since_ms=self._since_ms,
            seen_ms=int((now - (time.monotonic() - self._heard)) * 1000),
            busy=self.window.is_busy(),
            free=self.window.free_places(),
            in_flight=self.window.in_flight(now * 1000),
            tools=self._tools,
            unreadable=self._unreadable,
        )

    def served(self, served: Served) -> None:
        """The answer to the assertion: be welcomed, be outranked, and deliver what it brought."""
        if served.status == "outranked" and served.machine == self.machine:
            self.end(frames.Close.REPLACED, "a newer session of this machine is connected")
            return
        if served.status != "ok":
            self.end(frames.Close.OTHER_MACHINE, f"{STAND_BY_S} s: another machine of this user is connected")
            return
        if not self.asserted:
            self.asserted = True
            self.send(
                frames.Welcome(
                    session=self.id,
                    epoch=self.epoch,
                    heartbeat_s=self._timing.heartbeat_s,
                    max_frame_bytes=frames.FRAME_BYTES_MAX,
                    server_time=time.time(),
                    user=self.user,
                )
            )
            self.dispatch.welcomed()
        self.left_behind = served.left > 0
        self._unreadable = served.unreadable
        if served.unreadable:
            for entry in served.unreadable:
                logger.error("entry_unreadable", user=self.user, entry=entry)
            self._desk.owe_serve(self)  # which removes them, and brings what they kept out
        if served.tools_missing:
            self._tools = self._catalogue
            self._desk.owe_serve(self)
        elif self._tools is self._asserted_tools:  # else they changed while this assertion was on its way
            self._tools = None
        self.dispatch.taken(served.taken)
        self.dispatch.cancel_all(served.cancels)

    def place_freed(self) -> None:
        """There is room again: claim what a claim left behind, else take what is owed."""
        if self.left_behind:
            self._desk.owe_serve(self)
        elif self.owes_take:
            self._desk.owe_take(self)

    # ---- notes from gateways

    def probe(self, nonce: str, reply_to: GatewayId) -> None:
        """Ask the machine for a sign of life now; the answer goes to the gateway, which does not wait for ever."""
        if len(self._outbox) >= PROBE_QUEUE_MAX:
            return
        probe_id = new_id()
        self._probes[probe_id] = (reply_to, nonce)
        while len(self._probes) > SEND_QUEUE_MAX:
            self._probes.pop(next(iter(self._probes)))
        self.send(frames.Status(id=probe_id))

    def _probed(self, frame: frames.StatusResult) -> None:
        if probe := self._probes.pop(frame.id, None):
            gateway, nonce = probe
            self._spawn(self._tell(gateway, {"probe": nonce, "busy": str(int(frame.busy))}), "probe")


def _hints(tools: Sequence[frames.Tool]) -> dict[str, bool]:
    return {tool.name: tool.hints.repeatable for tool in tools}
