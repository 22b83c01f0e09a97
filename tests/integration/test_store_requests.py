"""The durable record: one per key, one ending per record, whoever calls and however many at once."""

import asyncio
import itertools

import psycopg
import pytest
from job_stores import accepted, finished, new_job, new_user

from common.ids import JobId, UserId, new_id
from common.store.postgres import Postgres, open_postgres
from common.store.records import Begin, Finish, Finished, Record
from common.store.requests import ATTEMPTS_MAX, Requests

MACHINE, JOURNAL = "machine-1", "journal-1"


async def execute(postgres_url: str, text: str, *params: object) -> list[tuple[object, ...]]:
    """Run a statement of the test's own."""
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        cursor = await connection.execute(text, params)
        return await cursor.fetchall() if cursor.description else []


async def begun(requests: Requests, record: Record, machine: str = MACHINE, journal: str = JOURNAL) -> int | None:
    """Mark a job begun."""
    return await requests.begin(Begin(record.job, machine, journal))


async def read(requests: Requests, record: Record) -> Record:
    """The record as it is now."""
    return (await requests.read([record.job]))[record.job]


async def pass_deadline(postgres_url: str, *records: Record) -> None:
    """Make it later than the deadline of these."""
    await execute(
        postgres_url,
        "update requests set deadline_at = now() - interval '1 millisecond' where id = any(%s::uuid[])",
        [record.job for record in records],
    )


# ---- accept


async def test_accept_makes_a_queued_record(requests: Requests, user: UserId) -> None:
    """With everything that was handed in, and times of Postgres's clock."""
    new = new_job(user, "order-17", name="fill_form", args='{"a":  1}', hinted=False, timeout_s=7.5, deadline_s=60)
    answer = await requests.accept(new)
    record = answer.record
    assert answer.inserted
    assert (record.job, record.user, record.scope, record.key) == (new.job, user, f"user:{user}", "order-17")
    assert (record.name, record.hinted, record.timeout_s) == ("fill_form", False, 7.5)
    assert (record.fingerprint, record.on_machine_change) == (new.fingerprint, "unknown")
    assert (record.state, record.attempts, record.machine, record.journal) == ("queued", 0, None, None)
    assert (record.outcome, record.ended_ms, record.terminal) == (None, None, False)
    assert record.deadline_ms - record.accepted_ms == 60_000
    assert await requests.find(record.scope, record.key) == record
    assert await requests.read_open([record.job]) == [(record, '{"a":  1}')]
    await finished(requests, record)
    assert await requests.read_open([record.job]) == []


async def test_fifty_callers_with_one_key_over_two_replicas_make_one_job(postgres_url: str, user: UserId) -> None:
    """All get the same record, and exactly one is told that it made it."""
    async with open_postgres(postgres_url) as first, open_postgres(postgres_url) as second:
        replicas = [Requests(postgres, retention_s=3600) for postgres in (first, second)]
        answers = await asyncio.gather(*(replicas[n % 2].accept(new_job(user, "same")) for n in range(50)))
    assert sum(answer.inserted for answer in answers) == 1
    assert len({answer.record.job for answer in answers}) == 1
    rows = await execute(postgres_url, "select count(*) from requests where user_id = %s", user)
    assert rows == [(1,)]


async def test_a_key_is_the_users_own(requests: Requests) -> None:
    """The same words of another user are another job."""
    first, second = await asyncio.gather(*(requests.accept(new_job(new_user(), "same")) for _ in range(2)))
    assert first.inserted
    assert second.inserted


async def test_duplicates_within_one_batch_attach_to_the_first(postgres: Postgres, user: UserId) -> None:
    """While one flush is under way the others gather: every key several times in one statement's worth."""
    requests = Requests(postgres, retention_s=3600)
    waiting = [asyncio.create_task(requests.accept(new_job(user)))]
    await asyncio.sleep(0)  # the first one is under way now
    new = [new_job(user, f"key-{n % 5}") for n in range(40)]
    waiting += [asyncio.create_task(requests.accept(one)) for one in new]
    answers = (await asyncio.gather(*waiting))[1:]
    for key in range(5):
        same = answers[key::5]
        assert [answer.inserted for answer in same] == [True] + [False] * 7
        assert {answer.record.job for answer in same} == {new[key].job}


async def test_another_payload_under_a_known_key_gets_the_record_of_the_first(requests: Requests, user: UserId) -> None:
    """The caller compares the fingerprints; nothing is overwritten."""
    first = (await requests.accept(new_job(user, "same", args='{"a":1}'))).record
    answer = await requests.accept(new_job(user, "same", args='{"a":2}', name="other", hinted=False))
    assert not answer.inserted
    assert answer.record == first


