"""Turns: one terminal each, whoever dies; nothing written by an attempt that lost its claim; told, kept, taken over."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from msgspec.structs import replace
from support import eventually
from turn_stores import USED, Stores, Worker

from common import turn_times
from common.ids import TurnId, UserId, new_id
from common.store.claims import Claims
from common.store.postgres import Postgres, open_postgres
from common.store.turns import Claim, ClaimLost, End, Turn, cancelled, completed, failed
from harness.faults import TcpProxy
from towline.wire.threads import OnBusy


@pytest.fixture(scope="module")
async def stores(postgres: Postgres) -> Stores:
    return Stores(postgres)


@pytest.fixture
async def turn(stores: Stores) -> Turn:
    """A turn that waits to be claimed."""
    return await stores.post((await stores.new_thread(user=UserId("alice"))).thread)


@pytest.fixture
def worker(stores: Stores) -> Worker:
    return Worker(stores)


async def usage_of(stores: Stores, turn: Turn) -> list[tuple[str, str | None, int]]:
    rows = await stores.usage.list_page(users=None, thread=turn.thread, agent=None, day=None, before=None, limit=9)
    return [(row.seam, row.model, row.input_tokens) for row in rows if row.turn == turn.turn]


# ---- an attempt


async def test_a_turn_is_claimed_begun_ended_and_completed(stores: Stores, worker: Worker, turn: Turn) -> None:
    """With its reply and its usage; the record says all of it."""
    claim = await worker.claim_turn(turn)
    assert claim.attempt == 1
    begun = await stores.claims.begin(claim)
    assert begun.verdict == "begun"
    assert begun.turn is not None
    assert (begun.turn.state, begun.turn.attempts, begun.text) == ("running", 1, "hello")
    assert 0 <= begun.elapsed_s < 60
    assert begun.is_first
    assert (await stores.claims.begin(claim)).is_first  # the answer to the first call was lost
    ended = await stores.turns.end(claim, completed("answer"), [USED])
    assert (ended.state, ended.reply_text, ended.error_code) == ("completed", "answer", None)
    assert [entry.entry for entry in await stores.entries(turn.thread)] == [turn.entry, ended.reply]
    assert replace(ended, ended_here=False) == await stores.record(turn)
    assert await stores.tasks(turn) == ["running"]  # not completed before it is published
    await stores.claims.complete(claim)
    assert await stores.tasks(turn) == ["completed"]
    (row,) = await stores.usage.list_page(
        users=[UserId("alice")], thread=turn.thread, agent=turn.agent, day=None, before=None, limit=9
    )
    assert (row.turn, row.seam, row.model, row.agent, row.user) == (turn.turn, "reply", "model-1", turn.agent, "alice")
    assert (row.input_tokens, row.output_tokens, row.model_calls, row.tool_calls, row.seconds) == (10, 20, 1, 0, 0.5)


async def test_ten_workers_at_once_claim_a_turn_once(stores: Stores) -> None:
    """And none waits for the others."""
    turns = [await stores.post((await stores.new_thread()).thread) for _ in range(5)]
    workers = [Worker(stores) for _ in range(10)]
    claims = await asyncio.gather(*(worker.claim(places=20) for worker in workers))
    claimed = [claim.turn for found in claims for claim in found]
    assert sorted(t for t in claimed if t in {turn.turn for turn in turns}) == sorted(turn.turn for turn in turns)


async def test_a_worker_claims_no_more_than_its_places(stores: Stores) -> None:
    """And those whose hand-over was lost come first, once it claims again without them."""
    for _ in range(5):
        await stores.post((await stores.new_thread()).thread)
    worker = Worker(stores)
    first = await worker.claim(places=2)
    second = await worker.claim(places=2)
    assert len(first) == len(second) == 2
    assert not {claim.run for claim in first} & {claim.run for claim in second}
    worker.held = list(first)  # the answer with the second never came
    assert await worker.claim(places=2) == second


async def test_what_a_claim_lost_on_its_way_comes_with_the_next_one(stores: Stores, turn: Turn) -> None:
    """The connection dies after the claim: the repetition brings the same attempt, which is not used up."""
    worker = Worker(stores)
    proxy = TcpProxy(stores.postgres.url)
    await proxy.start()
    try:
        async with open_postgres(proxy.url) as lossy:
            cut = proxy.cut_after(worker.name.encode())
            claims = await Claims(lossy).claim(worker.name, 100, [])
            assert cut.happened.is_set()
    finally:
        await proxy.stop()
    assert [claim.attempt for claim in claims if claim.turn == turn.turn] == [1]
    worker.held = list(claims)
    assert await worker.claim() == []


async def test_a_turn_that_its_worker_let_go_of_begins_anew(stores: Stores, worker: Worker, turn: Turn) -> None:
    """Without a word to anyone, after it had begun: another attempt follows at once, which fences that one."""
    for attempt in (1, 2):
        claim = await worker.begin(turn)
        assert claim.attempt == attempt
        worker.held.remove(claim)
    again = await worker.begin(turn)
    assert again.attempt == 3
    with pytest.raises(ClaimLost):
        await stores.turns.end(claim, completed("stale"), [USED])
    assert (await worker.end(again)).attempts == 3


async def test_the_turn_of_a_dead_worker_is_taken_by_the_next_claim(stores: Stores, worker: Worker, turn: Turn) -> None:
    """In one call, as the second attempt; with what the first one has checkpointed."""
    claim = await worker.begin(turn)
    await stores.claims.checkpoint(claim, "model:1", '{"answer": 1}')
    other = Worker(stores)
    assert turn.turn not in {c.turn for c in await other.claim()}
    await stores.lapse(claim)
    (again,) = [c for c in await other.claim(places=100) if c.turn == turn.turn]
    assert again.attempt == 2
    begun = await stores.claims.begin(again)
    assert begun.turn is not None
    assert (begun.verdict, begun.turn.attempts, begun.is_first) == ("begun", 2, False)
    assert await stores.claims.checkpoints(again) == {"model:1": {"answer": 1}}
    assert (await other.end(again)).state == "completed"
    assert await usage_of(stores, turn) == [("reply", "model-1", 10)]


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda s, c: s.claims.checkpoint(c, "model:1", '"stale"'), id="checkpoint"),
        pytest.param(lambda s, c: s.turns.end(c, completed("stale"), [USED]), id="end"),
        pytest.param(lambda s, c: s.turns.end(c, failed("stale", "stale"), []), id="end-failed"),
        pytest.param(lambda s, c: s.claims.complete(c), id="complete"),
        pytest.param(lambda s, c: s.claims.fail(c, "stale", retry_after_s=0), id="fail"),
        pytest.param(lambda s, c: s.claims.release(c), id="release"),
    ],
)
async def test_an_attempt_that_lost_its_claim_writes_nothing(
    stores: Stores, turn: Turn, act: Callable[[Stores, Claim], Awaitable[object]]
) -> None:
    """It stalled, another one took the turn, it wakes: whatever it does, it is told to stop."""
    stale, fresh = Worker(stores), Worker(stores)
    lost = await stale.begin(turn)
    await stores.lapse(lost)
    claim = await fresh.begin(turn)
    await stores.claims.checkpoint(claim, "model:1", '"fresh"')
    with pytest.raises(ClaimLost, match="attempt 1"):
        await act(stores, lost)
    assert (await stores.claims.begin(lost)).verdict == "lost"
    assert await stores.claims.keep([lost, claim]) == {claim.run: False}
    assert await stores.claims.checkpoints(claim) == {"model:1": "fresh"}
    assert (await stores.record(turn)).state == "running"
    await fresh.end(claim)
    assert [entry.text for entry in await stores.entries(turn.thread)] == ["hello", "answer"]
    assert await usage_of(stores, turn) == [("reply", "model-1", 10)]


async def test_a_checkpoint_waits_for_the_claim_that_is_just_being_taken_away(stores: Stores, turn: Turn) -> None:
    """Rule 30: the run row is locked first, so it cannot slip in between the sweep's check and its commit."""
    worker = Worker(stores)
    claim = await worker.begin(turn)
    async with await psycopg.AsyncConnection.connect(stores.postgres.url) as sweeper:
        await sweeper.execute("select absurd.fail_run('turns', %s, '{}')", [claim.run])
        writing = asyncio.create_task(stores.claims.checkpoint(claim, "model:1", '"late"'))
        query = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        await eventually(lambda: stores.ask(query))
        await sweeper.commit()
        with pytest.raises(ClaimLost):
            await writing
    assert await stores.ask("select 1 from absurd.c_turns where task_id = %s", claim.task) == []


