"""Dispatch: what a session does with its jobs, from the entries it took to the outcomes it hands on.

Promises: a frame for a marked job leaves only after its begin mark is durable; a job is sent once in a session; a
          result counts only when it names a frame of this session or a job of the token's own user.
Used by:  worker.session, which owns the socket; the decisions are worker.delivery's.
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from common.ids import JobId, UserId, is_uuid, new_id
from common.store.jobs import Entry, Taken
from common.store.records import Begin
from common.store.requests import Requests
from towline.wire import frames
from towline.wire.api import timestamp
from worker.delivery import Verb, Window
from worker.insist import insist
from worker.metrics import WorkerMetrics
from worker.outcomes import Ending, Outcomes

logger = structlog.get_logger(__name__)

# Acknowledgements that go out in one frame. Nothing waits for one: it only lets the machine's journal forget.
ACKNOWLEDGED_MAX = 32


@dataclass(frozen=True, slots=True)
class Machine:
    """Whom a session delivers to."""

    user: UserId
    machine: str
    journal: str


class Dispatch:
    """The jobs of one session.

    Args:
        send: queues a frame.
        spawn: runs a coroutine for as long as the session lives.
        place_freed: called when a take could bring something again.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        requests: Requests,
        outcomes: Outcomes,
        metrics: WorkerMetrics,
        send: Callable[[frames.Frame], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        place_freed: Callable[[], None],
    ) -> None:
        self.window = Window()
        self._machine = machine
        self._requests = requests
        self._outcomes = outcomes
        self._metrics = metrics
        self._send = send
        self._spawn = spawn
        self._place_freed = place_freed
        self._job_of_frame: dict[str, JobId] = {}
        self._sent: dict[JobId, tuple[str, float, str]] = {}  # frame id, when (monotonic), traceparent
        self._taken_at: dict[JobId, float] = {}
        self._durable: list[JobId] = []
        self._cancelled: set[JobId] = set()  # what the machine was asked to stop, or will be once it is welcomed
        self._to_cancel: set[JobId] = set()  # what is to be stopped and was not sent yet, or is not here
        self._is_welcomed = False
        self._gathers_acknowledgements = True

    def taken(self, taken: Sequence[Taken]) -> None:
        """Deliver what a take or claim brought, in stream order."""
        now = time.time()
        for entry, claimed, _ in taken:
            if claimed:
                self._metrics.redeliveries_total["claimed"].inc()
            else:
                self._metrics.job_seconds["queue"].observe(max(now - entry.accepted_ms / 1000, 0))
            self._taken_at.setdefault(entry.job, time.monotonic())
        if known := self.window.add(taken):
            logger.info("entries_held_already", user=self._machine.user, jobs=known)
        self.step()

    def step(self) -> None:
        """Do what the window says can be done now."""
        for verb, entry in self.window.plan(time.time() * 1000):
            if verb is Verb.SEND:
                self._send_job(entry, attempt=1)
            elif verb is Verb.MARK:
                self._spawn(self._mark(entry), "mark")
            else:
                self._spawn(self._give_up(entry), "give-up")

    async def _mark(self, entry: Entry) -> None:
        begin = Begin(entry.job, self._machine.machine, self._machine.journal)
        attempt = await insist("mark", lambda: self._requests.begin(begin), job=entry.job)
        if attempt is None:
            await self._give_up(entry)
            return
        self.window.marked(entry.job)
        self._send_job(entry, attempt=attempt)

    async def _give_up(self, entry: Entry) -> None:
        """A job that may not be started here: settle its ended record, or park it for its own machine."""
        m = self._machine
        ended = await insist(
            "give_up", lambda: self._requests.give_up([entry.job], m.machine, m.journal), job=entry.job
        )
        finished = ended.get(entry.job)
        self.window.refused(entry.job, parked=finished is None)
        self._taken_at.pop(entry.job, None)
        if finished is not None:
            record, is_ours = finished
            if is_ours:
                self._metrics.jobs_total[record.state].inc()
            logger.info(
                "job_not_started",
                user=m.user,
                job=entry.job,
                state=record.state,
                attempts=record.attempts,
                traceparent=entry.traceparent,
            )
            self._outcomes.settle(record, Ending(entry.job, _nothing, self._settled))
        self._freed()

    def _send_job(self, entry: Entry, *, attempt: int) -> None:
        frame_id, now = new_id(), time.monotonic()
        self._job_of_frame[frame_id] = entry.job
        self._sent[entry.job] = (frame_id, now, entry.traceparent)
        self._metrics.job_seconds["deliver"].observe(now - self._taken_at.pop(entry.job, now))
        self._send(
            frames.Job(
                id=frame_id,
                job=entry.job,
                idempotency_key=entry.key,
                accepted_at=timestamp(entry.accepted_ms),
                name=entry.name,
                args=entry.args,
                timeout_s=entry.timeout_s,
                deadline_at=timestamp(entry.deadline_ms),
                attempt=attempt,
                hinted=entry.hinted,
                traceparent=entry.traceparent,
            )
        )
        if entry.job in self._to_cancel:
            self._to_cancel.discard(entry.job)
            self.cancel(entry.job)
        logger.debug("job_sent", user=self._machine.user, job=entry.job, frame=frame_id, attempt=attempt)

    def result(self, frame: frames.JobResult) -> None:
        """Take what the machine answered; the durable record decides whether it counts."""
        user = self._machine.user
        job = self._job_of_frame.get(frame.id) if frame.id else JobId(frame.job)
        if job is None or not is_uuid(job):
            logger.warning("result_of_unknown_frame", user=user)
            return
        if sent := self._sent.get(job):
            self._metrics.job_seconds["execute"].observe(time.monotonic() - sent[1])
            if not frame.lane_busy:  # else a second result says when the tool has returned
                del self._sent[job]
                self._job_of_frame.pop(sent[0], None)
        lane_returned = self.window.lane_busy == job and not frame.lane_busy
        first = self.window.result(job, lane_busy=frame.lane_busy)
        if first or (frame.job and not lane_returned):
            traceparent = sent[2] if sent else ""
            self._outcomes.finish(user, frame, Ending(job, self._kept, self._settled, traceparent))
        self._freed()

    def cancel(self, job: JobId) -> None:
        """Stop a job: the machine is asked to, once, if it has it; one that waits here is not sent if it has ended."""
        if job in self._cancelled:
            return  # a burst of cancels must not fill the queue of frames
        if job in self._sent or self.window.is_running(job):
            self._cancelled.add(job)
            if self._is_welcomed:
                self._send_cancel(job)
        else:
            self._to_cancel.add(job)
            self.window.doubt(job)

    def cancel_all(self, jobs: Sequence[JobId]) -> None:
        """Stop all that are to be stopped, as of an assertion: what is not here and not among them has ended."""
        self._to_cancel = {job for job in self._to_cancel if self.window.holds(job)}
        for job in jobs:
            self.cancel(job)

    def welcomed(self) -> None:
        """The machine heeds frames from now on; what it lists as running may have been cancelled before."""
        self._is_welcomed = True
        for job in self._cancelled:
            self._send_cancel(job)

    def _send_cancel(self, job: JobId) -> None:
        sent = self._sent.get(job)
        self._send(frames.JobCancel(id=sent[0] if sent else ""))

    def acknowledge(self) -> None:
        """Tell the machine which outcomes have become durable since the last time."""
        if self._durable:
            self._send(frames.JobResultAck(jobs=self._durable))
            self._durable = []

    def leave(self) -> None:
        """The session will end soon: acknowledge what was gathered, and from now on at once."""
        self._gathers_acknowledgements = False
        self.acknowledge()

    def _kept(self, job: JobId) -> None:
        self._durable.append(job)
        if len(self._durable) >= ACKNOWLEDGED_MAX or not self._gathers_acknowledgements:
            self.acknowledge()

    def _settled(self, job: JobId) -> None:
        self._cancelled.discard(job)
        self._to_cancel.discard(job)
        self.window.gone(job)
        self._freed()

    def _freed(self) -> None:
        self.step()
        if self.window.free_places():
            self._place_freed()


def _nothing(_job: JobId) -> None:
    return None
