"""The net under turns (rule 32). One in every worker that runs turns, no leader; every call is safe to repeat.

Promises: a turn whose task has ended, ran out of attempts or was cancelled without a terminal gets one within seconds,
          and is announced; so is an end whose announcement was lost with its worker. What is past its retention goes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from common import turn_times
from common.errors import StoreUnavailable
from common.store.claims import Claims
from common.store.threadlog import ThreadLog
from common.store.threads import Threads
from common.store.turn_events import ended
from common.store.turns import Turn, Turns
from common.store.usage import Usage
from worker.metrics import WorkerMetrics

logger = structlog.get_logger(__name__)

PRUNE_EVERY_S = 600.0
PAGE = 100


class TurnNet:
    """See the module."""

    def __init__(
        self,
        *,
        claims: Claims,
        turns: Turns,
        threads: Threads,
        usage: Usage,
        log: ThreadLog,
        metrics: WorkerMetrics,
    ) -> None:
        self._claims = claims
        self._turns = turns
        self._threads = threads
        self._usage = usage
        self._log = log
        self._metrics = metrics

    async def run(self) -> None:
        """Look until cancelled."""
        prune_at = time.monotonic()
        while True:
            try:
                await self.look_once()
                if time.monotonic() >= prune_at:
                    prune_at = time.monotonic() + PRUNE_EVERY_S
                    await self._prune()
            except StoreUnavailable as error:
                logger.warning("turns_not_looked_at", error=str(error))
            await asyncio.sleep(turn_times.NET_POLL_S)

    async def look_once(self) -> None:
        """End what is stranded, announce what nobody has announced. Raises: StoreUnavailable."""
        stranded = await self._turns.end_stranded(limit=PAGE)
        for turn in stranded:
            if not turn.ended_here:
                continue  # by the net of another worker, at the same moment
            self._metrics.turns_total[turn.state].inc()
            logger.warning("turn_stranded", turn=turn.turn, state=turn.state, code=turn.error_code)
        await self._announce(stranded)
        await self._announce(await self._turns.unannounced(limit=PAGE))
        depths = await self._turns.depths()
        for state in ("queued", "running"):
            depth, oldest_s = depths.get(state, (0, 0.0))
            self._metrics.queue_depth[f"turns_{state}"].set(depth)
            self._metrics.queue_oldest_seconds[f"turns_{state}"].set(oldest_s)

    async def _announce(self, turns: Sequence[Turn]) -> None:
        said = [ended(turn) for turn in turns]
        says = [self._log.say(one.thread, one.name, one.events) for one in said]
        failures = await asyncio.gather(*says, return_exceptions=True)
        told = [turn.turn for turn, failure in zip(turns, failures, strict=True) if failure is None]
        await self._turns.mark_announced(told)
        for turn, failure in zip(turns, failures, strict=True):
            if isinstance(failure, StoreUnavailable):
                raise failure
            if failure is not None:
                # One end that cannot be told must not keep the others from it.
                logger.error("end_untold", turn=turn.turn, exc_info=failure)

    async def _prune(self) -> None:
        await _until_short(lambda: self._claims.prune_tasks(retention_s=turn_times.TASK_RETENTION_S, limit=PAGE))
        await _until_short(lambda: self._threads.prune(retention_s=turn_times.THREAD_RETENTION_S, limit=PAGE))
        await _until_short(lambda: self._usage.prune(retention_s=turn_times.USAGE_RETENTION_S, limit=PAGE))


async def _until_short(prune: Callable[[], Awaitable[int]]) -> None:
    """Repeat what takes up to `PAGE` at a time until there is less."""
    while await prune() >= PAGE:
        pass
