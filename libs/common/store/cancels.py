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


async def end_queued(record: Record, requests: Requests, jobs: Jobs) -> Record | None:
    """End a job that was not begun; returns its record, None when it was begun or has ended: nothing is changed.

    Raises: StoreUnavailable (repeat it).
    """
    cancelled = await requests.cancel(record.job, record.user)
    if cancelled is None:
        return None
    logger.info("job_cancelled", user=record.user, job=record.job)
    try:
        await jobs.settle(cancelled)
        if cancelled.hinted:  # its first delivery needs no mark: the frame may be out
            await jobs.ask_to_stop(record.job, record.user)
    except StoreUnavailable as error:
        # It has ended, durably: whoever claims its entry finds that out and settles it.
        logger.warning("job_unsettled", job=record.job, error=str(error))
    return cancelled