async def test_kept_claims_do_not_lapse(stores: Stores, worker: Worker) -> None:
    """All of a worker's in one statement; those of others, and unknown ones, are not kept."""
    claims = [await worker.begin(await stores.post((await stores.new_thread()).thread)) for _ in range(3)]
    for claim in claims[:2]:
        await stores.lapse(claim)  # nobody has noticed: it still counts
    unknown = claims[0]._replace(run=new_id())
    assert await stores.claims.keep([*claims, unknown]) == {claim.run: False for claim in claims}
    assert await stores.claims.keep([]) == {}
    for claim in claims:
        ((left_s,),) = await stores.ask(
            "select extract(epoch from claim_expires_at - now())::float8 from absurd.r_turns where run_id = %s",
            claim.run,
        )
        assert turn_times.CLAIM_S - 5 < left_s <= turn_times.CLAIM_S


async def test_a_failed_attempt_is_followed_by_another_after_a_pause(
    stores: Stores, worker: Worker, turn: Turn
) -> None:
    """It counts, and the turn stays open; it can be cancelled meanwhile, at once."""
    claim = await worker.begin(turn)
    await stores.claims.fail(claim, "the agent answered 503\x00", retry_after_s=300)
    assert (await stores.record(turn)).state == "running"
    assert await worker.claim() == []
    await stores.ask("update absurd.r_turns set available_at = now() where task_id = %s", claim.task)
    worker.held.clear()
    again = await worker.begin(turn)
    assert (again.attempt, (await stores.record(turn)).attempts) == (2, 2)
    await stores.claims.fail(again, "again", retry_after_s=300)
    ended = await stores.turns.cancel(turn.turn)
    assert ended is not None
    assert (ended.state, ended.error_code) == ("cancelled", "cancelled")
    assert await stores.tasks(turn) == ["cancelled"]
    assert await usage_of(stores, turn) == [("reply", None, 0)]  # begun twice; what that has used, nobody knows


