"""Threads: one order of entries, one turn per key, and the next turn taken when its time has come."""

import asyncio

import pytest
from turn_stores import Stores, Worker, new_agent

from common.ids import AgentId, ThreadId, UserId, new_id
from common.store.postgres import Postgres, open_postgres
from common.store.threads import Entry, NewEntry, Threads, fingerprint
from common.store.turns import failed
from harness.faults import TcpProxy


@pytest.fixture(scope="module")
async def stores(postgres: Postgres) -> Stores:
    return Stores(postgres)


# ---- threads


async def test_a_thread_is_what_was_given_and_belongs_to_an_agent_that_is_there(stores: Stores) -> None:
    """An unknown agent has none."""
    agent, _ = await stores.agents.put(new_agent())
    thread = await stores.threads.create(agent.agent, user=UserId("alice"), model="large")
    assert thread is not None
    assert (thread.agent, thread.user, thread.model, thread.entries) == (agent.agent, "alice", "large", 0)
    assert await stores.threads.read(thread.thread) == thread
    assert await stores.threads.read(ThreadId(new_id())) is None
    assert await stores.threads.create(AgentId("nobody"), user=None, model=None) is None


async def test_threads_are_listed_newest_first_in_pages(stores: Stores) -> None:
    """Of some users, of one agent; those without a user only where everyone's are asked for."""
    agent, _ = await stores.agents.put(new_agent())
    users = [UserId(f"user-{new_id()}") for _ in range(2)]
    made = []
    for user in [*users, None, users[0]]:
        thread = await stores.threads.create(agent.agent, user=user, model=None)
        assert thread is not None
        made.append(thread)
    page = await stores.threads.list_page(users=None, agent=agent.agent, before=None, limit=3)
    assert page == made[:0:-1]
    page = await stores.threads.list_page(users=None, agent=agent.agent, before=page[-1].thread, limit=3)
    assert page == made[:1]
    assert await stores.threads.list_page(users=users[:1], agent=None, before=None, limit=9) == [made[3], made[0]]
    assert await stores.threads.list_page(users=[], agent=None, before=None, limit=9) == []


async def test_pruning_takes_threads_that_nobody_used_and_leaves_those_with_an_open_turn(stores: Stores) -> None:
    """With their entries and turns; two pruners at once take others."""
    idle = [await stores.new_thread() for _ in range(5)]
    busy = await stores.new_thread()
    turn = await stores.post(busy.thread)
    worker = Worker(stores)
    answered = await stores.post(idle[0].thread)
    await worker.end(await worker.begin(answered))
    assert await stores.threads.prune(retention_s=3600) == 0
    while sum(await asyncio.gather(*(stores.threads.prune(retention_s=0, limit=2) for _ in range(2)))):
        pass
    assert [await stores.threads.read(thread.thread) for thread in idle] == [None] * 5
    assert await stores.turns.read(answered.turn) is None
    assert await stores.entries(idle[0].thread) == []
    assert await stores.record(turn) == turn
    kept = await stores.usage.list_page(users=None, thread=idle[0].thread, agent=None, day=None, before=None, limit=9)
    assert [row.turn for row in kept] == [answered.turn]  # what it cost is still known


# ---- posting


async def test_an_entry_its_turn_and_its_task_are_there_together(stores: Stores) -> None:
    """What comes back is what can be read."""
    thread = await stores.new_thread(user=UserId("alice"), turn_cap_s=33)
    posted = await stores.try_post(thread.thread, "hello", key="order-17")
    assert posted.verdict == "created"
    turn, entry = posted.turn, posted.entry
    assert turn is not None
    assert entry is not None
    assert await stores.turns.read(turn.turn) == turn
    assert await stores.entries(thread.thread) == [entry]
    assert (turn.state, turn.number, turn.key, turn.cap_s, turn.user) == ("queued", 1, "order-17", 33, "alice")
    assert (turn.attempts, turn.replays, turn.cancel_requested, turn.terminal) == (0, 0, False, False)
    assert entry == Entry(turn.entry, thread.thread, 1, "user", "hello", turn.turn, turn.created_ms)
    assert await stores.tasks(turn) == ["pending"]
    ((limit,),) = await stores.ask(
        "select cancellation->>'max_duration' from absurd.t_turns where idempotency_key = %s", turn.turn
    )
    assert limit == "93"


