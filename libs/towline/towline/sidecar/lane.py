"""The lane: this machine does one job at a time, whatever sockets come and go.

    delivered -> waiting (in its connection) -> started (here) -> outcome kept -> answered
                 |  socket ends: dropped         |  socket ends: goes on
                 |  cancelled, late: answered    |  over its time, cancelled: answered, and the lane is busy
                                                    until the function returns

Owns:     the job that runs now, everyone who waits for its answer, and whether a job may start.
Promises: a job with side effects starts at most once; it is journalled before it starts, and its outcome before it is
          answered; every delivery is answered under its own frame id, on the socket it came by while that is open.
Used by:  sidecar.connection (a lane task per socket feeds it), sidecar.app (owns it).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import structlog

from towline.sidecar import calling
from towline.sidecar.decide import Decision, Join, Refuse, Replay, Row, Run, Unknown, decide
from towline.sidecar.journal import Journal, JournalUnavailable
from towline.sidecar.outcome import JobOutcome, failed, raised, unknown
from towline.sidecar.recent import Recent
from towline.sidecar.tools import BadArgs, LocalTool, Registry
from towline.wire import frames

# What a cancelled coroutine gets to clean up before its job is answered without waiting for it any longer.
CANCEL_GRACE_S = 1.0

# A tool has ended and its outcome cannot be written: it is tried so often before the job ends as `unknown`, which is
# what the journal would say after a restart.
RECORD_TRIES = 5
RECORD_PAUSE_S = 1.0

_logger = structlog.get_logger("towline.sidecar")


class Asker(Protocol):
    """A connection, as far as the lane knows it."""

    @property
    def user(self) -> str: ...
    def send(self, frame: frames.Frame) -> None: ...
    def server_now(self) -> float: ...
    def take(self, frame_id: str) -> bool: ...


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
            ValueError: a time that is none.
        """
        accepted_at = datetime.fromisoformat(frame.accepted_at).timestamp()
        return cls(asker, frame, accepted_at, datetime.fromisoformat(frame.deadline_at).timestamp())

    def answer(self, outcome: JobOutcome, *, replayed: bool = False) -> None:
        self.asker.send(outcome.frame(id_=self.frame.id, replayed=replayed))


@dataclass(slots=True, eq=False)
class Work:
    """A job that has left the queue.

    Attributes:
        asks: whom to tell, and under which frame id; "": by job, unasked.
        stop: done when the job is to end before its tool does, with the outcome for that.
        outcome: set once it is kept.
        returned: set when the lane is free again.
    """

    user: str
    frame: frames.Job
    asks: list[tuple[Asker, str]]
    stop: asyncio.Future[JobOutcome]
    outcome: JobOutcome | None = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, asker: Asker, frame_id: str, *, lane_busy: bool) -> None:
        assert self.outcome is not None
        job = "" if frame_id else self.frame.job
        asker.send(self.outcome.frame(id_=frame_id, job=job, lane_busy=lane_busy))

    def tell_all(self, *, lane_busy: bool) -> None:
        for asker, frame_id in self.asks:
            self.tell(asker, frame_id, lane_busy=lane_busy)


