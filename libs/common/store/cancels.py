"""Cancelling jobs: what nobody has begun ends, of the rest the machine is told.

Promises: rules 10 and 11: a job that was begun ends as its machine says; one that was not is settled, whoever waits.
Used by:  the gateway (its callers' jobs), the worker (the tools of its turns).
"""

import structlog

from common.errors import StoreUnavailable
from common.store.jobs import Jobs
from common.store.records import Record
from common.store.requests import Requests

logger = structlog.get_logger(__name__)


class Cancels:
    """See the module."""

    def __init__(self, requests: Requests, jobs: Jobs) -> None:
        self._requests = requests
        self._jobs = jobs

    async def end_queued(self, record: Record) -> Record | None:
        """End a job that was not begun; returns its record, None when it was begun or has ended: nothing is changed.

        Raises: StoreUnavailable (repeat it).
        """
        cancelled = await self._requests.cancel(record.job, record.user)
        if cancelled is None:
            return None
        logger.info("job_cancelled", user=record.user, job=record.job)
        try:
            await self._jobs.settle(cancelled)
            if cancelled.hinted:  # its first delivery needs no mark: the frame may be out
                await self.tell_machine(cancelled)
        except StoreUnavailable as error:
            # It has ended, durably: whoever claims its entry finds that out and settles it.
            logger.warning("job_unsettled", job=record.job, error=str(error))
        return cancelled

    async def tell_machine(self, record: Record) -> None:
        """Ask the machine, now or when it is connected, to stop a job; it need not heed. Raises: StoreUnavailable."""
        await self._jobs.ask_to_stop(record.job, record.user)