async def test_a_released_turn_goes_on_elsewhere_at_once(stores: Stores, worker: Worker, turn: Turn) -> None:
    """Under the same attempt, which is not used up: a worker that drains costs nothing."""
    claim = await worker.begin(turn)
    async with listening(stores) as ear:
        await stores.claims.release(claim)
        await eventually(lambda: ear.notes.count(None) >= 2)
    again = await Worker(stores).claim_turn(turn)
    assert (again.run, again.attempt) == (claim.run, 1)
    begun = await stores.claims.begin(again)
    assert (begun.verdict, begun.is_first) == ("begun", False)
    with pytest.raises(ClaimLost):
        await stores.claims.release(claim._replace(run=new_id()))


# ---- the end


async def test_a_turn_ends_once_whoever_says_so(stores: Stores, worker: Worker, turn: Turn) -> None:
    """Its worker, a cancellation and the net at once: one terminal, one entry at most, one row; all read the same."""
    claim = await worker.begin(turn)
    ends: list[End] = [completed("a"), failed("b", "b"), cancelled(), completed("c")]
    answers = await asyncio.gather(
        *(stores.turns.end(claim, end, [USED]) for end in ends * 3), stores.turns.cancel(turn.turn)
    )
    record = await stores.record(turn)
    assert [answer for answer in answers[:-1] if replace(answer, ended_here=False) != record] == []
    assert len(await stores.entries(turn.thread)) == 1 + (record.state == "completed")
    assert await usage_of(stores, turn) == [("reply", "model-1", 10)]


