"""Usage: readable by thread, agent, user and day, in pages, and forgotten in bounds."""

import asyncio
from datetime import date

import pytest
from turn_stores import USED, Stores, Worker

from common.ids import ThreadId, UserId, new_id
from common.store.postgres import Postgres
from common.store.turns import completed, failed
from common.store.usage import UsageRow


@pytest.fixture(scope="module")
async def stores(postgres: Postgres) -> Stores:
    return Stores(postgres)


async def use(stores: Stores, thread: ThreadId, count: int) -> None:
    """Turns of a thread that have ended, with a row each."""
    worker = Worker(stores)
    for _ in range(count):
        await worker.end(await worker.begin(await stores.post(thread)))


async def rows(stores: Stores, **filters: object) -> list[UsageRow]:
    given = {"users": None, "thread": None, "agent": None, "day": None, "before": None, "limit": 100} | filters
    return await stores.usage.list_page(**given)  # type: ignore[arg-type]


async def test_a_seam_of_a_turn_has_one_row(stores: Stores) -> None:
    """However often the end is repeated, also when the turn failed; two seams have two."""
    thread = await stores.new_thread()
    worker = Worker(stores)
    turn = await stores.post(thread.thread)
    claim = await worker.begin(turn)
    used = [USED, USED._replace(seam="title", model=None, input_tokens=2**40)]
    end = failed("agent-failed", "no")
    await asyncio.gather(*(stores.turns.end(claim, end, used) for _ in range(5)))
    found = await rows(stores, thread=thread.thread)
    assert sorted((row.seam, row.model, row.input_tokens, row.turn) for row in found) == sorted(
        [("reply", "model-1", 10, turn.turn), ("title", None, 2**40, turn.turn)], key=lambda row: row[0]
    )
    again = await stores.turns.end(claim, completed("late"), [USED._replace(seam="late")])
    assert again.state == "failed"
    assert len(await rows(stores, thread=thread.thread)) == 2


async def test_rows_are_read_by_what_they_are_about(stores: Stores) -> None:
    """Thread, agent, user, day (UTC), and all of them together."""
    user = UserId(f"user-{new_id()}")
    one, other = await stores.new_thread(user=user), await stores.new_thread()
    await use(stores, one.thread, 2)
    await use(stores, other.thread, 1)
    assert {row.thread for row in await rows(stores, agent=one.agent)} == {one.thread}
    assert {row.thread for row in await rows(stores, users=[user])} == {one.thread}
    assert len(await rows(stores, thread=other.thread)) == 1
    assert await rows(stores, users=[user], agent=other.agent) == []
    move = "update usage_events set at = %s where turn = (select turn from usage_events where thread = %s limit 1)"
    for at, day in [("2026-03-01T00:00:00Z", date(2026, 3, 1)), ("2026-02-28T23:59:59.999Z", date(2026, 2, 28))]:
        await stores.ask(move, at, other.thread)
        assert len(await rows(stores, day=day, thread=other.thread)) == 1
        assert await rows(stores, day=date(2026, 3, 2), thread=other.thread) == []
    assert await rows(stores, day=date(2026, 3, 1), thread=other.thread) == []


async def test_rows_come_newest_first_in_pages(stores: Stores) -> None:
    """None twice or left out where pages meet, also among those of the same moment."""
    thread = await stores.new_thread()
    await use(stores, thread.thread, 5)
    await stores.ask("update usage_events set at = '2026-03-01T12:00:00.123Z' where thread = %s", thread.thread)
    await use(stores, thread.thread, 2)
    seen: list[UsageRow] = []
    before = None
    while page := await rows(stores, thread=thread.thread, before=before, limit=3):
        seen += page
        before = (page[-1].at_ms, page[-1].turn, page[-1].seam)
    assert len({row.turn for row in seen}) == len(seen) == 7
    assert [row.at_ms for row in seen] == sorted((row.at_ms for row in seen), reverse=True)


async def test_old_rows_are_forgotten_in_bounds(stores: Stores) -> None:
    """Two who do it at once take others."""
    thread = await stores.new_thread()
    await use(stores, thread.thread, 5)
    assert await stores.usage.prune(retention_s=100 * 365 * 24 * 3600) == 0
    assert await stores.usage.prune(retention_s=0, limit=1) == 1
    while sum(await asyncio.gather(*(stores.usage.prune(retention_s=0, limit=2) for _ in range(2)))):
        pass
    assert await rows(stores) == []
