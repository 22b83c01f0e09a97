"""Runs in Postgres: one definition and one end per id, owners that were overtaken, and being told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg
import pytest
from support import eventually

from common.ids import RunId, new_id
from common.store.leases import Point
from common.store.postgres import Postgres
from common.store.runs import CHANNEL, NewRun, NewSource, Run, Runs, SavedPoint
from harness.faults import TcpProxy


@pytest.fixture
async def runs(postgres: Postgres) -> Runs:
    return Runs(postgres)


@pytest.fixture
async def admin(postgres_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        yield connection


def new_run(*sources: NewSource, run: RunId | None = None, stall_after_s: float = 900.0) -> NewRun:
    return NewRun(
        run=run or RunId(f"run-{new_id()}"),
        sources=sources or (source("coder"), source("tester", resume="replay")),
        progress_types=["output", "result"],
        terminal_types=["result"],
        stall_after_s=stall_after_s,
        max_duration_s=86400.0,
    )


def source(name: str, *, secrets: bytes | None = None, resume: str = "ids") -> NewSource:
    return NewSource(name, f"http://agent/{name}", secrets, resume, 1800.0)  # type: ignore[arg-type]


async def read(runs: Runs, run: RunId) -> Run:
    record = await runs.read(run)
    assert record is not None
    return record


def points_of(run: Run) -> dict[str, Point]:
    return {s.source: s.point for s in run.sources}


# ---- the definition


async def test_a_run_is_what_was_given(runs: Runs) -> None:
    """Its sources in the caller's order, nothing begun and nothing ended."""
    new = new_run(source("z", secrets=b"sealed"), source("a", resume="live"))
    record, verdict = await runs.follow(new)
    assert verdict == "created"
    assert [(s.source, s.url, s.secrets, s.resume) for s in record.sources] == [
        ("z", "http://agent/z", b"sealed", "ids"),
        ("a", "http://agent/a", None, "live"),
    ]
    assert (record.state, record.reason, record.ended_ms, record.first_seq, record.last_seq, record.epoch) == (
        "active",
        None,
        None,
        None,
        None,
        0,
    )
    assert points_of(record) == {"z": Point("", 0), "a": Point("", 0)}
    assert not record.terminal
    assert 0 <= record.age_ms < 60_000
    assert await runs.read(RunId("nobody")) is None


async def test_the_second_put_of_the_same_finds_the_first(runs: Runs) -> None:
    """Ten at once: one made it, nine found it, all have the same record."""
    new = new_run()
    answers = await asyncio.gather(*(runs.follow(new) for _ in range(10)))
    assert sorted(verdict for _, verdict in answers) == ["created"] + ["same"] * 9
    assert {(record.run, record.created_ms) for record, _ in answers} == {(new.run, answers[0][0].created_ms)}
    assert [s.source for s in answers[0][0].sources] == ["coder", "tester"]


async def test_another_definition_changes_nothing(runs: Runs) -> None:
    """Whatever part of it is other, the order of the sources included."""
    new = new_run()
    record, _ = await runs.follow(new)
    others = [
        new._replace(stall_after_s=1.0),
        new._replace(max_duration_s=1.0),
        new._replace(progress_types=["result", "output"]),
        new._replace(terminal_types=[]),
        new._replace(sources=new.sources[::-1]),
        new._replace(sources=new.sources[:1]),
        new._replace(sources=[new.sources[0]._replace(url="http://agent/else"), new.sources[1]]),
        new._replace(sources=[new.sources[0]._replace(resume="live"), new.sources[1]]),
        new._replace(sources=[new.sources[0]._replace(idle_timeout_s=1.0), new.sources[1]]),
    ]
    for other in others:
        assert (await runs.follow(other))[1] == "other"
    assert (await read(runs, new.run)).sources == record.sources