async def test_a_redelivery_that_finds_the_terminal_only_publishes(stores: Stores, turn: Turn) -> None:
    """The worker died after the end was durable: the next one is told so, and completes the task."""
    dead, other = Worker(stores), Worker(stores)
    claim = await dead.begin(turn)
    ended = await stores.turns.end(claim, completed("answer"), [USED])
    await stores.lapse(claim)
    again = await other.claim_turn(turn)
    begun = await stores.claims.begin(again)
    assert (begun.verdict, begun.turn) == ("ended", replace(ended, ended_here=False))
    await stores.claims.complete(again)
    assert await stores.tasks(turn) == ["completed"]
    assert len(await stores.entries(turn.thread)) == 2


async def test_the_next_turn_is_spawned_once_however_often_the_end_is_repeated(stores: Stores, worker: Worker) -> None:
    """Repeated by one worker and by two."""
    thread = await stores.new_thread()
    first, second, third = [await stores.post(thread.thread) for _ in range(3)]
    claim = await worker.begin(first)
    await asyncio.gather(*(stores.turns.end(claim, completed("answer"), [USED]) for _ in range(5)))
    assert [len(await stores.tasks(turn)) for turn in (first, second, third)] == [1, 1, 0]


async def test_text_that_postgres_cannot_hold_is_mended(stores: Stores, worker: Worker) -> None:
    """A model's U+0000 or lone surrogate keeps no turn from its end."""
    for end in (completed("a\x00b\ud800c"), failed("agent-failed", "a\x00b\ud800c")):
        claim = await worker.begin(await stores.post((await stores.new_thread()).thread))
        ended = await stores.turns.end(claim, end, [])
        assert "a\ufffdb\ufffdc" in (ended.reply_text, ended.error_message)


@pytest.mark.parametrize("step", ["begin", "checkpoint", "end", "complete", "fail", "release", "cancel"])
async def test_a_call_whose_answer_is_lost_is_repeated_safely(stores: Stores, turn: Turn, step: str) -> None:
    """The connection dies after the commit of each statement: its effect is there once."""
    worker = Worker(stores)
    claim = await worker.claim_turn(turn)
    proxy = TcpProxy(stores.postgres.url)
    await proxy.start()
    try:
        async with open_postgres(proxy.url) as lossy:
            far = Stores(lossy)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "begin": lambda: far.claims.begin(claim),
                "checkpoint": lambda: far.claims.checkpoint(claim, "model:1", "1"),
                "end": lambda: far.turns.end(claim, completed("answer"), [USED]),
                "complete": lambda: far.claims.complete(claim),
                "fail": lambda: far.claims.fail(claim, "no", retry_after_s=300),
                "release": lambda: far.claims.release(claim),
                "cancel": lambda: far.turns.cancel(turn.turn),
            }
            if step != "begin":
                await stores.claims.begin(claim)
            if step == "complete":
                await stores.turns.end(claim, completed("answer"), [USED])
            cut = proxy.cut_after((turn.turn if step == "cancel" else claim.run).encode())
            # What was done already is not this worker's any more: it stops, as it would have.
            done_already = pytest.raises(ClaimLost) if step in {"complete", "fail", "release"} else None
            with done_already or contextlib.nullcontext():
                await calls[step]()
            assert cut.happened.is_set()
    finally:
        await proxy.stop()
    record = await stores.record(turn)
    runs = await stores.ask("select count(*) from absurd.r_turns where task_id = %s", claim.task)
    assert runs == [(2 if step == "fail" else 1,)]
    assert record.attempts == 1
    assert record.terminal == (step in {"end", "complete"})
    assert record.cancel_requested == (step == "cancel")
    assert len(await stores.entries(turn.thread)) == 1 + record.terminal
    assert len(await usage_of(stores, turn)) == int(record.terminal)


# ---- cancellation