class Lane:
    """Runs tools. Everything but `run` and `leave` returns at once."""

    def __init__(
        self, registry: Registry, journal: Journal, group: asyncio.TaskGroup, *, is_awake: Callable[[], bool]
    ) -> None:
        """
        Args:
            group: owns what has started.
            is_awake: reads the clocks; False: the machine slept, all sockets were just dropped, nothing may start.
        """
        self._registry = registry
        self._journal = journal
        self._group = group
        self._is_awake = is_awake
        self._recent = Recent()
        self._work: Work | None = None
        self._task: asyncio.Task[None] | None = None

    def running(self) -> list[str]:
        """Ids of the jobs that occupy the lane, at most one; what waits is not running."""
        return [self._work.frame.job] if self._work else []

    def deliver(self, delivery: Delivery) -> bool:
        """Take note of a delivery; whether it has to wait for its turn. If not, it is answered, now or with its job."""
        frame = delivery.frame
        decision = self._decide(delivery)
        _logger.info(
            "job_delivered",
            job=frame.job,
            frame=frame.id,
            attempt=frame.attempt,
            tool=frame.name,
            decision=type(decision).__name__.lower(),
        )
        if isinstance(decision, Run):
            return True
        self._settle(delivery, decision)
        return False

    async def run(self, delivery: Delivery) -> None:
        """Start a waiting job now that its turn has come, unless it may no longer start; returns when it is through.

        Cancelling this ends the waiting, never what has started.
        """
        tool = self._registry.get(delivery.frame.name)
        assert tool is not None, "deliver() refused it"
        kwargs, refusal = await self._prepare(delivery, tool)
        while self._work and not refusal:
            # A job of another socket, or one that has outlived its own.
            await self._work.returned.wait()
        # From here to the start nothing is awaited: what is checked still holds when the job starts.
        if not self._is_awake() or not delivery.asker.take(delivery.frame.id):
            return
        decision = self._decide(delivery)
        if not isinstance(decision, Run):
            self._settle(delivery, decision)
        elif refusal:
            self._refuse(delivery, refusal)
        elif delivery.asker.server_now() >= delivery.deadline_at:
            self._refuse(delivery, failed("not-started", "its deadline passed before its turn came"))
        else:
            await self._start(delivery, tool, kwargs).returned.wait()

    def cancel(self, asker: Asker, frame_id: str) -> None:
        """Stop the running job if it was delivered as `frame_id`."""
        work = self._work
        if work and (asker, frame_id) in work.asks and not work.stop.done():
            work.stop.set_result(_ended_early(work.frame, "cancelled", "cancelled while it ran"))

    def attach(self, asker: Asker, listed: list[str]) -> None:
        """Answer by job, on a new socket, what its `hello` listed as running."""
        for job in listed:
            if self._is_running(asker.user, job):
                self._join(asker, "")
            elif outcome := self._find_outcome(asker.user, job):
                asker.send(outcome.frame(job=job, replayed=True))

    def detach(self, asker: Asker) -> None:
        """A socket has ended: nothing can be told there any more."""
        if self._work:
            self._work.asks = [ask for ask in self._work.asks if ask[0] is not asker]

    def acknowledge(self, user: str, job: str) -> None:
        """The server has the outcome."""
        if self._recent.find(user, job):
            self._recent.acknowledge(user, job)
        else:
            self._journal.acknowledge(user, job)

    async def leave(self, budget_s: float) -> None:
        """Give what runs a last chance to end, then let go of it; the journal will call it `unknown`."""
        if self._work is None or self._task is None:
            return
        try:
            async with asyncio.timeout(budget_s):
                await self._work.returned.wait()
        except TimeoutError:
            _logger.warning("job_left_running", job=self._work.frame.job, tool=self._work.frame.name)
            self._task.cancel()

    def _is_running(self, user: str, job: str) -> bool:
        return self._work is not None and (self._work.user, self._work.frame.job) == (user, job)

    def _decide(self, delivery: Delivery) -> Decision:
        frame, user = delivery.frame, delivery.asker.user
        running = self._is_running(user, frame.job)
        try:
            row = None if running else self._find(user, frame)
        except JournalUnavailable as error:
            if frame.attempt > 1:
                return Unknown("journal-unavailable", f"it may have run before: {error}")
            return Refuse("journal-unavailable", str(error))
        tool = self._registry.get(frame.name)
        return decide(
            name=frame.name,
            hinted=frame.hinted,
            accepted_at_ms=round(delivery.accepted_at * 1000),
            running=running,
            row=row,
            horizon_ms=self._journal.horizon_ms,
            hints=tool.hints if tool else None,
        )

    def _find(self, user: str, frame: frames.Job) -> Row | None:
        # A job keeps the hint it was accepted with, so there is one place to look; a hinted one costs no disk.
        return self._recent.find(user, frame.job) if frame.hinted else self._journal.find(user, frame.job)

    def _find_outcome(self, user: str, job: str) -> JobOutcome | None:
        try:
            row = self._recent.find(user, job) or self._journal.find(user, job)
        except JournalUnavailable:
            return None
        return row.outcome if row else None

    def _settle(self, delivery: Delivery, decision: Decision) -> None:
        """Act on a decision that starts nothing."""
        match decision:
            case Join():
                self._join(delivery.asker, delivery.frame.id)
            case Replay(outcome):
                delivery.answer(outcome, replayed=True)
            case Unknown(code, message):
                delivery.answer(unknown(code, message), replayed=True)
            case Refuse(code, message):
                self._refuse(delivery, failed(code, message, retryable=code == "journal-unavailable"))

    def _join(self, asker: Asker, frame_id: str) -> None:
        assert self._work is not None
        self._work.asks.append((asker, frame_id))
        if self._work.outcome:
            # Over its time, its function not yet back: the end can be told now, the free lane later.
            self._work.tell(asker, frame_id, lane_busy=True)

    def _refuse(self, delivery: Delivery, outcome: JobOutcome) -> None:
        code = outcome.error.code if outcome.error else ""
        _logger.info("job_refused", job=delivery.frame.job, tool=delivery.frame.name, code=code)
        delivery.answer(outcome)

    async def _prepare(self, delivery: Delivery, tool: LocalTool) -> tuple[dict[str, Any], JobOutcome | None]:
        """Read the arguments and ask the tool's hook; the second value says why the job must not run."""
        try:
            kwargs = tool.read_args(delivery.frame.args)
        except BadArgs as error:
            return {}, failed("bad-args", f"arguments of {tool.name!r}: {error}")
        if tool.confirm is None:
            return kwargs, None
        try:
            # No longer than the job may wait; who does not answer has not allowed it.
            async with asyncio.timeout(delivery.deadline_at - delivery.asker.server_now()):
                if await calling.is_confirmed(tool.confirm, tool.name, dict(kwargs)):
                    return kwargs, None
        except Exception as error:
            _logger.warning("not_confirmed", job=delivery.frame.job, tool=tool.name, error=type(error).__name__)
        return kwargs, failed("not-confirmed", "this machine's user did not allow it")

    def _start(self, delivery: Delivery, tool: LocalTool, kwargs: dict[str, Any]) -> Work:
        frame, asker = delivery.frame, delivery.asker
        stop = asyncio.get_running_loop().create_future()
        work = self._work = Work(asker.user, frame, [(asker, frame.id)], stop)
        self._task = self._group.create_task(self._execute(work, delivery, tool, kwargs), name=f"job:{frame.job}")
        return work

    async def _execute(self, work: Work, delivery: Delivery, tool: LocalTool, kwargs: dict[str, Any]) -> None:
        """From the begin mark to the answer, and on until the tool has returned."""
        call: asyncio.Future[JobOutcome] | None = None
        try:
            work.outcome = await self._begin(work, delivery)
            if work.outcome is None:
                call = calling.start(tool, kwargs)
                work.outcome = await self._keep(work, await self._end(work, call, tool))
            if call is None or call.done():
                work.tell_all(lane_busy=False)
                return
            _logger.warning("lane_busy", job=work.frame.job, tool=tool.name)
            work.tell_all(lane_busy=True)
            await asyncio.wait((call,))
            _logger.info("lane_free", job=work.frame.job, tool=tool.name)
            work.tell_all(lane_busy=False)
        except Exception:
            # A fault of ours must not take the lane down; what the journal says of this job, it says to redeliveries.
            _logger.exception("job_crashed", job=work.frame.job, tool=tool.name)
            work.outcome = work.outcome or _ended_early(work.frame, "sidecar-error", "the sidecar failed; see its log")
            work.tell_all(lane_busy=False)
        finally:
            if call is not None:
                call.cancel()
            self._work = self._task = None
            work.returned.set()

    async def _begin(self, work: Work, delivery: Delivery) -> JobOutcome | None:
        """Mark the job as begun; an outcome if it must not start after all."""
        frame = work.frame
        if not frame.hinted:
            try:
                await self._journal.begin(
                    work.user,
                    frame.job,
                    accepted_at_ms=round(delivery.accepted_at * 1000),
                    tool=frame.name,
                    args=bytes(frame.args),
                )
            except JournalUnavailable as error:
                return failed("journal-unavailable", str(error), retryable=True)
            # The disk may have taken its time.
            if work.stop.done():
                return await self._keep(work, failed("cancelled", "cancelled before it started"))
            if not self._is_awake() or delivery.asker.server_now() >= delivery.deadline_at:
                late = failed("not-started", "the machine slept, or the deadline passed, before it could start")
                return await self._keep(work, late)
        _logger.info("job_started", job=frame.job, tool=frame.name)
        return None

    async def _end(self, work: Work, call: asyncio.Future[JobOutcome], tool: LocalTool) -> JobOutcome:
        """Wait for the tool, its time, or a cancel, whichever is first."""
        frame = work.frame
        began = time.monotonic()
        await asyncio.wait((call, work.stop), timeout=frame.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            outcome = raised(asyncio.CancelledError("the tool cancelled itself")) if call.cancelled() else call.result()
        else:
            if tool.is_async:
                call.cancel()
                await asyncio.wait((call,), timeout=CANCEL_GRACE_S)
            timed_out = _ended_early(frame, "timeout", f"still running after {frame.timeout_s:g} s")
            outcome = work.stop.result() if work.stop.done() else timed_out
        _logger.info(
            "job_ended",
            job=frame.job,
            tool=frame.name,
            outcome=outcome.outcome,
            code=outcome.error.code if outcome.error else "",
            seconds=round(time.monotonic() - began, 3),
        )
        return outcome

    async def _keep(self, work: Work, outcome: JobOutcome) -> JobOutcome:
        """Keep the outcome for redeliveries; returns what may be told."""
        if work.frame.hinted:
            self._recent.remember(work.user, work.frame.job, outcome)
            return outcome
        for remaining in reversed(range(RECORD_TRIES)):
            try:
                await self._journal.finish(work.user, work.frame.job, outcome)
                return outcome
            except JournalUnavailable as error:
                _logger.warning("outcome_not_recorded", job=work.frame.job, reason=str(error), tries_left=remaining)
                if remaining:
                    await asyncio.sleep(RECORD_PAUSE_S)
        return unknown("journal-unavailable", f"the tool ended as {outcome.outcome}, and that could not be recorded")


def _ended_early(frame: frames.Job, code: str, message: str) -> JobOutcome:
    """A tool that changes nothing, or nothing more, has simply failed; of any other, nobody knows how far it came."""
    return failed(code, message) if frame.hinted else unknown(code, message)