async def test_one_key_at_the_same_instant_is_one_entry(stores: Stores) -> None:
    """Ten callers, ten connections: one made it, nine get its turn, and the turn counts them."""
    thread = await stores.new_thread()
    answers = await asyncio.gather(*(stores.try_post(thread.thread, key="order-17") for _ in range(10)))
    assert sorted(answer.verdict for answer in answers) == ["created"] + ["known"] * 9
    (turn,) = {answer.turn.turn: answer.turn for answer in answers if answer.turn}.values()
    assert len({answer.entry.entry for answer in answers if answer.entry}) == 1
    assert len(await stores.entries(thread.thread)) == 1
    assert await stores.tasks(turn) == ["pending"]
    assert (await stores.record(turn)).replays == 9


async def test_a_known_key_gives_what_was_posted_under_it_first(stores: Stores) -> None:
    """Another text changes nothing, and can be told by its fingerprint; an ended turn comes back with its end."""
    thread = await stores.new_thread()
    turn = (await stores.try_post(thread.thread, "first", key="k")).turn
    assert turn is not None
    worker = Worker(stores)
    await worker.end(await worker.begin(turn))
    again = await stores.try_post(thread.thread, "second", key="k", on_busy="reject")
    assert again.verdict == "known"
    assert again.turn is not None
    assert again.entry is not None
    assert (again.turn.state, again.turn.reply_text, again.entry.text) == ("completed", "answer", "first")
    assert again.turn.fingerprint == fingerprint("first") != fingerprint("second")
    other = await stores.new_thread()
    assert (await stores.try_post(other.thread, key="k")).verdict == "created"  # keys are a thread's own


async def test_a_key_is_new_when_its_retention_has_passed(stores: Stores) -> None:
    """Not before the turn has ended; the turn that had it stays readable, without it."""
    short = Threads(stores.postgres, key_retention_s=0)
    thread = await stores.new_thread()
    new = NewEntry(thread.thread, "hello", "k", fingerprint("hello"), "queue", "")
    first = await short.post(new)
    assert first.turn is not None
    assert (await short.post(new)).verdict == "known"
    worker = Worker(stores)
    await worker.end(await worker.begin(first.turn))
    assert (await stores.threads.post(new)).verdict == "known"  # an hour has not passed
    second = await short.post(new)
    assert second.verdict == "created"
    assert second.turn is not None
    assert second.turn.turn != first.turn.turn
    old = await stores.record(first.turn)
    assert (old.key, old.state, second.turn.number) == (None, "completed", 3)


async def test_what_cannot_be_answered_leaves_nothing(stores: Stores) -> None:
    """No such thread; its agent was deleted. A key that is known is answered all the same."""
    assert (await stores.try_post(ThreadId(new_id()))).verdict == "no-thread"
    thread = await stores.new_thread()
    known = await stores.try_post(thread.thread, key="k")
    assert await stores.agents.delete(thread.agent)
    refused = await stores.try_post(thread.thread)
    assert (refused.verdict, refused.turn, refused.entry) == ("no-agent", None, None)
    assert len(await stores.entries(thread.thread)) == 1
    again = await stores.try_post(thread.thread, key="k")
    assert (again.verdict, again.entry) == ("known", known.entry)


async def test_a_post_whose_answer_is_lost_finds_itself(stores: Stores) -> None:
    """The connection dies after the commit: the repetition makes no second entry, and does not count as a replay."""
    thread = await stores.new_thread()
    proxy = TcpProxy(stores.postgres.url)
    await proxy.start()
    try:
        async with open_postgres(proxy.url) as lossy:
            cut = proxy.cut_after(b"lost-answer")
            posted = await Stores(lossy).try_post(thread.thread, key="lost-answer")
            assert cut.happened.is_set()
    finally:
        await proxy.stop()
    assert posted.verdict == "created"
    assert posted.turn is not None
    assert await stores.record(posted.turn) == posted.turn
    assert posted.turn.replays == 0
    assert len(await stores.entries(thread.thread)) == 1
    assert await stores.tasks(posted.turn) == ["pending"]


# ---- while a turn is open


