"""The sweeper: what nobody else will finish. One in every worker, no leader: rows are taken with `skip locked`.

Promises: a deadline ends its job within two seconds; an accepted job that Redis does not hold is put back (young ones
          within seconds, all of them each minute and whenever Redis may have lost some); an ended job whose settle was
          lost is settled at these times too, whether or not its machine comes back; ended records go after their
          retention. What one user's broken keys refuse is logged, and holds up nobody else's.
          Nothing here decides whether a job may run: the begin mark and the journal do.
"""

import asyncio
import time

import structlog

from common.errors import StoreUnavailable
from common.ids import JobId
from common.store.jobs import Jobs
from common.store.records import End, Ended, Record
from common.store.requests import Requests
from worker.metrics import WorkerMetrics
from worker.outcomes import note_end

logger = structlog.get_logger(__name__)

SWEEP_EVERY_S = 2.0
# Younger than this, the gateway that accepted it is still about to enqueue it.
YOUNG_FROM_S = 2.0
YOUNG_TO_S = 20.0
ALL_EVERY_S = 60.0
# Younger than this, whoever ended it is still about to settle it.
ENDED_FROM_S = 2.0
# Beyond the last such sweep: a fail-over brings back entries that were settled in the second before it.
ENDED_OVERLAP_S = 30.0
# Before the first sweep other workers may have died with what they had to settle.
FIRST_LOOK_BACK_S = 600.0
OLDEST_S = 2 * 24 * 3600.0
PAGE = 500
# Lost jobs that are read and put back together, each with up to 256 KiB of arguments: after a Redis loss it is all.
REQUEUED_TOGETHER = 16


class Sweeper:
    """See the module."""

    def __init__(self, requests: Requests, jobs: Jobs, metrics: WorkerMetrics) -> None:
        self._requests = requests
        self._jobs = jobs
        self._metrics = metrics
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """Redis lost what it held, or some of it: put everything back now."""
        self._hurry.set()

    async def run(self) -> None:
        """Sweep until cancelled."""
        swept_at = time.monotonic() - FIRST_LOOK_BACK_S
        while True:
            now = time.monotonic()
            everything = self._hurry.is_set() or now >= swept_at + ALL_EVERY_S
            try:
                await self._expire()
                await self._requeue(younger_than_s=OLDEST_S if everything else YOUNG_TO_S)
                if everything:
                    self._hurry.clear()
                    await self._settle_ended(younger_than_s=now - swept_at + ENDED_OVERLAP_S)
                    swept_at = now
                    while await self._requests.prune(limit=PAGE) == PAGE:
                        pass
                await self._measure()
            except StoreUnavailable as error:
                logger.warning("sweep_failed", error=str(error))
            except Exception:
                # Whatever it was, the next sweep may do better; a worker that ends takes every machine's socket along.
                logger.exception("sweep_failed")
            try:
                async with asyncio.timeout(SWEEP_EVERY_S):
                    await self._hurry.wait()
                await asyncio.sleep(SWEEP_EVERY_S / 10)  # a store that is just back is not asked in a tight loop
            except TimeoutError:
                pass

    async def _expire(self) -> None:
        while True:
            ended = await self._requests.expire(limit=PAGE)
            for record in ended:
                note_end(record, record.traceparent, self._metrics)
            await asyncio.gather(*(self._settle(record) for record in ended))
            if len(ended) < PAGE:
                return

    async def _requeue(self, *, younger_than_s: float) -> None:
        after: JobId | None = None
        while True:
            found = await self._requests.open_jobs(
                older_than_s=YOUNG_FROM_S, younger_than_s=younger_than_s, after=after, limit=PAGE
            )
            if not found:
                return
            after = found[-1].job
            missing = await self._jobs.missing(found)
            for first in range(0, len(missing), REQUEUED_TOGETHER):
                jobs = await self._requests.read_open(missing[first : first + REQUEUED_TOGETHER])
                if requeued := await self._jobs.enqueue_many(jobs):
                    self._metrics.redeliveries_total["requeued"].inc(requeued)
                    logger.info("jobs_requeued", count=requeued)

    async def _settle_ended(self, *, younger_than_s: float) -> None:
        after: End | None = None
        while ends := await self._requests.ended_jobs(
            older_than_s=ENDED_FROM_S, younger_than_s=younger_than_s, after=after, limit=PAGE
        ):
            after = ends[-1]
            if unsettled := await self._jobs.unsettled(ends):
                records = await self._requests.read(unsettled)
                await asyncio.gather(*(self._settle(record) for record in records.values()))
                logger.info("jobs_settled", count=len(records))

    async def _settle(self, record: Record | Ended) -> None:
        try:
            await self._jobs.settle(record)
        except StoreUnavailable:
            raise
        except Exception:
            # A key of this user is broken: nobody else waits for it to be mended, and a later sweep finds the job.
            logger.exception("job_unsettled", user=record.user, job=record.job)

    async def _measure(self) -> None:
        depths = await self._requests.depths()
        for state in ("queued", "processing"):
            depth, oldest_s = depths.get(state, (0, 0.0))
            self._metrics.queue_depth[state].set(depth)
            self._metrics.queue_oldest_seconds[state].set(oldest_s)