async def test_crossing_batches_do_not_deadlock(
    postgres_url: str, user: UserId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepts, marks and finishes over the same rows in opposite orders, and keys that come again meanwhile."""
    async with open_postgres(postgres_url) as first, open_postgres(postgres_url) as second:
        replicas = [Requests(postgres, retention_s=3600) for postgres in (first, second)]
        # No repetitions from here on: a statement that Postgres ended because of a deadlock shows.
        monkeypatch.setattr("common.store.postgres.CONNECTIONS_MAX", 0)
        keys = [f"crossing-{n}" for n in range(30)]
        for turn in range(10):
            forth, back = list(keys), list(reversed(keys))
            accepts = [
                requests._accept_batch([new_job(user, f"{turn}-{key}") for key in order])
                for requests, order in itertools.product(replicas, (forth, back))
            ]
            answers = await asyncio.gather(*accepts)
            made = [a.record for batch in answers for a in batch if a is not None and a.inserted]
            assert len(made) == len(keys)
            begins = [Begin(record.job, MACHINE, JOURNAL) for record in made]
            finishes = [Finish(record.job, user, "completed", '{"result":1}', new_id()) for record in made]
            await asyncio.gather(
                *(
                    requests._begin_batch(order)
                    for requests, order in itertools.product(replicas, (begins, begins[::-1]))
                ),
                *(
                    requests._finish_batch(order)
                    for requests, order in itertools.product(replicas, (finishes, finishes[::-1]))
                ),
                *(
                    requests.give_up([record.job for record in order], "elsewhere", "x")
                    for requests, order in itertools.product(replicas, (made, made[::-1]))
                ),
                *(
                    requests._accept_batch([new_job(user, f"{turn}-{key}") for key in order])
                    for requests, order in itertools.product(replicas, (forth, back))
                ),
            )
    rows = await execute(
        postgres_url, "select count(*), count(ended_at) from requests where user_id = %s and key like '%%cross%%'", user
    )
    assert rows == [(300, 300)]


async def test_of_two_machines_whose_marks_go_out_together_one_is_answered(requests: Requests, user: UserId) -> None:
    """Both take the job while its mark waits for Postgres; the record names one, and only that one may be sent it."""
    record = await accepted(requests, user, hinted=False)
    begins = [Begin(record.job, machine, JOURNAL) for machine in ("machine-1", "machine-2")]
    attempts = await requests._begin_batch(begins)
    assert sorted(attempts, key=str) == [1, None]
    assert (await read(requests, record)).machine == begins[attempts.index(1)].machine


async def test_after_its_retention_a_key_is_new(postgres_url: str, requests: Requests, user: UserId) -> None:
    """Until then it answers with its record; an open one never lapses."""
    record = await accepted(requests, user, key="same")
    await execute(
        postgres_url, "update requests set accepted_at = now() - interval '30 days' where id = %s", record.job
    )
    assert not (await requests.accept(new_job(user, "same"))).inserted
    await finished(requests, record)
    await execute(
        postgres_url, "update requests set ended_at = now() - interval '3590 seconds' where id = %s", record.job
    )
    assert not (await requests.accept(new_job(user, "same"))).inserted
    await execute(
        postgres_url, "update requests set ended_at = now() - interval '3601 seconds' where id = %s", record.job
    )
    assert await requests.find(record.scope, "same") is None
    answers = await asyncio.gather(*(requests.accept(new_job(user, "same")) for _ in range(10)))
    assert sum(answer.inserted for answer in answers) == 1
    assert answers[0].record.job != record.job
    assert answers[0].record.state == "queued"


async def test_prune_forgets_only_what_is_past_its_retention(
    postgres_url: str, requests: Requests, user: UserId
) -> None:
    """In pages; open jobs of any age stay."""
    old = [await accepted(requests, user) for _ in range(5)]
    young, still_open = await accepted(requests, user), await accepted(requests, user)
    for record in (*old, young):
        await finished(requests, record)
    await execute(
        postgres_url,
        "update requests set ended_at = now() - interval '3601 seconds' where id = any(%s::uuid[])",
        [record.job for record in old],
    )
    await execute(
        postgres_url, "update requests set accepted_at = now() - interval '30 days' where id = %s", still_open.job
    )
    assert await requests.prune(limit=3) == 3
    assert await requests.prune(limit=3) == 2
    left = await requests.list_of_user(user, state=None, key=None, before=None, limit=100)
    assert {record.job for record in left} == {young.job, still_open.job}


# ---- begin


async def test_a_begin_mark_is_durable_and_counted(requests: Requests, user: UserId) -> None:
    """For the machine and journal that it was made for."""
    record = await accepted(requests, user, hinted=False)
    assert await begun(requests, record) == 1
    record = await read(requests, record)
    assert (record.state, record.attempts, record.machine, record.journal) == ("processing", 1, MACHINE, JOURNAL)
    assert await begun(requests, record) == 2


@pytest.mark.parametrize(("machine", "journal"), [("machine-2", JOURNAL), (MACHINE, "journal-2")])
async def test_what_was_begun_on_one_machine_and_journal_is_not_marked_for_another(
    requests: Requests, user: UserId, machine: str, journal: str
) -> None:
    """A reinstalled machine has a new journal, and does not know what ran."""
    record = await accepted(requests, user)
    await begun(requests, record)
    assert await begun(requests, record, machine, journal) is None
    assert (await read(requests, record)).attempts == 1


async def test_what_has_ended_is_not_marked(requests: Requests, user: UserId) -> None:
    """No row: no frame."""
    record = await finished(requests, await accepted(requests, user))
    assert await begun(requests, record) is None
    assert await read(requests, record) == record


async def test_what_is_past_its_deadline_is_not_marked(postgres_url: str, requests: Requests, user: UserId) -> None:
    """By the clock of Postgres alone."""
    record = await accepted(requests, user)
    await pass_deadline(postgres_url, record)
    assert await begun(requests, record) is None
    assert (await read(requests, record)).state == "queued"


async def test_five_marks_are_enough(requests: Requests, user: UserId) -> None:
    """A job that kills whoever takes it must not do so for ever."""
    record = await accepted(requests, user)
    assert [await begun(requests, record) for _ in range(ATTEMPTS_MAX + 1)] == [1, 2, 3, 4, 5, None]


async def test_an_unknown_job_is_not_marked(requests: Requests) -> None:
    """A stream entry may outlive its record."""
    assert await requests.begin(Begin(JobId(new_id()), MACHINE, JOURNAL)) is None


async def test_marks_of_a_batch_are_answered_one_by_one(requests: Requests, user: UserId) -> None:
    """Some may be sent, some may not."""
    records = [await accepted(requests, user) for _ in range(30)]
    for record in records[::3]:
        await finished(requests, record)
    attempts = await asyncio.gather(*(begun(requests, record) for record in records))
    assert attempts == [None if n % 3 == 0 else 1 for n in range(30)]


# ---- finish


async def test_the_first_outcome_is_the_answer(postgres_url: str, requests: Requests, user: UserId) -> None:
    """A later one changes nothing, and is kept beside it."""
    record = await accepted(requests, user)
    first = await requests.finish(Finish(record.job, user, "completed", '{"result":  1}', new_id()))
    late = await requests.finish(Finish(record.job, user, "failed", '{"error":{"code":"x"}}', new_id()))
    last = await requests.finish(Finish(record.job, user, "unknown", '{"error":{"code":"y"}}', new_id()))
    assert first is not None
    assert late is not None
    assert last is not None
    assert [first.won, late.won, last.won] == [True, False, False]
    assert first.record == late.record == last.record
    assert (first.record.state, first.record.outcome) == ("completed", '{"result":  1}')
    assert first.record.attempts == 1  # unmarked, but a machine has run it
    rows = await execute(postgres_url, "select late_outcome from requests where id = %s", record.job)
    assert rows == [('{"error":{"code":"x"}}',)]


async def test_an_outcome_that_is_sent_again_is_not_a_late_one(
    postgres_url: str, requests: Requests, user: UserId
) -> None:
    """The machine repeats what it has until it is acknowledged."""
    record = await accepted(requests, user)
    for _ in range(3):
        await requests.finish(Finish(record.job, user, "completed", '{"result":1}', new_id()))
    rows = await execute(postgres_url, "select late_outcome from requests where id = %s", record.job)
    assert rows == [(None,)]


async def test_one_of_many_finishes_at_once_wins(postgres_url: str, user: UserId) -> None:
    """Over two replicas, several in one batch; all are told the same record."""
    async with open_postgres(postgres_url) as first, open_postgres(postgres_url) as second:
        replicas = [Requests(postgres, retention_s=3600) for postgres in (first, second)]
        record = await accepted(replicas[0], user)
        answers = await asyncio.gather(
            *(
                replicas[n % 2].finish(Finish(record.job, user, "completed", f'{{"result":{n}}}', new_id()))
                for n in range(40)
            )
        )
    records = {answer.record for answer in answers if answer}
    assert len(records) == 1
    assert sum(answer.won for answer in answers if answer) == 1


@pytest.mark.parametrize("stranger", [True, False])
async def test_an_outcome_for_another_users_job_is_refused(requests: Requests, user: UserId, stranger: bool) -> None:
    """And so is one for a job that nobody has."""
    record = await accepted(requests, user)
    job = JobId(new_id()) if stranger else record.job
    assert await requests.finish(Finish(job, new_user(), "completed", '{"result":1}', new_id())) is None
    assert await read(requests, record) == record


async def test_an_outcome_counts_after_the_deadline_while_nobody_has_ended_the_job(
    postgres_url: str, requests: Requests, user: UserId
) -> None:
    """It says more than `unknown` would."""
    record = await accepted(requests, user)
    await begun(requests, record)
    await pass_deadline(postgres_url, record)
    answer = await requests.finish(Finish(record.job, user, "completed", '{"result":1}', new_id()))
    assert answer is not None
    assert answer.won


# ---- give up


@pytest.mark.parametrize(
    ("members", "marks", "late", "machine", "state", "code"),
    [
        ({}, 0, True, MACHINE, "expired", "expired"),
        ({"hinted": False}, 1, True, MACHINE, "unknown", "deadline"),
        ({}, ATTEMPTS_MAX, False, MACHINE, "failed", "undeliverable"),
        ({"hinted": False}, ATTEMPTS_MAX, False, MACHINE, "unknown", "undeliverable"),
        ({}, ATTEMPTS_MAX, True, MACHINE, "unknown", "deadline"),
        ({"hinted": False}, 1, False, "machine-2", "unknown", "machine-changed"),
        ({"on_machine_change": "wait"}, 1, True, "machine-2", "unknown", "deadline"),
    ],
    ids=["late", "begun-late", "poison-hinted", "poison", "poison-late", "elsewhere", "waited-too-long"],
)
async def test_give_up_ends_a_job_with_its_reason(
    postgres_url: str,
    requests: Requests,
    user: UserId,
    members: dict[str, object],
    marks: int,
    late: bool,
    machine: str,
    state: str,
    code: str,
) -> None:
    """What was never begun did not run; what was begun may have."""
    record = await accepted(requests, user, **members)
    for _ in range(marks):
        await begun(requests, record)
    if late:
        await pass_deadline(postgres_url, record)
    ended = await requests.give_up([record.job], machine, JOURNAL)
    assert ended[record.job].won
    assert ended[record.job].record.state == state
    assert f'"code":"{code}"' in ended[record.job].record.outcome
    assert await requests.give_up([record.job], machine, JOURNAL) == {
        record.job: Finished(ended[record.job].record, False)
    }


async def test_give_up_leaves_what_may_still_be_started(requests: Requests, user: UserId) -> None:
    """One that waits for its own machine stays open; so does one that is begun here, or not at all."""
    waiting = await accepted(requests, user, on_machine_change="wait")
    await begun(requests, waiting)
    assert await requests.give_up([waiting.job], "machine-2", JOURNAL) == {}
    here = await accepted(requests, user)
    await begun(requests, here)
    fresh = await accepted(requests, user)
    assert await requests.give_up([here.job, fresh.job], MACHINE, JOURNAL) == {}
    assert [(await read(requests, record)).terminal for record in (waiting, here, fresh)] == [False] * 3


async def test_give_up_returns_what_has_ended_otherwise(requests: Requests, user: UserId) -> None:
    """The record says how; it is settled next."""
    record = await finished(requests, await accepted(requests, user))
    assert await requests.give_up([record.job], "machine-2", JOURNAL) == {
        record.job: Finished(record.published(), False)
    }


# ---- expire, cancel, open


async def test_deadlines_end_each_job_once_with_several_sweepers(
    postgres_url: str, requests: Requests, user: UserId
) -> None:
    """Two at once take different rows, and none waits for the other."""
    records = [await accepted(requests, user) for _ in range(60)]
    for record in records[:20]:
        await begun(requests, record)
    await pass_deadline(postgres_url, *records)
    async with open_postgres(postgres_url) as first, open_postgres(postgres_url) as second:
        replicas = [Requests(postgres, retention_s=3600) for postgres in (first, second)]
        ended: list[Record] = []
        while len(ended) < 60:
            pages = await asyncio.gather(*(replica.expire(limit=10) for replica in replicas))
            assert any(pages), "rows were left behind"
            ended += [record for page in pages for record in page if record.user == user]
    states = {record.job: record.state for record in ended}
    assert len(ended) == len(states) == 60
    assert all(states[record.job] == "unknown" for record in records[:20])
    assert all(states[record.job] == "expired" for record in records[20:])


async def test_a_sweeper_does_not_wait_for_a_row_that_is_being_written(
    postgres_url: str, requests: Requests, user: UserId
) -> None:
    """Whoever holds it is about to end it."""
    held, free = await accepted(requests, user), await accepted(requests, user)
    await pass_deadline(postgres_url, held, free)
    async with (
        await psycopg.AsyncConnection.connect(postgres_url) as connection,
        connection.transaction(),
        asyncio.timeout(5),
    ):
        await connection.execute("select from requests where id = %s for update", [held.job])
        ended = [record for record in await requests.expire(limit=100) if record.user == user]
        assert [record.job for record in ended] == [free.job]


async def test_only_a_queued_job_of_the_user_is_cancelled(requests: Requests, user: UserId) -> None:
    """Anything begun ends as the machine says."""
    record = await accepted(requests, user)
    assert await requests.cancel(record.job, new_user()) is None
    cancelled = await requests.cancel(record.job, user)
    assert cancelled is not None
    assert (cancelled.state, cancelled.terminal) == ("cancelled", True)
    assert await requests.cancel(record.job, user) is None
    processing = await accepted(requests, user)
    await begun(requests, processing)
    assert await requests.cancel(processing.job, user) is None
    assert (await read(requests, processing)).state == "processing"


async def test_a_cancel_and_a_mark_at_once_agree(requests: Requests, user: UserId) -> None:
    """Either it was marked and will run, or it was cancelled and never leaves."""
    for _ in range(30):
        record = await accepted(requests, user)
        attempt, cancelled = await asyncio.gather(begun(requests, record), requests.cancel(record.job, user))
        assert (attempt is None) == (cancelled is not None)


async def test_open_jobs_are_paged_by_id_within_a_window_of_age(
    postgres_url: str, requests: Requests, user: UserId
) -> None:
    """Ended, late, too young and too old ones are left out."""
    records = [await accepted(requests, user) for _ in range(7)]
    ended, late, young, old = [await accepted(requests, user) for _ in range(4)]
    for record, age_s in [*((record, 10) for record in (*records, ended, late)), (old, 100)]:
        await execute(
            postgres_url,
            "update requests set accepted_at = now() - %s * interval '1 second' where id = %s",
            age_s,
            record.job,
        )
    await finished(requests, ended)
    await pass_deadline(postgres_url, late)
    seen: list[JobId] = []
    while page := await requests.open_jobs(
        older_than_s=5, younger_than_s=50, after=JobId(seen[-1]) if seen else None, limit=3
    ):
        assert len(page) <= 3
        seen += [record.job for record in page]
    ours = {record.job for record in (*records, ended, late, young, old)}
    assert [job for job in seen if job in ours] == [record.job for record in records]


async def test_a_users_jobs_are_listed_newest_first(requests: Requests, user: UserId) -> None:
    """Paged, and by state or key."""
    records = [await accepted(requests, user, key=f"k{n}") for n in range(5)]
    await finished(requests, records[2])

    async def listed(**filters: object) -> list[str]:
        defaults: dict[str, object] = {"state": None, "key": None, "before": None, "limit": 10}
        return [record.key for record in await requests.list_of_user(user, **{**defaults, **filters})]  # type: ignore[arg-type]

    assert await listed() == ["k4", "k3", "k2", "k1", "k0"]
    assert await listed(limit=2, before=records[3].job) == ["k2", "k1"]
    assert await listed(state="completed") == ["k2"]
    assert await listed(key="k3") == ["k3"]
    assert await requests.list_of_user(new_user(), state=None, key=None, before=None, limit=10) == []


async def test_depths_count_open_jobs(postgres: Postgres, postgres_url: str, user: UserId) -> None:
    """By state, with the age of the oldest."""
    requests = Requests(postgres, retention_s=3600)
    before = await requests.depths()
    records = [await accepted(requests, user) for _ in range(3)]
    await begun(requests, records[0])
    await finished(requests, records[2])
    await execute(
        postgres_url, "update requests set accepted_at = now() - interval '99 days' where id = %s", records[1].job
    )
    after = await requests.depths()
    assert after["queued"][0] == before.get("queued", (0, 0.0))[0] + 1
    assert after["processing"][0] == before.get("processing", (0, 0.0))[0] + 1
    assert after["queued"][1] == pytest.approx(99 * 86400, abs=60)