async def test_a_queued_turn_is_cancelled_at_once(stores: Stores, worker: Worker) -> None:
    """Its task too, whether it was spawned or waited; the next one is spawned; it stays as it ended."""
    thread = await stores.new_thread()
    first, second, third = [await stores.post(thread.thread) for _ in range(3)]
    for turn in (second, first, first):
        ended = await stores.turns.cancel(turn.turn)
        assert ended is not None
        assert (ended.state, ended.error_code, ended.reply) == ("cancelled", "cancelled", None)
    assert [await stores.tasks(turn) for turn in (first, second, third)] == [["cancelled"], [], ["pending"]]
    assert first.turn not in {claim.turn for claim in await worker.claim(places=100)}
    assert await stores.turns.cancel(TurnId(new_id())) is None
    assert await usage_of(stores, first) == []


async def test_one_of_all_who_end_a_turn_counts_it(stores: Stores) -> None:
    """Callers that cancel at the same moment, on several gateways; or its worker, and who cancels it just then."""
    queued = await stores.post((await stores.new_thread()).thread)
    cancels = await asyncio.gather(*(stores.turns.cancel(queued.turn) for _ in range(5)))
    assert sum(turn is not None and turn.ended_here for turn in cancels) == 1
    running = await stores.post((await stores.new_thread()).thread)
    claim = await Worker(stores).begin(running)
    ended = await stores.turns.end(claim, cancelled(), [])
    again = await stores.turns.cancel(running.turn)
    assert again is not None
    assert (ended.ended_here, again.ended_here, again.state) == (True, False, "cancelled")
    assert (await stores.turns.end(claim, cancelled(), [])).ended_here  # its answer was lost


async def test_a_running_turn_is_cancelled_by_its_worker_which_is_told(
    stores: Stores, worker: Worker, turn: Turn
) -> None:
    """At once by a note, and with its next heartbeat in any case."""
    claim = await worker.begin(turn)
    async with listening(stores) as ear:
        asked = await stores.turns.cancel(turn.turn)
        await eventually(lambda: turn.turn in ear.notes)
    assert asked is not None
    assert (asked.state, asked.cancel_requested, asked.terminal) == ("running", True, False)
    assert await stores.claims.keep([claim]) == {claim.run: True}
    ended = await worker.end(claim, cancelled())
    assert ended.state == "cancelled"
    assert await usage_of(stores, turn) == [("reply", "model-1", 10)]  # what it has cost by then


async def test_a_turn_claimed_as_it_is_cancelled_ends_once(stores: Stores) -> None:
    """The cancellation comes between claim and begin, or before, or after."""
    for _ in range(10):
        turn = await stores.post((await stores.new_thread()).thread)
        worker = Worker(stores)

        async def run(worker: Worker = worker, turn: Turn = turn) -> None:
            for claim in await worker.claim(places=100):
                begun = await stores.claims.begin(claim)
                if claim.turn == turn.turn and begun.verdict == "begun":
                    with contextlib.suppress(ClaimLost):
                        await stores.turns.end(claim, cancelled(), [])

        await asyncio.gather(run(), stores.turns.cancel(turn.turn))
        record = await stores.record(turn)
        if not record.terminal:  # it was asked between claim and begin: the request is there
            assert record.cancel_requested
            await stores.turns.cancel(turn.turn)
        assert len(await stores.entries(turn.thread)) == 1


# ---- the net


