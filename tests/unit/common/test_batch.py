"""Group commit: one flush at a time, in order, and every caller gets its own answer or the error."""

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import StoreUnavailable
from common.store.batch import Batcher


class Flushes:
    """Records what was flushed; each flush waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.under_way = 0
        self.failing: set[int] = set()  # numbers of the flushes that fail
        self.error: type[Exception] = ValueError

    async def flush(self, items: Sequence[int]) -> Sequence[str]:
        assert self.under_way == 0, "one flush at a time"
        self.under_way += 1
        number = len(self.batches)
        self.batches.append(list(items))
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if number in self.failing:
            raise self.error(f"flush {number}")
        return [f"result {item}" for item in items]


async def settle() -> None:
    """Let every task that can run go on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lone_call_leaves_at_once_and_later_ones_go_together() -> None:
    """No delay when idle, one round trip for all when busy."""
    flushes = Flushes()
    batcher = Batcher(flushes.flush)
    tasks = [asyncio.create_task(batcher.submit(0))]
    await settle()
    tasks += [asyncio.create_task(batcher.submit(n)) for n in (1, 2, 3)]
    await settle()
    assert flushes.batches == [[0]]
    flushes.gate.set()
    assert await asyncio.gather(*tasks) == [f"result {n}" for n in range(4)]
    assert flushes.batches == [[0], [1, 2, 3]]


async def test_a_flush_is_bounded_in_bytes() -> None:
    """In order; what alone is larger than that goes alone."""
    flushes = Flushes()
    batcher = Batcher(flushes.flush, size_of=lambda item: item, bytes_max=10)
    tasks = [asyncio.create_task(batcher.submit(n)) for n in (1, 4, 6, 1, 99, 2, 8, 1)]
    await settle()
    flushes.gate.set()
    assert await asyncio.gather(*tasks) == [f"result {n}" for n in (1, 4, 6, 1, 99, 2, 8, 1)]
    assert flushes.batches == [[1, 4], [6, 1], [99], [2, 8], [1]]


async def test_a_flush_is_bounded() -> None:
    """The rest goes in the next one, in order."""
    flushes = Flushes()
    flushes.gate.set()
    batcher = Batcher(flushes.flush, items_max=3)
    assert await asyncio.gather(*(batcher.submit(n) for n in range(8))) == [f"result {n}" for n in range(8)]
    assert flushes.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]


async def test_an_error_reaches_every_caller_of_its_flush_and_no_other() -> None:
    """The batcher goes on afterwards."""
    flushes = Flushes()
    flushes.failing = {1}
    batcher = Batcher(flushes.flush, items_max=2)
    tasks = [asyncio.create_task(batcher.submit(0))]
    await settle()
    tasks += [asyncio.create_task(batcher.submit(n)) for n in (1, 2, 3)]
    await settle()
    flushes.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert list(map(str, answers)) == ["result 0", "flush 1", "flush 1", "result 3"]
    assert flushes.batches == [[0], [1, 2], [3]]


async def test_a_cancelled_wait_takes_nothing_back_and_harms_nobody() -> None:
    """The item may have been written; its neighbours get their answers."""
    flushes = Flushes()
    batcher = Batcher(flushes.flush)
    tasks = [asyncio.create_task(batcher.submit(0))]
    await settle()
    tasks += [asyncio.create_task(batcher.submit(n)) for n in (1, 2)]
    await settle()
    tasks[0].cancel()
    tasks[1].cancel()
    await settle()
    flushes.gate.set()
    assert await tasks[2] == "result 2"
    assert tasks[0].cancelled()
    assert tasks[1].cancelled()
    assert flushes.batches == [[0], [1, 2]]
    assert await batcher.submit(3) == "result 3"


async def test_an_error_after_all_callers_have_gone_is_not_logged_as_unseen() -> None:
    """Nobody asks any more; the event loop must not complain."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    try:
        flushes = Flushes()
        flushes.failing = {0}
        batcher = Batcher(flushes.flush)
        task = asyncio.create_task(batcher.submit(0))
        await settle()
        task.cancel()
        flushes.gate.set()
        await settle()
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert task.cancelled()
    assert complaints == []


@pytest.mark.parametrize(("away_after_s", "flushed"), [(60.0, [[0], [1, 2]]), (0.0, [[0]])])
async def test_nobody_waits_twice_for_a_store_that_is_away(
    away_after_s: float, flushed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time-out is everyone's answer; a connection that broke at once costs only those whose calls were on it."""
    flushes = Flushes()
    flushes.failing = {0}
    flushes.error = StoreUnavailable
    monkeypatch.setattr("common.store.batch.AWAY_AFTER_S", away_after_s)
    batcher = Batcher(flushes.flush)
    tasks = [asyncio.create_task(batcher.submit(0))]
    await settle()
    tasks += [asyncio.create_task(batcher.submit(n)) for n in (1, 2)]
    await settle()
    flushes.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert flushes.batches == flushed
    away = [isinstance(answer, StoreUnavailable) for answer in answers]
    assert away == [True, len(flushed) == 1, len(flushed) == 1]
    assert await batcher.submit(3) == "result 3"
