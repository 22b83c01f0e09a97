"""One job that has left the queue, in one task: from its begin mark to its last answer.

    begin mark -> tool -> outcome kept -> answered
                   |  over its time, or cancelled: kept and answered at once, and once more when the tool has returned

Promises: a job with side effects is journalled before its tool starts, and every outcome kept before it is answered;
          whoever asked is answered under the frame id that was used, as long as that socket is open.
Used by:  sidecar.lane, which has one at a time.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import structlog

from towline.sidecar import calling
from towline.sidecar.journal import JournalUnavailable
from towline.sidecar.memory import Memory
from towline.sidecar.outcome import UNCERTAIN, JobOutcome, failed, raised, unknown
from towline.sidecar.tools import LocalTool
from towline.wire import frames

# What a cancelled coroutine gets to clean up before its job is answered without waiting for it any longer.
CANCEL_GRACE_S = 1.0

_logger = structlog.get_logger("towline.sidecar")


class Asker(Protocol):
    """A connection, as far as jobs know it."""

    @property
    def user(self) -> str: ...
    @property
    def starts_jobs(self) -> bool: ...
    def send(self, frame: frames.Frame) -> None: ...
    def server_now(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """One frame from one socket. `accepted_at`, `deadline_at`: seconds since the epoch by the server's clock."""

    asker: Asker
    frame: frames.Job
    accepted_at: float
    deadline_at: float

    @classmethod
    def read(cls, asker: Asker, frame: frames.Job) -> "Delivery":
        """
        Raises:
            ValueError, OverflowError: a time that is none.
        """
        accepted_at = datetime.fromisoformat(frame.accepted_at).timestamp()
        return cls(asker, frame, accepted_at, datetime.fromisoformat(frame.deadline_at).timestamp())

    @property
    def accepted_at_ms(self) -> int:
        return round(self.accepted_at * 1000)

    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return self.asker.server_now() >= self.deadline_at

    def answer(self, outcome: JobOutcome, *, replayed: bool = False) -> None:
        self.asker.send(outcome.frame(id_=self.frame.id, replayed=replayed))