async def test_a_turn_whose_task_ended_without_a_terminal_is_ended_by_the_net(stores: Stores) -> None:
    """Out of attempts, cancelled by Absurd's limit, or gone: once, with a reason, and the thread goes on."""
    breaks = {
        "attempts-exhausted": "update absurd.t_turns set state = 'failed' where task_id = %s",
        "turn-timeout": "select absurd.cancel_task('turns', %s)",
        "task-lost": "delete from absurd.t_turns where task_id = %s",
    }
    for code, statement in breaks.items():
        thread = await stores.new_thread()
        turn, waiting = [await stores.post(thread.thread) for _ in range(2)]
        claim = await Worker(stores).begin(turn)
        await stores.ask(statement, claim.task)
        ended = await asyncio.gather(*(stores.turns.end_stranded() for _ in range(3)))
        assert {t.error_code for found in ended for t in found if t.turn == turn.turn} == {code}
        assert sum(t.ended_here for found in ended for t in found if t.turn == turn.turn) == 1
        assert await usage_of(stores, turn) == [("reply", None, 0)]
        record = await stores.record(turn)
        assert (record.state, record.error_code) == ("failed", code)
        assert await stores.tasks(waiting) == ["pending"]
        assert turn.turn not in {t.turn for t in await stores.turns.end_stranded()}


async def test_a_turn_that_cannot_be_ended_keeps_no_other_from_it(stores: Stores) -> None:
    """Whatever is wrong with one, the net ends the others, and its worker lives on."""
    broken, other = [await stores.post((await stores.new_thread()).thread) for _ in range(2)]
    for turn in (broken, other):
        await stores.ask("delete from absurd.t_turns where task_id = %s", (await Worker(stores).begin(turn)).task)
    await stores.ask(f"alter table turns add constraint broken check (turn <> '{broken.turn}' or ended_at is null)")
    try:
        assert other.turn in {turn.turn for turn in await stores.turns.end_stranded()}
        assert (await stores.record(broken)).state == "running"
    finally:
        await stores.ask("alter table turns drop constraint broken")
    assert broken.turn in {turn.turn for turn in await stores.turns.end_stranded()}


async def test_an_interruption_does_not_wait_for_the_next_attempt(stores: Stores, worker: Worker, turn: Turn) -> None:
    """The turn sleeps, nobody runs it, and its agent may have asked for minutes of patience: the net ends it."""
    await stores.claims.fail(await worker.begin(turn), "busy", retry_after_s=120)
    interrupting = await stores.post(turn.thread, on_busy="interrupt")
    assert await stores.tasks(turn) == ["sleeping"]
    ended = await stores.turns.end_stranded()
    assert turn.turn in {t.turn for t in ended}
    assert (await stores.record(turn)).state == "cancelled"
    assert (await stores.tasks(turn), await stores.tasks(interrupting)) == (["cancelled"], ["pending"])


async def test_an_interruption_leaves_a_running_turn_to_its_worker(stores: Stores, worker: Worker, turn: Turn) -> None:
    claim = await worker.begin(turn)
    await stores.post(turn.thread, on_busy="interrupt")
    await stores.turns.end_stranded()
    assert (await stores.record(turn)).state == "running"
    assert await stores.claims.keep([claim]) == {claim.run: True}


async def test_a_turn_that_kills_its_workers_runs_out_of_attempts(stores: Stores, turn: Turn) -> None:
    """Claims that lapse are counted; after the last one the net says why."""
    for attempt in range(1, turn_times.ATTEMPTS_MAX + 1):
        claim = await Worker(stores).begin(turn)
        assert claim.attempt == attempt
        await stores.lapse(claim)
    assert turn.turn not in {claim.turn for claim in await Worker(stores).claim(places=100)}
    await stores.turns.end_stranded()
    record = await stores.record(turn)
    assert (record.state, record.error_code, record.attempts) == (
        "failed",
        "attempts-exhausted",
        turn_times.ATTEMPTS_MAX,
    )


async def test_a_turn_over_absurds_limit_is_ended_by_the_net(stores: Stores) -> None:
    """Nobody that would have ended it at its cap is there."""
    turn = await stores.post((await stores.new_thread(turn_cap_s=10)).thread)
    claim = await Worker(stores).begin(turn)
    query = "update absurd.t_turns set first_started_at = now() - %s * interval '1 second' where task_id = %s"
    limit_s = 10 + turn_times.LIMIT_MARGIN_S
    await stores.ask(query, limit_s - 5, claim.task)
    await Worker(stores).claim()
    assert await stores.tasks(turn) == ["running"]
    await stores.ask(query, limit_s, claim.task)
    await Worker(stores).claim()
    assert await stores.claims.keep([claim]) == {}
    await stores.turns.end_stranded()
    assert (await stores.record(turn)).error_code == "turn-timeout"


