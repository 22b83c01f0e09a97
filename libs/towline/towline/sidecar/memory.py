"""What this machine knows of the jobs that it ran: hinted ones in memory, all others in the journal.

Promises: an outcome may be told once it is kept where it belongs; of a job that cannot be looked up nobody says that
          it never ran.
Used by:  sidecar.lane (asks), sidecar.work (begins, keeps).
"""

import asyncio

import structlog

from towline.sidecar.decide import Row
from towline.sidecar.journal import Journal, JournalUnavailable
from towline.sidecar.outcome import JobOutcome, unknown
from towline.sidecar.recent import Recent
from towline.wire import frames

# A tool has ended and its outcome cannot be written: it is tried so often before the job ends as `unknown`, which is
# what the journal would say after a restart.
RECORD_TRIES = 5
RECORD_PAUSE_S = 1.0

_logger = structlog.get_logger("towline.sidecar")


class Memory:
    """Rows of jobs. A job keeps the hint that it was accepted with, so each has one place."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._recent = Recent()

    @property
    def horizon_ms(self) -> int:
        """`accepted_at` of the youngest job that was forgotten."""
        return self._journal.horizon_ms

    def find(self, user: str, frame: frames.Job) -> Row | None:
        """The row of a job; None if there is none. A hinted one costs no disk.

        Raises:
            JournalUnavailable: nobody knows.
        """
        return self._recent.find(user, frame.job) if frame.hinted else self._journal.find(user, frame.job)

    def find_outcome(self, user: str, job: str) -> JobOutcome | None:
        """The outcome of a job of which only the id is known, if it is kept and can be read."""
        try:
            row = self._recent.find(user, job) or self._journal.find(user, job)
        except JournalUnavailable:
            return None
        return row.outcome if row else None

    async def begin(self, user: str, frame: frames.Job, accepted_at_ms: int) -> None:
        """Record that a job without a hint starts now; on disk when this returns.

        Raises:
            JournalUnavailable: nothing was recorded; the job must not start.
        """
        args = bytes(frame.args)
        await self._journal.begin(user, frame.job, accepted_at_ms=accepted_at_ms, tool=frame.name, args=args)

    async def keep(self, user: str, frame: frames.Job, outcome: JobOutcome) -> JobOutcome:
        """Keep an outcome for redeliveries; returns what may be told."""
        if frame.hinted:
            self._recent.remember(user, frame.job, outcome)
            return outcome
        for remaining in reversed(range(RECORD_TRIES)):
            try:
                await self._journal.finish(user, frame.job, outcome)
                return outcome
            except JournalUnavailable as error:
                _logger.warning("outcome_not_recorded", job=frame.job, error=str(error), tries_left=remaining)
                if remaining:
                    await asyncio.sleep(RECORD_PAUSE_S)
        return unknown("journal-unavailable", f"the tool ended as {outcome.outcome}, and that could not be recorded")

    def acknowledge(self, user: str, job: str) -> None:
        """The server has the outcome: let it go. Unknown jobs are ignored."""
        if self._recent.find(user, job):
            self._recent.acknowledge(user, job)
        else:
            self._journal.acknowledge(user, job)