class Work:
    """A started job. It outlives the socket that it came by.

    Attributes:
        outcome: set once it is kept.
    """

    def __init__(
        self,
        delivery: Delivery,
        tool: LocalTool,
        kwargs: dict[str, Any],
        *,
        memory: Memory,
        is_awake: Callable[[], bool],
        returned: Callable[[], None],
    ) -> None:
        """
        Args:
            returned: called once, when everything is told and the tool has returned.
        """
        self.user = delivery.asker.user
        self.frame = delivery.frame
        self.outcome: JobOutcome | None = None
        # Whom to tell, and under which frame id; "": by job, unasked.
        self._asks: list[tuple[Asker, str]] = [(delivery.asker, delivery.frame.id)]
        self._delivery = delivery
        self._tool = tool
        self._kwargs = kwargs
        self._memory = memory
        self._is_awake = is_awake
        self._returned = returned
        self._loop = asyncio.get_running_loop()
        self._began = 0.0
        self._is_cancelled = False
        self._in_tool = False
        self._timer: asyncio.TimerHandle | None = None
        self._left_tool: asyncio.Future[None] | None = None
        self._early_end: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Call once."""
        # Not in the sidecar's task group: a coroutine that ignores its cancel must not keep `Sidecar.run` from ending.
        self._task = self._loop.create_task(self._run(), name=f"job:{self.frame.job}")

    def join(self, asker: Asker, frame_id: str) -> None:
        """Answer this one too. `frame_id`: "" to answer by job."""
        self._asks.append((asker, frame_id))
        if self.outcome:
            # Over its time, its function not yet back: the end can be told now, the free lane later.
            self._tell(asker, frame_id, self.outcome, lane_busy=True)

    def detach(self, asker: Asker) -> None:
        """A socket has ended: nothing can be told there any more."""
        self._asks = [ask for ask in self._asks if ask[0] is not asker]

    def is_asked_by(self, asker: Asker, frame_id: str) -> bool:
        """Whether it was delivered by this socket as `frame_id`."""
        return (asker, frame_id) in self._asks

    def cancel(self) -> None:
        """Stop it if that can be done. What has ended already has ended."""
        self._is_cancelled = True
        if self._in_tool:
            self._end_early(self._ended_early("cancelled", "cancelled while it ran"))

    async def leave(self, budget_s: float) -> None:
        """Give it a last chance to end, then let go of it; the journal will call it `unknown`."""
        assert self._task is not None
        await asyncio.wait((self._task,), timeout=budget_s)
        if not self._task.done():
            _logger.warning("job_left_running", job=self.frame.job, tool=self._tool.name)
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=CANCEL_GRACE_S)

    async def _run(self) -> None:
        try:
            self.outcome = await self._begin()
            if self.outcome is None:
                outcome = await self._call()
                if self._early_end:
                    await self._early_end
                else:
                    self._log_end(outcome)
                    self.outcome = await self._memory.keep(self.user, self.frame, outcome)
            self._tell_all(lane_busy=False)
        except Exception:
            # A fault of ours must not take the lane down; what the journal says of this job, it says to redeliveries.
            _logger.exception("job_crashed", job=self.frame.job, tool=self._tool.name)
            self.outcome = self.outcome or self._ended_early("sidecar-error", "the sidecar failed; see its log")
            self._tell_all(lane_busy=False)
        finally:
            self._returned()

    async def _begin(self) -> JobOutcome | None:
        """Mark the job as begun; an outcome if it must not start after all."""
        if not self.frame.hinted:
            try:
                await self._memory.begin(self.user, self.frame, self._delivery.accepted_at_ms)
            except JournalUnavailable as error:
                return failed("journal-unavailable", str(error), retryable=True)
            # The disk may have taken its time.
            if not self._is_awake() or self._delivery.is_late():
                late = failed("not-started", "the machine slept, or its deadline passed", retryable=True)
                return await self._memory.keep(self.user, self.frame, late)
        if self._is_cancelled:
            return await self._memory.keep(self.user, self.frame, failed("cancelled", "cancelled before it started"))
        _logger.debug("job_started", job=self.frame.job, tool=self.frame.name)
        return None

    async def _call(self) -> JobOutcome:
        """Run the tool, for as long as it takes."""
        # Called when the tool waits for something for the first time: one that does not needs no timer.
        self._loop.call_soon(self._start_timer)
        self._began = time.monotonic()
        self._in_tool = True
        try:
            return await calling.call(self._tool, self._kwargs)
        except asyncio.CancelledError:
            if self._early_end is None and self._task and self._task.cancelling():
                raise  # we are leaving
            return raised(asyncio.CancelledError("the tool cancelled itself"))
        finally:
            self._in_tool = False
            if self._timer:
                self._timer.cancel()
            if self._left_tool:
                self._left_tool.set_result(None)

    def _start_timer(self) -> None:
        if self._in_tool:
            elapsed_s = time.monotonic() - self._began
            self._timer = self._loop.call_later(self.frame.timeout_s - elapsed_s, self._time_out)

    def _time_out(self) -> None:
        self._end_early(self._ended_early("timeout", f"still running after {self.frame.timeout_s:g} s"))

    def _end_early(self, outcome: JobOutcome) -> None:
        """End the job as `outcome` now, whatever its tool still does; the first reason counts."""
        if self._early_end:
            return
        self._left_tool = self._loop.create_future()
        self._early_end = self._loop.create_task(self._answer_early(outcome), name=f"early-end:{self.frame.job}")
        if self._tool.is_async and self._task:
            self._task.cancel()

    async def _answer_early(self, outcome: JobOutcome) -> None:
        assert self._left_tool is not None
        assert self._task is not None
        if self._tool.is_async:
            await asyncio.wait((self._left_tool,), timeout=CANCEL_GRACE_S)
            # It was meant for the tool; what follows here must not look cancelled.
            self._task.uncancel()
        self._log_end(outcome)
        self.outcome = await self._memory.keep(self.user, self.frame, outcome)
        if self._in_tool:
            _logger.warning("lane_busy", job=self.frame.job, tool=self._tool.name)
            self._tell_all(lane_busy=True)
            await self._left_tool
            _logger.info("lane_free", job=self.frame.job, tool=self._tool.name)

    def _ended_early(self, code: str, message: str) -> JobOutcome:
        """A tool that changes nothing, or nothing more, has failed; of any other, nobody knows how far it came."""
        return failed(code, message) if self.frame.hinted else unknown(code, f"{message}; {UNCERTAIN}")

    def _tell_all(self, *, lane_busy: bool) -> None:
        assert self.outcome is not None
        for asker, frame_id in self._asks:
            self._tell(asker, frame_id, self.outcome, lane_busy=lane_busy)

    def _tell(self, asker: Asker, frame_id: str, outcome: JobOutcome, *, lane_busy: bool) -> None:
        asker.send(outcome.frame(id_=frame_id, job="" if frame_id else self.frame.job, lane_busy=lane_busy))

    def _log_end(self, outcome: JobOutcome) -> None:
        _logger.info(
            "job_ended",
            job=self.frame.job,
            tool=self.frame.name,
            outcome=outcome.outcome,
            code=outcome.error.code if outcome.error else "",
            seconds=round(time.monotonic() - self._began, 3),
            traceparent=self.frame.traceparent,
        )