async def test_an_end_that_nobody_announced_is_found(stores: Stores, turn: Turn) -> None:
    """Some time after, for a while; not when it was marked or its task completed."""
    other = await stores.post((await stores.new_thread()).thread)
    await stores.turns.cancel(turn.turn)
    worker = Worker(stores)
    await worker.end(await worker.begin(other))

    async def found(*, ended_ago_s: float) -> bool:
        query = "update turns set ended_at = now() - %s * interval '1 second' where turn = any(%s::uuid[])"
        await stores.ask(query, ended_ago_s, [turn.turn, other.turn])
        turns = {t.turn for t in await stores.turns.unannounced()}
        assert other.turn not in turns
        return turn.turn in turns

    assert not await found(ended_ago_s=turn_times.ANNOUNCE_AFTER_S - 5)
    assert await found(ended_ago_s=turn_times.ANNOUNCE_AFTER_S)
    assert not await found(ended_ago_s=turn_times.ANNOUNCE_UNTIL_S)
    await asyncio.gather(*(stores.turns.mark_announced([turn.turn, other.turn][::step]) for step in (1, -1)))
    assert not await found(ended_ago_s=turn_times.ANNOUNCE_AFTER_S)


async def test_open_turns_are_counted_by_state(stores: Stores) -> None:
    """With the age of the oldest."""
    before = await stores.turns.depths()
    thread = await stores.new_thread()
    turn = await stores.post(thread.thread)
    await stores.post(thread.thread)
    await Worker(stores).begin(turn)
    after = await stores.turns.depths()
    grown = {state: after[state][0] - before.get(state, (0, 0.0))[0] for state in after}
    assert (grown["queued"], grown["running"]) == (1, 1)
    assert all(age_s >= 0 for _, age_s in after.values())


async def test_ended_tasks_are_forgotten_in_bounds(stores: Stores, turn: Turn) -> None:
    """After their time, with their checkpoints; open ones stay, and records are not touched."""
    worker = Worker(stores)
    open_claim = await worker.begin(await stores.post((await stores.new_thread()).thread))
    claim = await worker.begin(turn)
    await stores.claims.checkpoint(claim, "model:1", "1")
    ended = await worker.end(claim)
    assert await stores.claims.prune_tasks(retention_s=3600) == 0
    assert await stores.claims.prune_tasks(retention_s=0, limit=1) == 1
    while await stores.claims.prune_tasks(retention_s=0):
        pass
    assert await stores.ask("select 1 from absurd.c_turns where task_id = %s", claim.task) == []
    assert await stores.claims.keep([open_claim]) == {open_claim.run: False}
    assert await stores.record(turn) == replace(ended, ended_here=False)
    assert turn.turn not in {t.turn for t in await stores.turns.end_stranded()}


async def test_a_claim_reads_open_tasks_only(stores: Stores) -> None:
    """Those that ended are kept for days, and each claim looks for tasks over their limit."""
    await stores.ask(
        "insert into absurd.t_turns (task_id, task_name, params, state, cancellation, first_started_at)"
        " select gen_random_uuid(), 'turn', '{}', 'completed', '{\"max_duration\": 660}', now()"
        " from generate_series(1, 5000)"
    )
    await stores.ask("analyze absurd.t_turns")
    async with await psycopg.AsyncConnection.connect(stores.postgres.url) as connection:
        await connection.execute("select * from towline_claim_turns('reader', 8, 1, '{}')")
        cursor = await connection.execute(
            "select seq_tup_read + idx_tup_fetch from pg_stat_xact_all_tables where relid = 'absurd.t_turns'::regclass"
        )
        ((tuples,),) = await cursor.fetchall()
    assert tuples < 2500


# ---- all at once


