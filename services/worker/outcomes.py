"""Outcomes: from a machine's answer to the durable record, and only then to whoever waits.

Promises: an outcome is written by one guarded statement, batched; what is published is the record, not what came in;
          while a store is away outcomes wait here, bounded in bytes. What does not fit is let go: the machine keeps it
          in its journal until we acknowledge it, and the next claim asks for it again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import structlog

from common.ids import JobId, UserId, new_id
from common.store.jobs import Jobs
from common.store.records import Ended, Finish, Record, error_outcome
from common.store.requests import Requests
from towline.wire import frames, json
from worker.insist import insist
from worker.metrics import WorkerMetrics

logger = structlog.get_logger(__name__)


class Ending(NamedTuple):
    """What a session learns of a job that it delivered."""

    job: JobId
    durable: Callable[[JobId], None]  # the outcome is in Postgres: the journal may let go
    settled: Callable[[JobId], None]  # nothing of the job is left in Redis (or the outcome was let go)
    traceparent: str = ""  # of the submission; "": it gave none, or an older session delivered the job


class Outcomes:
    """The durable finish of every session of this worker."""

    def __init__(self, requests: Requests, jobs: Jobs, metrics: WorkerMetrics, *, bytes_max: int) -> None:
        self._requests = requests
        self._jobs = jobs
        self._metrics = metrics
        self._bytes_max = bytes_max
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # Looked at when it is asked for: while nothing can be written, no task ends and tells.
        metrics.queue_depth["outcomes"].set_function(lambda: len(self._tasks))

    def finish(self, user: UserId, result: frames.JobResult, ending: Ending) -> None:
        """Take a machine's outcome; it is written and settled in the background, whatever becomes of the socket."""
        state, outcome = outcome_of(result)
        if self._bytes + _cost(outcome) > self._bytes_max:
            logger.warning("outcome_let_go", user=user, job=ending.job, reason="too many wait for Postgres")
            ending.settled(ending.job)
            return
        self._start(self._finish(Finish(ending.job, user, state, outcome, new_id()), ending), ending.job)

    def settle(self, record: Record | Ended, ending: Ending) -> None:
        """Take a record that has ended already; it is settled in the background."""
        self._start(self._settle(record, ending), ending.job)

    def _start(self, work: Coroutine[Any, Any, None], job: JobId) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"outcome:{job}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("outcome_failed", exc_info=error)

    async def _finish(self, finish: Finish, ending: Ending) -> None:
        began = time.monotonic()
        self._bytes += _cost(finish.outcome)
        try:
            finished = await insist("finish", lambda: self._requests.finish(finish), job=finish.job)
        finally:
            self._bytes -= _cost(finish.outcome)
        if finished is None:
            logger.warning("outcome_of_unknown_job", user=finish.user, job=finish.job)
            ending.settled(ending.job)
            return
        ending.durable(ending.job)
        if finished.won:
            note_end(finished.record, ending.traceparent, self._metrics)
        else:
            logger.info("outcome_late", user=finish.user, job=finish.job, state=finished.record.state)
        await self._settle(finished.record, ending)
        self._metrics.job_seconds["reply"].observe(time.monotonic() - began)

    async def _settle(self, record: Record | Ended, ending: Ending) -> None:
        await insist("settle", lambda: self._jobs.settle(record), job=record.job)
        ending.settled(ending.job)

    async def drain(self) -> None:
        """Wait until everything taken is written and settled."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Let go of what is left; the machines still have it in their journals."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            logger.warning("outcomes_let_go", count=len(self._tasks))
            await asyncio.wait(set(self._tasks))


def note_end(record: Record | Ended, traceparent: str, metrics: WorkerMetrics) -> None:
    """Count a job whose end has just become durable, and say so."""
    metrics.jobs_total[record.state].inc()
    logger.info(
        "job_ended",
        user=record.user,
        job=record.job,
        state=record.state,
        attempts=record.attempts,
        traceparent=traceparent,
    )


def _cost(outcome: str) -> int:
    """Bytes that a waiting outcome takes here: its text, its task and its values."""
    return len(outcome) + 4096


def outcome_of(result: frames.JobResult) -> tuple[str, str]:
    """The terminal state and outcome text of a machine's answer; what cannot be carried fails by name."""
    if result.outcome == "completed":
        raw, limit = bytes(result.result) or b"null", frames.RESULT_BYTES_MAX
        try:
            # What is mended is written anew, numbers at their full length.
            raw, mended = json.check_raw(raw) if len(raw) <= limit else (raw, False)
        except json.JsonProblem as problem:
            return "failed", error_outcome("result-unusable", f"the tool's result cannot be carried: {problem}")
        if len(raw) > limit:
            return "failed", error_outcome("result-too-large", f"the result has {len(raw)} bytes, the limit is {limit}")
        tail = ',"mended":true' if mended or result.mended else ""
        return "completed", f'{{"result":{raw.decode()}{tail}}}'
    failure = result.error or frames.Failure(result.outcome, "the machine gave no reason")
    message, mended = json.mend(json.dumps(failure.message[:4000]))
    code, _ = json.mend(json.dumps(failure.code[:100]))
    error: dict[str, object] = {"code": code, "message": message, "retryable": failure.retryable}
    return result.outcome, json.dumps(
        {"error": error, **({"mended": True} if mended or result.mended else {})}
    ).decode()