async def test_headers_make_no_other_run_and_the_newest_count(runs: Runs) -> None:
    """A token that was renewed reaches the relay; a PUT that gives none keeps what there is."""
    new = new_run(source("a", secrets=b"old"), source("b", secrets=b"kept"), source("c"))
    await runs.follow(new)
    renewed = new._replace(sources=[source("a", secrets=b"renewed"), source("b"), source("c")])
    assert (await runs.follow(renewed))[1] == "same"
    assert (await runs.follow(new._replace(sources=[source("a"), source("b"), source("c")])))[1] == "same"
    assert [s.secrets for s in (await read(runs, new.run)).sources] == [b"renewed", b"kept", None]
    other = new._replace(stall_after_s=1.0, sources=[source("a", secrets=b"other"), source("b"), source("c")])
    assert (await runs.follow(other))[1] == "other"
    assert [s.secrets for s in (await read(runs, new.run)).sources] == [b"renewed", b"kept", None]


async def test_the_id_of_an_ended_run_is_used_up(runs: Runs) -> None:
    """Also for the very same body, until it is forgotten."""
    new = new_run()
    await runs.follow(new)
    assert await runs.end(new.run, "completed", "", 7)
    for again in (new, new._replace(stall_after_s=1.0)):
        record, verdict = await runs.follow(again)
        assert (verdict, record.state) == ("ended", "completed")
    assert await runs.prune(retention_s=3600) == 0
    assert await runs.prune(retention_s=0) >= 1
    assert await runs.read(new.run) is None
    assert (await runs.follow(new))[1] == "created"


async def test_pruning_is_bounded_and_leaves_open_runs(runs: Runs) -> None:
    """And two pruners at once take others."""
    ended, open_run = [new_run() for _ in range(5)], new_run()
    for new in [*ended, open_run]:
        await runs.follow(new)
    for new in ended:
        await runs.end(new.run, "failed", "gone", 0)
    await runs.prune(retention_s=0, limit=2)
    assert len(await runs.read_many([new.run for new in ended])) >= 3
    while sum(await asyncio.gather(*(runs.prune(retention_s=0, limit=2) for _ in range(2)))):
        pass
    assert list(await runs.read_many([new.run for new in [*ended, open_run]])) == [open_run.run]


async def test_runs_are_listed_newest_first_in_pages(runs: Runs) -> None:
    """By state, and without a run twice or left out where pages meet."""
    made = [(await runs.follow(new_run(stall_after_s=42.0)))[0] for _ in range(7)]
    newest_first = sorted(made, key=lambda r: (r.created_ms, r.run), reverse=True)
    seen: list[Run] = []
    before = None
    while page := await runs.list_page(state=None, before=before, limit=3):
        seen += page
        before = (page[-1].created_ms, page[-1].run)
    assert [r.run for r in seen if r.stall_after_s == 42.0] == [r.run for r in newest_first]
    await runs.end(made[3].run, "stopped", "", 0)
    stopped = await runs.list_page(state="stopped", before=None, limit=100)
    assert [r.run for r in stopped if r.stall_after_s == 42.0] == [made[3].run]


# ---- its end


async def test_a_stop_is_asked_for_and_the_owner_ends_it(runs: Runs) -> None:
    """Asking twice is asking once; an ended run stays as it ended."""
    new = new_run()
    await runs.follow(new)
    assert new.run in {r.run for r in await runs.open_runs()}
    for _ in range(2):
        stopping = await runs.request_stop(new.run)
        assert stopping is not None
        assert (stopping.state, stopping.terminal) == ("stopping", False)
    assert [r.state for r in await runs.open_runs() if r.run == new.run] == ["stopping"]
    assert not await runs.set_health(new.run, 10**15, "active")
    assert await runs.end(new.run, "stopped", "deleted", 12)
    ended = await runs.request_stop(new.run)
    assert ended is not None
    assert (ended.state, ended.reason, ended.last_seq, ended.terminal) == ("stopped", "deleted", 12, True)
    assert new.run not in {r.run for r in await runs.open_runs()}
    assert await runs.request_stop(RunId("nobody")) is None


