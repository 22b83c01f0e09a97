"""Between tailers and appends: order kept, everything taken at once, bounded with what is being appended."""

import asyncio

from common.store.eventlog import NewEvent
from relay.gathering import EVENT_OVERHEAD_BYTES, RUN_BYTES_MAX, RUN_EVENTS_MAX, Budget, Gathering


def events(*numbers: int) -> list[NewEvent]:
    return [NewEvent("coder", str(n), "output", b"x", 0) for n in numbers]


async def test_one_take_has_everything_that_was_added_in_order() -> None:
    gathering = Gathering(Budget())
    gathering.add(events(1), 1)
    gathering.add(events(2, 3), 2, progressed=True)
    batch = await gathering.take()
    assert [e.uid for e in batch.events] == ["1", "2", "3"]
    assert batch.progressed
    gathering.add(events(4), 1)
    gathering.appended()
    again = await gathering.take()
    assert ([e.uid for e in again.events], again.progressed) == (["4"], False)


async def test_a_take_waits_for_something() -> None:
    gathering = Gathering(Budget())
    taking = asyncio.create_task(gathering.take())
    await asyncio.sleep(0)
    assert not taking.done()
    gathering.add(events(1), 1)
    assert len((await taking).events) == 1


async def test_what_is_being_appended_still_counts() -> None:
    """Else a slow Redis would let a run hold twice its bound."""
    gathering = Gathering(Budget())
    gathering.add(events(*range(RUN_EVENTS_MAX)), 0)
    assert not gathering.is_full
    await gathering.take()
    gathering.add(events(1), 1)
    assert gathering.is_full
    waiting = asyncio.create_task(gathering.wait_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    gathering.appended()
    await waiting


async def test_bytes_bound_a_run_too() -> None:
    gathering = Gathering(Budget())
    gathering.add(events(1), RUN_BYTES_MAX)
    assert gathering.is_full


async def test_all_runs_share_a_budget() -> None:
    """One run that holds everything holds the others back, and lets them go on when it is appended or closed."""
    budget = Budget(bytes_max=10 * EVENT_OVERHEAD_BYTES)
    one, other = Gathering(budget), Gathering(budget)
    one.add(events(*range(20)), 0)
    assert other.is_full
    assert budget.events == 20
    await one.take()
    one.appended()
    assert not other.is_full
    one.add(events(*range(20)), 0)
    one.close()
    assert not other.is_full
    assert budget.events == 0


async def test_it_is_empty_when_the_log_has_everything() -> None:
    gathering = Gathering(Budget())
    await gathering.wait_empty()
    gathering.add(events(1), 1)
    emptied = asyncio.create_task(gathering.wait_empty())
    await gathering.take()
    await asyncio.sleep(0)
    assert not emptied.done()
    gathering.appended()
    await emptied
