"""Group commit: calls that arrive while one is under way go out together in the next.

An idle system pays no delay (a lone call leaves at once); a busy one pays one round trip, or one commit, for many.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from common.errors import StoreUnavailable

# A flush that failed after this long met a store that is away: who came meanwhile would wait as long again.
AWAY_AFTER_S = 1.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Runs `flush` over what was gathered, one flush at a time, in order of arrival.

    Args:
        flush: takes the items and returns one result for each, in the same order. If it raises, all its callers get
            the error; if it is `StoreUnavailable` after a wait, so do all that were gathered meanwhile.
        items_max: most items in one flush.
        size_of, bytes_max: most bytes in one flush, unless a single item has more.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        items_max: int = 256,
        size_of: Callable[[Item], int] | None = None,
        bytes_max: int = 0,
    ) -> None:
        self._flush = flush
        self._items_max = items_max
        self._size_of = size_of
        self._bytes_max = bytes_max
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """Add one item and wait for its result. Cancelling the wait does not take the item back."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="batcher")
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                count = self._count_next()
                batch = self._waiting[:count]
                del self._waiting[:count]
                await self._flush_batch(batch)
        finally:
            self._task = None

    def _count_next(self) -> int:
        """How many of those that wait go out together, at least one."""
        if self._size_of is None:
            return self._items_max
        size_bytes = 0
        for count, (item, _) in enumerate(self._waiting[: self._items_max]):
            size_bytes += self._size_of(item)
            if count and size_bytes > self._bytes_max:
                return count
        return self._items_max

    async def _flush_batch(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        began = time.monotonic()
        try:
            results = await self._flush([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in [*batch, *self._waiting]:
                future.cancel()
            self._waiting.clear()
            raise
        except Exception as error:  # handed to every caller, none is lost
            if isinstance(error, StoreUnavailable) and time.monotonic() - began > AWAY_AFTER_S:
                batch += self._waiting
                self._waiting.clear()
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # a caller that was cancelled meanwhile must not log it as unseen
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)