async def test_a_run_ends_once(runs: Runs) -> None:
    """Of ten owners that say so at once one is right, and its word stays."""
    new = new_run()
    await runs.follow(new)
    ends = await asyncio.gather(*(runs.end(new.run, "completed", f"{n}", n) for n in range(10)))
    assert sum(ends) == 1
    winner = ends.index(True)
    record = await read(runs, new.run)
    assert (record.reason, record.last_seq) == (f"{winner}", winner)
    assert await runs.mint_epochs([new.run]) == {}  # nobody takes it any more


async def test_a_source_ends_once(runs: Runs) -> None:
    """How is said where it is read, and a second answer changes nothing."""
    new = new_run()
    await runs.follow(new)
    await runs.end_source(new.run, "tester", "failed", "upstream-refused", "the upstream answered 404")
    await runs.end_source(new.run, "tester", "completed", "", "")
    assert [(s.state, s.reason, s.detail) for s in (await read(runs, new.run)).sources] == [
        (None, None, None),
        ("failed", "upstream-refused", "the upstream answered 404"),
    ]


# ---- owners


async def test_epochs_grow_whoever_mints(runs: Runs, admin: psycopg.AsyncConnection) -> None:
    """Twenty at once for runs in any order; after a clock that was set back they still do."""
    ids = [(await runs.follow(new_run()))[0].run for _ in range(3)]
    minted = await asyncio.gather(*(runs.mint_epochs(ids if n % 2 else ids[::-1]) for n in range(20)))
    for run in ids:
        epochs = [m[run] for m in minted]
        assert len(set(epochs)) == 20
        assert (await read(runs, run)).epoch == max(epochs)
        assert max(epochs) < 2**53  # exact in Lua
    future = max(minted[0].values()) + 3600 * 1_000_000
    await admin.execute("update runs set epoch = %s where run = %s", [future, ids[0]])
    assert await runs.mint_epochs(ids[:1]) == {ids[0]: future + 1}
    assert await runs.mint_epochs([]) == {}
    assert await runs.mint_epochs([RunId("nobody")]) == {}


async def test_the_first_beginning_stays(runs: Runs) -> None:
    """A stream that is born anew does not move where the run's events began."""
    new = new_run()
    await runs.follow(new)
    await runs.set_first_seq(new.run, 1000)
    await runs.set_first_seq(new.run, 9000)
    assert (await read(runs, new.run)).first_seq == 1000


async def test_points_of_an_overtaken_owner_are_dropped(runs: Runs) -> None:
    """Minting alone overtakes nobody: the lease may be refused. Writing under a newer epoch does."""
    new, other = new_run(), new_run()
    await runs.follow(new)
    await runs.follow(other)
    older = (await runs.mint_epochs([new.run]))[new.run]
    newer = (await runs.mint_epochs([new.run]))[new.run]
    await runs.save_points([SavedPoint(new.run, older, "coder", Point("u1", 1))])
    assert points_of(await read(runs, new.run))["coder"] == Point("u1", 1)
    await runs.save_points(
        [
            SavedPoint(new.run, newer, "coder", Point("u5 with spaces", 5)),
            SavedPoint(new.run, newer, "tester", Point("", 9)),
        ]
    )
    await runs.save_points(
        [
            SavedPoint(new.run, older, "coder", Point("u2", 2)),
            SavedPoint(other.run, 5, "coder", Point("o1", 1)),
            SavedPoint(other.run, 5, "unheard-of", Point("o1", 1)),
        ]
    )
    assert points_of(await read(runs, new.run)) == {"coder": Point("u5 with spaces", 5), "tester": Point("", 9)}
    assert points_of(await read(runs, other.run))["coder"] == Point("o1", 1)
    await runs.save_points([])


async def test_many_owners_save_at_once(runs: Runs) -> None:
    """In any order, without a deadlock that anyone hears of."""
    ids = [(await runs.follow(new_run()))[0].run for _ in range(6)]

    async def save(epoch: int) -> None:
        ordered = ids if epoch % 2 else ids[::-1]
        await runs.save_points([SavedPoint(run, epoch, "coder", Point(f"u{epoch}", epoch)) for run in ordered])

    await asyncio.gather(*(save(epoch) for epoch in range(1, 21)))
    await save(21)
    for run in ids:
        assert points_of(await read(runs, run))["coder"] == Point("u21", 21)


