"""The lane: this machine does one job at a time, whatever sockets come and go.

    delivered -> waiting -> (the user is asked) -> started -> answered
                 |  socket ends: dropped           |  socket ends: goes on
                 |  cancelled, late: answered      |  the next one starts when its tool has returned

Owns:     what waits, in the order of its delivery, and the one job that runs.
Promises: a job with side effects starts at most once; nothing starts when its deadline has passed, or after a sleep of
          the machine before the next welcome; what is not started is answered, or dropped with its socket.
Used by:  sidecar.connection (delivers, cancels, acknowledges), sidecar.app (owns it).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from towline.sidecar import calling
from towline.sidecar.decide import Decision, Join, Refuse, Replay, Run, Unknown, decide
from towline.sidecar.journal import JournalUnavailable
from towline.sidecar.memory import Memory
from towline.sidecar.outcome import JobOutcome, failed, unknown
from towline.sidecar.tools import BadArgs, Confirm, LocalTool, Registry
from towline.sidecar.work import Asker, Delivery, Work

# A worker sends at most 16 jobs ahead, and there are two sockets for the moment of a hand-over. Beyond this the other
# side keeps no rules and is told so, job by job.
WAITING_MAX = 64

_logger = structlog.get_logger("towline.sidecar")


class Lane:
    """Runs tools. Everything but `leave` returns at once."""

    def __init__(self, registry: Registry, memory: Memory, *, is_awake: Callable[[], bool]) -> None:
        """
        Args:
            is_awake: reads the clocks; False: the machine slept, all sockets were just dropped, nothing may start.
        """
        self._registry = registry
        self._memory = memory
        self._is_awake = is_awake
        self._waiting: dict[tuple[Asker, str], Delivery] = {}
        # Its turn has come, and its user is being asked.
        self._asking: tuple[Delivery, asyncio.Task[None]] | None = None
        self._work: Work | None = None

    def running(self) -> list[str]:
        """Ids of the jobs that have started, at most one; what waits is not running."""
        return [self._work.frame.job] if self._work else []

    @property
    def queue(self) -> int:
        """How many jobs wait."""
        return len(self._waiting) + (self._asking is not None)

    def deliver(self, delivery: Delivery) -> None:
        """Answer a delivery, join it to the job that runs, start it or let it wait for its turn."""
        frame = delivery.frame
        decision = self._decide(delivery)
        _logger.debug(
            "job_delivered",
            job=frame.job,
            frame=frame.id,
            attempt=frame.attempt,
            tool=frame.name,
            decision=type(decision).__name__.lower(),
        )
        if not isinstance(decision, Run):
            self._settle(delivery, decision)
        elif not delivery.asker.starts_jobs:
            pass  # that socket is being left: the next one brings it again
        elif self._is_free and not self._waiting:
            if self._is_awake():
                self._give_turn(delivery)
        elif len(self._waiting) >= WAITING_MAX:
            self._refuse(delivery, failed("lane-full", f"{WAITING_MAX} jobs wait already", retryable=True))
        else:
            self._waiting[delivery.asker, frame.id] = delivery

    def cancel(self, asker: Asker, frame_id: str) -> None:
        """Stop the job that was delivered as `frame_id`, if that can be done."""
        if delivery := self._waiting.pop((asker, frame_id), None):
            delivery.answer(failed("cancelled", "cancelled before it started"))
        elif self._asking and (self._asking[0].asker, self._asking[0].frame.id) == (asker, frame_id):
            self._asking[0].answer(failed("cancelled", "cancelled before it started"))
            self._stop_asking()
        elif self._work and self._work.is_asked_by(asker, frame_id):
            self._work.cancel()

    def attach(self, asker: Asker, listed: list[str]) -> None:
        """Answer by job, on a new socket, all that its `hello` listed as running: the worker starts nothing before."""
        for job in listed:
            if self._work and self._is_running(asker.user, job):
                self._work.join(asker, "")
                continue
            # It has ended since. Acknowledged on the old socket, it has left no copy here, but the worker needs a word:
            # see tests/recovery/test_answers_by_job.py. The record, which is durable then, stays as it is.
            outcome = self._memory.find_outcome(asker.user, job)
            outcome = outcome or unknown("acknowledged", "this job ran; the machine keeps no copy of its outcome")
            asker.send(outcome.frame(job=job, replayed=True))

    def forget(self, asker: Asker) -> None:
        """Start nothing more of what came by this socket."""
        for key in [key for key in self._waiting if key[0] is asker]:
            del self._waiting[key]
        if self._asking and self._asking[0].asker is asker:
            self._stop_asking()

    def detach(self, asker: Asker) -> None:
        """A socket has ended: nothing can be told there any more."""
        self.forget(asker)
        if self._work:
            self._work.detach(asker)

    def acknowledge(self, user: str, job: str) -> None:
        """The server has the outcome."""
        self._memory.acknowledge(user, job)

    async def leave(self, budget_s: float) -> None:
        """Give what runs a last chance to end, then let go of it. Sockets must have been forgotten before."""
        if self._work:
            await self._work.leave(budget_s)

    @property
    def _is_free(self) -> bool:
        return self._work is None and self._asking is None

    def _is_running(self, user: str, job: str) -> bool:
        return self._work is not None and self._work.frame.job == job and self._work.user == user

    def _decide(self, delivery: Delivery) -> Decision:
        frame, user = delivery.frame, delivery.asker.user
        running = self._is_running(user, frame.job)
        try:
            row = None if running else self._memory.find(user, frame)
        except JournalUnavailable as error:
            if frame.attempt > 1:
                return Unknown("journal-unavailable", f"it may have run before: {error}")
            return Refuse("journal-unavailable", str(error))
        tool = self._registry.get(frame.name)
        return decide(
            name=frame.name,
            hinted=frame.hinted,
            accepted_at_ms=delivery.accepted_at_ms,
            running=running,
            row=row,
            horizon_ms=self._memory.horizon_ms,
            hints=tool.hints if tool else None,
        )

    def _settle(self, delivery: Delivery, decision: Decision) -> None:
        """Act on a decision that starts nothing."""
        match decision:
            case Join():
                assert self._work is not None
                self._work.join(delivery.asker, delivery.frame.id)
            case Replay(outcome):
                delivery.answer(outcome, replayed=True)
            case Unknown(code, message):
                delivery.answer(unknown(code, message), replayed=True)
            case Refuse(code, message):
                self._refuse(delivery, failed(code, message, retryable=code == "journal-unavailable"))

    def _refuse(self, delivery: Delivery, outcome: JobOutcome) -> None:
        code = outcome.error.code if outcome.error else ""
        _logger.info("job_refused", job=delivery.frame.job, tool=delivery.frame.name, code=code)
        delivery.answer(outcome)

    def _next(self) -> None:
        """If the lane is free, give it to what has waited longest and may still start."""
        while self._is_free and self._waiting:
            if not self._is_awake():
                return
            delivery = self._waiting.pop(next(iter(self._waiting)))
            # What was decided when it came may no longer hold: another delivery of the same job may have run.
            decision = self._decide(delivery)
            if isinstance(decision, Run):
                self._give_turn(delivery)
            else:
                self._settle(delivery, decision)

    def _give_turn(self, delivery: Delivery) -> None:
        tool = self._registry.get(delivery.frame.name)
        assert tool is not None, "it would have been refused"
        try:
            kwargs = tool.read_args(delivery.frame.args)
        except BadArgs as error:
            self._refuse(delivery, failed("bad-args", f"arguments of {tool.name!r}: {error}"))
            return
        if tool.confirm is None:
            self._start(delivery, tool, kwargs)
        else:
            asking = self._ask(delivery, tool, tool.confirm, kwargs)
            name = f"confirm:{delivery.frame.job}"
            self._asking = delivery, asyncio.get_running_loop().create_task(asking, name=name)

    async def _ask(self, delivery: Delivery, tool: LocalTool, confirm: Confirm, kwargs: dict[str, Any]) -> None:
        """Ask the tool's hook, before anything is marked."""
        is_confirmed = False
        try:
            # No longer than the job may wait; who does not answer has not allowed it.
            async with asyncio.timeout(delivery.deadline_at - delivery.asker.server_now()):
                is_confirmed = await calling.is_confirmed(confirm, tool.name, dict(kwargs))
        except Exception as error:
            _logger.warning("not_confirmed", job=delivery.frame.job, tool=tool.name, error=type(error).__name__)
        self._asking = None
        # It may have taken long: all that was checked before is checked again.
        if self._is_awake():
            decision = self._decide(delivery)
            if not isinstance(decision, Run):
                self._settle(delivery, decision)
            elif is_confirmed:
                self._start(delivery, tool, kwargs)
            else:
                self._refuse(delivery, failed("not-confirmed", "this machine's user did not allow it"))
        self._next()

    def _stop_asking(self) -> None:
        """Its job was cancelled, or its socket has ended."""
        assert self._asking is not None
        self._asking[1].cancel()
        self._asking = None
        # Not now: other sockets may be about to be forgotten.
        asyncio.get_running_loop().call_soon(self._next)

    def _start(self, delivery: Delivery, tool: LocalTool, kwargs: dict[str, Any]) -> None:
        # Between the reading of the clocks and this nothing was awaited: what was checked still holds.
        if delivery.is_late():
            self._refuse(delivery, failed("not-started", "its deadline passed before its turn came", retryable=True))
            return
        self._work = Work(delivery, tool, kwargs, memory=self._memory, is_awake=self._is_awake, returned=self._free)
        self._work.start()

    def _free(self) -> None:
        self._work = None
        self._next()