async def test_whatever_happens_at_once_each_turn_ends_once_and_in_order(stores: Stores) -> None:
    """Posts, interruptions, cancellations, lapses, failures and hand-backs, by four workers on few threads.

    Nothing deadlocks (a deadlock would show as a second of waiting and a repetition, a wrong order of locks as many);
    every turn has one terminal, every thread one order, and no two turns of a thread are under way at once.
    """
    dice = random.Random(7)
    threads = [(await stores.new_thread()).thread for _ in range(4)]
    turns: list[Turn] = []
    posting = True

    async def post() -> None:
        for _ in range(15):
            on_busy: OnBusy = dice.choice(["queue", "queue", "interrupt"])
            turns.append(await stores.post(dice.choice(threads), on_busy=on_busy))
            if dice.random() < 0.2:
                await stores.turns.cancel(dice.choice(turns).turn)

    async def serve() -> None:
        worker = Worker(stores)
        while posting or any(not turn.terminal for turn in (await stores.turns.read_many(ids())).values()):
            for claim in await worker.claim(places=2):
                worker.held.remove(claim)
                with contextlib.suppress(ClaimLost):
                    await answer(claim)
            await stores.turns.end_stranded()

    async def answer(claim: Claim) -> None:
        begun = await stores.claims.begin(claim)
        if begun.verdict != "begun":
            await stores.claims.complete(claim)
            return
        await stores.claims.checkpoint(claim, "model:1", "1")
        fate = dice.random()
        if fate < 0.15:
            await stores.lapse(claim)  # this worker died
        elif fate < 0.3:
            await stores.claims.release(claim)
        elif fate < 0.4:
            await stores.claims.fail(claim, "no", retry_after_s=0)
        else:
            cancel = (await stores.claims.keep([claim])).get(claim.run)
            await stores.turns.end(claim, cancelled() if cancel else completed("answer"), [USED])
            if fate < 0.9:
                await stores.claims.complete(claim)
            else:
                await stores.lapse(claim)

    def ids() -> list[TurnId]:
        return [turn.turn for turn in turns]

    workers = [asyncio.create_task(serve()) for _ in range(4)]
    await asyncio.gather(*(post() for _ in range(4)))
    posting = False
    await asyncio.gather(*workers)

    records = (await stores.turns.read_many(ids())).values()
    assert len(records) == 60
    assert {record.terminal for record in records} == {True}
    for thread in threads:
        entries = await stores.entries(thread)
        own = sorted((record for record in records if record.thread == thread), key=lambda record: record.number)
        replies = [record.reply for record in own if record.state == "completed"]
        assert [entry.position for entry in entries] == list(range(1, len(entries) + 1))
        assert replies == [entry.entry for entry in entries if entry.role == "agent"]
        rows = await stores.usage.list_page(users=None, thread=thread, agent=None, day=None, before=None, limit=99)
        assert len({row.turn for row in rows}) == len(rows) >= len(replies)


# ---- being told


class Ear:
    """Collects what a listener hears."""

    def __init__(self) -> None:
        self.notes: list[TurnId | None] = []


@contextlib.asynccontextmanager
async def listening(stores: Stores) -> AsyncIterator[Ear]:
    ear = Ear()
    task = asyncio.create_task(stores.claims.run_listener(ear.notes.append))
    try:
        await eventually(lambda: ear.notes)
        yield ear
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_workers_hear_of_what_can_be_claimed(stores: Stores, worker: Worker) -> None:
    """A post, another attempt, the next turn of a thread."""
    thread = await stores.new_thread()
    async with listening(stores) as ear:

        async def heard_of(act: Awaitable[object]) -> None:
            before = len(ear.notes)
            await act
            await eventually(lambda: len(ear.notes) > before)

        await heard_of(stores.try_post(thread.thread, key="first"))
        turn = (await stores.try_post(thread.thread, key="first")).turn
        assert turn is not None
        claim = await worker.begin(turn)
        await heard_of(stores.claims.fail(claim, "no", retry_after_s=0))
        worker.held.clear()
        claim = await worker.begin(turn)
        await stores.post(thread.thread)
        await heard_of(worker.end(claim))