async def test_health_alternates_and_is_the_newest_owners(runs: Runs) -> None:
    """The one that was overtaken calls nothing stalled."""
    new = new_run()
    await runs.follow(new)
    assert await runs.set_health(new.run, 5, "stalled")
    assert await runs.set_health(new.run, 6, "orphaned")
    assert not await runs.set_health(new.run, 5, "active")
    assert (await read(runs, new.run)).state == "orphaned"
    assert [r.state for r in await runs.open_runs() if r.run == new.run] == ["orphaned"]
    assert await runs.set_health(new.run, 6, "active")


# ---- being told


class Ear:
    """Collects what a listener hears."""

    def __init__(self) -> None:
        self.notes: list[RunId | None] = []

    def begun(self) -> int:
        return self.notes.count(None)


@contextlib.asynccontextmanager
async def listening(runs: Runs) -> AsyncIterator[Ear]:
    ear = Ear()
    task = asyncio.create_task(runs.run_listener(ear.notes.append))
    try:
        await eventually(ear.begun)
        yield ear
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_relays_hear_of_puts_stops_and_hand_overs(runs: Runs) -> None:
    """Once each; and of nothing where nothing changed."""
    first, last = new_run(), new_run()
    async with listening(runs) as ear:
        await runs.follow(first)
        await runs.follow(first)
        await runs.request_stop(first.run)
        await runs.tell([first.run])
        await runs.end(first.run, "stopped", "", 0)
        await runs.request_stop(first.run)
        await runs.follow(last)  # what comes after it would have been heard before
        await eventually(lambda: last.run in ear.notes)
        assert ear.notes.count(first.run) == 3
        assert ear.begun() == 1


async def test_relays_hear_of_newer_headers(runs: Runs) -> None:
    """The one that follows the run goes on with them; a source given without any has none to hear of."""
    new = new_run(source("a", secrets=b"old"), source("b", secrets=b"old"))
    await runs.follow(new)
    async with listening(runs) as ear:
        await runs.follow(new._replace(sources=[source("a", secrets=b"new"), source("b", secrets=b"new")]))
        await eventually(lambda: ear.notes.count(new.run) == 1)
        await runs.follow(new._replace(sources=[source("a"), source("b")]))
        last = new_run()
        await runs.follow(last)
        await eventually(lambda: last.run in ear.notes)
        assert ear.notes.count(new.run) == 1


async def test_a_listener_survives_the_loss_of_its_connection(
    runs: Runs, admin: psycopg.AsyncConnection, postgres_url: str
) -> None:
    """Its backend is killed, twice. It says that anything may have happened, and hears again."""
    async with listening(runs) as ear:
        for round_ in (2, 3):
            killed = await (
                await admin.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where application_name = 'towline-listener' and datname = current_database()"
                )
            ).fetchall()
            assert killed
            await eventually(lambda at_least=round_: ear.begun() >= at_least)
            new = new_run()
            await runs.follow(new)
            await eventually(lambda run=new.run: run in ear.notes)


async def test_a_listener_waits_for_a_postgres_that_is_away(postgres_url: str) -> None:
    """Refused for a while at the start, then cut; the notes of the time after it are heard."""
    proxy = TcpProxy(postgres_url)
    url = await proxy.start()
    proxy.refuse()
    far = Runs(Postgres(url))
    ear = Ear()
    task = asyncio.create_task(far.run_listener(ear.notes.append))
    try:
        await asyncio.sleep(0)
        assert not ear.notes
        await proxy.heal()
        await eventually(ear.begun)
        proxy.cut()
        await eventually(lambda: ear.begun() >= 2)
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            await connection.execute(f"notify {CHANNEL}, 'run-1'")
        await eventually(lambda: "run-1" in ear.notes)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await proxy.stop()