async def test_entries_at_the_same_instant_have_one_order_and_are_answered_in_it(stores: Stores) -> None:
    """Ten posts at once: positions without holes, one task; each next one is spawned as the one before it ends."""
    thread = await stores.new_thread()
    texts = [f"entry {n}" for n in range(10)]
    turns = await asyncio.gather(*(stores.post(thread.thread, text) for text in texts))
    in_order = sorted(turns, key=lambda turn: turn.number)
    assert [turn.number for turn in in_order] == list(range(1, 11))
    worker = Worker(stores)
    for place, turn in enumerate(in_order):
        assert [len(await stores.tasks(t)) for t in in_order] == [1] * (place + 1) + [0] * (9 - place)
        await worker.end(await worker.begin(turn))
    entries = await stores.entries(thread.thread)
    assert [entry.position for entry in entries] == list(range(1, 21))
    assert sorted(entry.text for entry in entries[:10]) == sorted(texts)
    assert [entry.turn for entry in entries[10:]] == [turn.turn for turn in in_order]
    assert [entry.created_ms for entry in entries] == sorted(entry.created_ms for entry in entries)


async def test_a_post_as_the_turn_ends_is_answered(stores: Stores) -> None:
    """Whether it comes just before or just after: it is spawned, once."""
    worker = Worker(stores)
    for _ in range(10):
        thread = await stores.new_thread()
        first = await stores.post(thread.thread)
        claim = await worker.begin(first)
        _, second = await asyncio.gather(worker.end(claim), stores.post(thread.thread))
        assert await stores.tasks(second) == ["pending"]
        await worker.end(await worker.begin(second))


async def test_what_was_posted_meanwhile_comes_after_the_reply_in_the_conversation(stores: Stores) -> None:
    """Each turn sees what was answered before it, and not what waits behind it."""
    thread = await stores.new_thread()
    turns = [await stores.post(thread.thread, text) for text in ("one", "two", "three")]
    worker = Worker(stores)
    assert await stores.threads.conversation(turns[0], limit=9, bytes_max=99) == [("one", None)]
    await worker.end(await worker.begin(turns[0]))
    await worker.end(await worker.begin(turns[1]), failed("agent-refused", "no"))
    said = [("one", "answer"), ("two", None), ("three", None)]
    assert await stores.threads.conversation(turns[2], limit=9, bytes_max=99) == said
    assert await stores.threads.conversation(turns[2], limit=2, bytes_max=99) == said[1:]


@pytest.mark.parametrize(("bytes_max", "fit"), [(17, 3), (16, 2), (8, 2), (7, 1), (1, 1)])
async def test_of_a_large_conversation_the_newest_comes(stores: Stores, bytes_max: int, fit: int) -> None:
    """As much as fits, answers counted, and the question whatever its size."""
    thread = await stores.new_thread()
    turns = [await stores.post(thread.thread, text) for text in ("one", "two", "three")]
    worker = Worker(stores)
    await worker.end(await worker.begin(turns[0]))
    said = [("one", "answer"), ("two", None), ("three", None)]
    assert await stores.threads.conversation(turns[2], limit=9, bytes_max=bytes_max) == said[-fit:]


async def test_an_entry_may_refuse_to_wait(stores: Stores) -> None:
    """It is told what it would wait for, nothing of it is recorded, and its key is free."""
    thread = await stores.new_thread()
    first = await stores.post(thread.thread)
    refused = await stores.try_post(thread.thread, key="k", on_busy="reject")
    assert (refused.verdict, refused.entry) == ("busy", None)
    assert refused.turn is not None
    assert refused.turn.turn == first.turn
    assert len(await stores.entries(thread.thread)) == 1
    worker = Worker(stores)
    await worker.end(await worker.begin(first))
    assert (await stores.try_post(thread.thread, key="k", on_busy="reject")).verdict == "created"


async def test_an_entry_may_interrupt_the_turn_under_way(stores: Stores) -> None:
    """That one is to be cancelled; what waits already stays ahead."""
    thread = await stores.new_thread()
    first, waiting = [await stores.post(thread.thread) for _ in range(2)]
    worker = Worker(stores)
    claim = await worker.begin(first)
    assert await stores.claims.keep([claim]) == {claim.run: False}
    last = await stores.post(thread.thread, on_busy="interrupt")
    assert await stores.claims.keep([claim]) == {claim.run: True}
    asked = [(await stores.record(turn)).cancel_requested for turn in (first, waiting, last)]
    assert asked == [True, False, False]
    await worker.end(claim)
    assert [len(await stores.tasks(turn)) for turn in (first, waiting, last)] == [1, 1, 0]
