"""What a run's owner owes to Postgres: written in order, tried until it is there, while the run goes on.

Promises: nothing is written out of order or left out; a Postgres that is away delays it and nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from common.errors import StoreUnavailable
from common.ids import RunId
from common.process.backoff import Backoff

logger = structlog.get_logger(__name__)


class Records:
    """One run's writes. Each is safe to repeat."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._writes: list[Callable[[], Awaitable[object]]] = []
        self._added = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()

    def put(self, write: Callable[[], Awaitable[object]]) -> None:
        """Owe one more write."""
        self._writes.append(write)
        self._written.clear()
        self._added.set()

    async def run(self) -> None:
        """Write whatever is put, until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            await self._write_all()
            self._written.set()

    async def wait_written(self) -> None:
        """Wait until all that is owed is there."""
        await self._written.wait()

    async def _write_all(self) -> None:
        backoff = Backoff(first_s=0.2, cap_s=5.0)
        while self._writes:
            try:
                await self._writes[0]()
            except StoreUnavailable as error:
                logger.warning("record_failed", run=self._run, error=str(error))
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            del self._writes[0]
