"""Delivery: what a worker sends when, over a real socket, from real stores (rules 3, 3a, 13, 14a)."""

import asyncio

import msgspec
import psycopg
import pytest
from bridge import Bridge, hello
from job_stores import accepted, new_user
from support import eventually

from common.ids import GatewayId, JobId, UserId, WorkerId, new_id
from common.store import keys
from common.store.cancels import end_queued
from common.store.control import tell_worker
from common.store.presence import state_of
from common.store.records import Begin
from towline.wire import frames
from worker.delivery import AHEAD_MAX
from worker.session import SEND_QUEUE_MAX


async def test_a_machine_is_welcomed_and_present(bridge: Bridge, user: UserId) -> None:
    """With the catalogue at the door and in its record."""
    peer = await bridge.dial(await bridge.token(user))
    async with bridge.counts("towline_presence_refresh_seconds_count"):
        await peer.send(hello())
        welcome = await peer.next(frames.Welcome)
    assert (welcome.heartbeat_s, welcome.max_frame_bytes, welcome.user) == (10, frames.FRAME_BYTES_MAX, user)
    presence = await bridge.held(user).presence()
    assert presence["state"] == "online"
    assert (presence["machine"], presence["session"]) == ("machine-1", welcome.session)
    assert presence["epoch"] == f"{welcome.epoch}"
    assert await bridge.held(user).tools() == {"echo": "h", "fill_form": "u"}
    catalogue = await bridge.tokens.catalogue(user)
    assert catalogue is not None
    assert msgspec.json.decode(catalogue.tools, type=list[frames.Tool]) == hello().tools


async def test_a_job_walks_from_the_stream_to_its_outcome(bridge: Bridge, user: UserId) -> None:
    """Told by a note, delivered once, durable before it is acknowledged, and nothing is left behind."""
    peer = await bridge.machine(user)
    traceparent = f"00-{new_id().replace('-', '')}-00f067aa0ba902b7-01"
    record = await bridge.submit(user, args='{"a":  [1.0]}', key="order-17", traceparent=traceparent)
    job = await peer.next(frames.Job)
    assert (job.job, job.idempotency_key, job.name) == (record.job, "order-17", "echo")
    assert (bytes(job.args), job.timeout_s, job.attempt, job.hinted) == (b'{"a":  [1.0]}', 120, 1, True)
    assert job.accepted_at.endswith("Z")
    assert job.accepted_at < job.deadline_at
    assert job.id != job.job
    assert job.traceparent == traceparent
    await peer.answer(job, '{"b":  2.0}')
    ended = await bridge.ended(record.job)
    assert (ended.state, ended.outcome, ended.attempts) == ("completed", '{"result":{"b":  2.0}}', 1)
    held = bridge.held(user)
    await eventually(lambda: _is_settled(bridge, user))
    assert await held.pending() == 0
    assert peer.jobs() == [record.job]
    (line,) = bridge.logged("job_ended", job=record.job)
    assert (line["user"], line["state"], line["attempts"], line["traceparent"]) == (user, "completed", 1, traceparent)


async def test_a_jobs_time_is_measured_in_each_phase(bridge: Bridge, user: UserId) -> None:
    """In the stream, in the window, on the machine, and until whoever waits has been told."""
    peer = await bridge.machine(user)
    phases = ("queue", "deliver", "execute", "reply")
    async with bridge.counts(*(f'towline_job_seconds_count{{phase="{phase}"}}' for phase in phases)):
        await bridge.submit(user)
        await peer.answer(await peer.next(frames.Job))


async def _is_settled(bridge: Bridge, user: UserId) -> bool:
    return await bridge.held(user).entries() == [] and await bridge.held(user).index() == {"bytes": "0"}


async def test_what_waited_is_delivered_on_connecting(bridge: Bridge, user: UserId) -> None:
    """In stream order, without a note."""
    records = [await bridge.submit(user) for _ in range(3)]
    peer = await bridge.machine(user)
    assert [(await peer.next(frames.Job)).job for _ in records] == [record.job for record in records]


async def test_hinted_jobs_are_ahead_by_sixteen_and_the_rest_stays_queued(bridge: Bridge, user: UserId) -> None:
    """Untaken: it can be cancelled, and another worker could take it."""
    peer = await bridge.machine(user)
    records = [await bridge.submit(user) for _ in range(20)]
    frames_sent = [await peer.next(frames.Job) for _ in range(AHEAD_MAX)]
    await bridge.fence(user, peer)
    assert peer.jobs() == [record.job for record in records[:AHEAD_MAX]]
    assert await bridge.held(user).pending() == AHEAD_MAX
    assert (await bridge.record(records[0].job)).attempts == 0  # unmarked: no commit before it leaves
    assert await bridge.requests.cancel(records[19].job, user) is not None
    for job in frames_sent:
        await peer.answer(job)
    for _ in range(3):
        await peer.answer(await peer.next(frames.Job))
    # The cancelled one has no mark to tell; its machine may run it, being hinted, and its record stays as it is.
    states = [(await bridge.ended(record.job)).state for record in records]
    assert states == ["completed"] * 19 + ["cancelled"]


async def test_a_queue_longer_than_the_window_needs_no_heartbeat(quiet_bridge: Bridge, user: UserId) -> None:
    """The first take came back full: places that free are taken at once, though no note comes any more."""
    records = [await quiet_bridge.submit(user) for _ in range(40)]
    peer = await quiet_bridge.machine(user)
    for _ in records:
        await peer.answer(await peer.next(frames.Job))
    assert peer.jobs() == [record.job for record in records]


async def test_what_a_claim_left_behind_is_claimed_as_soon_as_a_place_frees(quiet_bridge: Bridge, user: UserId) -> None:
    """The machine still runs one of those that its lost session held, so the others have to wait."""
    token = await quiet_bridge.token(user)
    peer = await quiet_bridge.machine(user, token=token)
    records = [await quiet_bridge.submit(user) for _ in range(4)]
    for _ in records:
        await peer.next(frames.Job)
    peer.break_off()
    peer = await quiet_bridge.machine(user, token=token, running=[records[0].job])
    await quiet_bridge.fence(user, peer)
    assert peer.jobs() == []
    await peer.send(frames.JobResult(outcome="completed", job=records[0].job, result=msgspec.Raw(b"1")))
    for record in records[1:]:
        job = await peer.next(frames.Job)
        assert (job.job, job.attempt) == (record.job, 1)
        await peer.answer(job)


async def test_unhinted_jobs_go_one_at_a_time(bridge: Bridge, user: UserId) -> None:
    """The next one is not even marked before the result is there."""
    peer = await bridge.machine(user)
    records = [await bridge.submit(user, hinted=False, name="fill_form") for _ in range(3)]
    for number, record in enumerate(records):
        job = await peer.next(frames.Job)
        assert job.job == record.job
        await bridge.fence(user, peer)
        assert len(peer.jobs()) == number + 1
        assert [(await bridge.record(r.job)).attempts for r in records[number:]] == [1] + [0] * (2 - number)
        await peer.answer(job)
    assert (await bridge.ended(records[-1].job)).state == "completed"


async def test_the_begin_mark_is_durable_before_the_frame_leaves(bridge: Bridge, user: UserId) -> None:
    """While Postgres cannot write it, nothing is sent, though the entry was taken."""
    peer = await bridge.machine(user)
    record = await accepted(bridge.requests, user, hinted=False, name="fill_form")
    async with await psycopg.AsyncConnection.connect(bridge.postgres_url) as connection, connection.transaction():
        await connection.execute("select from requests where id = %s for update", [record.job])
        await bridge.jobs.enqueue(record, "{}", None)
        await eventually(lambda: _is_taken(bridge, user))
        await bridge.fence(user, peer)
        assert peer.jobs() == []
    job = await peer.next(frames.Job)
    marked = await bridge.record(record.job)
    assert (marked.state, marked.attempts, marked.machine, marked.journal) == (
        "processing",
        1,
        "machine-1",
        "journal-1",
    )
    assert job.attempt == 1
    await peer.answer(job)


async def _is_taken(bridge: Bridge, user: UserId) -> bool:
    return await bridge.held(user).pending() == 1


async def test_what_has_ended_meanwhile_is_not_sent(bridge: Bridge, user: UserId) -> None:
    """Cancelled while it waited behind another: no mark, no frame, and it is settled."""
    peer = await bridge.machine(user)
    first, second, third = [await bridge.submit(user, hinted=False, name="fill_form") for _ in range(3)]
    job = await peer.next(frames.Job)
    assert await bridge.requests.cancel(second.job, user) is not None
    await peer.answer(job)
    job = await peer.next(frames.Job)
    assert job.job == third.job
    await peer.answer(job)
    await eventually(lambda: _is_settled(bridge, user))
    assert peer.jobs() == [first.job, third.job]


async def test_a_lost_socket_brings_its_jobs_again_under_new_frame_ids(bridge: Bridge, user: UserId) -> None:
    """At once, marked, alone, and with the attempt counted."""
    token = await bridge.token(user)
    peer = await bridge.machine(user, token=token)
    records = [await bridge.submit(user) for _ in range(2)]
    before = [await peer.next(frames.Job) for _ in records]
    async with bridge.counts('towline_job_redeliveries_total{reason="claimed"}'), bridge.counts_close("lost"):
        peer.break_off()
        peer = await bridge.machine(user, token=token)
    for number, record in enumerate(records):
        job = await peer.next(frames.Job)
        assert job.job == record.job
        assert job.id != before[number].id
        await bridge.fence(user, peer)
        assert len(peer.jobs()) == number + 1
        assert (await bridge.record(record.job)).attempts == 1
        await peer.answer(job)
        assert (await bridge.ended(record.job)).state == "completed"


async def test_a_job_that_the_machine_runs_is_not_sent_again(bridge: Bridge, user: UserId) -> None:
    """Its hello says so; nothing else starts there, and the answer by job id ends it."""
    token = await bridge.token(user)
    peer = await bridge.machine(user, token=token)
    running = await bridge.submit(user, hinted=False, name="fill_form")
    waiting = await bridge.submit(user)
    await peer.next(frames.Job)
    peer.break_off()
    peer = await bridge.machine(user, token=token, running=[running.job])
    await bridge.fence(user, peer)
    assert peer.jobs() == []
    assert (await bridge.record(running.job)).attempts == 1
    await peer.send(frames.JobResult(outcome="completed", job=running.job, result=msgspec.Raw(b"7")))
    assert (await bridge.ended(running.job)).outcome == '{"result":7}'
    assert (await peer.next(frames.Job)).job == waiting.job


async def test_a_second_session_of_the_machine_replaces_the_first_and_claims_at_once(
    brisk_bridge: Bridge, user: UserId
) -> None:
    """The old socket is told 4503 within a heartbeat; the new one has the job long before."""
    bridge, token = brisk_bridge, await brisk_bridge.token(user)
    old = await bridge.machine(user, token=token)
    record = await bridge.submit(user, hinted=False, name="fill_form")
    await old.next(frames.Job)
    async with bridge.counts_close("replaced"):
        new = await bridge.machine(user, token=token)
        job = await new.next(frames.Job)
        assert (job.job, job.attempt) == (record.job, 2)
        assert await old.closed() == (4503, "a newer session of this machine is connected")
    await new.answer(job)
    assert (await bridge.ended(record.job)).state == "completed"
    # The end of the old session did not touch the presence of the new one.
    assert (await bridge.held(user).presence())["state"] == "online"


async def test_another_machine_stands_by_until_the_first_has_gone(bridge: Bridge, user: UserId) -> None:
    """4003 before any welcome; the first one does not notice."""
    first = await bridge.machine(user, machine="laptop")
    second = await bridge.dial(await bridge.token(user))
    async with bridge.counts_close("other_machine"):
        await second.send(hello(machine="desktop"))
        code, reason = await second.closed()
    assert code == 4003
    assert reason is not None
    assert "20 s: " in reason
    assert second.received == []
    assert (await bridge.held(user).presence())["machine"] == "laptop"
    await bridge.fence(user, first)
    await first.goodbye()
    await eventually(lambda: _is_absent(bridge, user))
    await bridge.machine(user, machine="desktop")


async def _is_absent(bridge: Bridge, user: UserId) -> bool:
    return await bridge.held(user).presence() == {}


async def test_a_job_begun_on_another_machine_is_unknown_or_waits(bridge: Bridge, user: UserId) -> None:
    """As its caller chose; one that waits takes no place from the others."""
    ends = await bridge.submit(user, hinted=False, name="fill_form")
    waits = await bridge.submit(user, hinted=False, name="fill_form", on_machine_change="wait")
    for record in (ends, waits):
        assert await bridge.requests.begin(Begin(record.job, "laptop", "j")) == 1
    fresh = await bridge.submit(user, hinted=False, name="fill_form")
    peer = await bridge.machine(user, machine="desktop")
    job = await peer.next(frames.Job)
    assert job.job == fresh.job
    assert (await bridge.ended(ends.job)).state == "unknown"
    assert (await bridge.record(waits.job)).state == "processing"
    await peer.answer(job)
    await peer.goodbye()
    await eventually(lambda: _is_absent(bridge, user))
    peer = await bridge.machine(user, machine="laptop", journal="j")
    job = await peer.next(frames.Job)
    assert (job.job, job.attempt) == (waits.job, 2)


async def test_a_poisonous_job_ends_after_five_marks_and_the_queue_moves(bridge: Bridge, user: UserId) -> None:
    """Each delivery costs the machine its socket."""
    token = await bridge.token(user)
    poison = await bridge.submit(user, hinted=False, name="fill_form")
    behind = await bridge.submit(user)
    for attempt in range(1, 6):
        peer = await bridge.machine(user, token=token)
        job = await peer.next(frames.Job)
        assert (job.job, job.attempt) == (poison.job, attempt)
        peer.break_off()
    async with bridge.counts('towline_jobs_total{outcome="unknown"}'):
        peer = await bridge.machine(user, token=token)
        assert (await peer.next(frames.Job)).job == behind.job
    ended = await bridge.ended(poison.job)
    assert (ended.state, ended.attempts) == ("unknown", 5)
    assert '"undeliverable"' in (ended.outcome or "")


async def test_a_deadline_passes_in_the_queue(bridge: Bridge, user: UserId) -> None:
    """Hinted or not, nothing is sent after it; both end as expired."""
    records = [await bridge.submit(user, hinted=hinted, deadline_s=0.001) for hinted in (True, False)]
    peer = await bridge.machine(user)
    for record in records:
        assert (await bridge.ended(record.job)).state == "expired"
        await eventually(lambda job=record.job: _ends_in_log(bridge, job) == {"expired"})
    await eventually(lambda: _is_settled(bridge, user))
    assert peer.jobs() == []


def _ends_in_log(bridge: Bridge, job: JobId) -> set[str]:
    """The states in which the worker has logged the job's end, whichever part of it was first."""
    return {line["state"] for event in ("job_ended", "job_not_started") for line in bridge.logged(event, job=job)}


async def test_a_probe_is_answered_while_a_job_runs(bridge: Bridge, user: UserId) -> None:
    """From its own lane, once."""
    peer = await bridge.machine(user)
    await bridge.submit(user, hinted=False, name="fill_form")
    await peer.next(frames.Job)
    gateway = GatewayId(f"gateway-{user}")
    worker = (await bridge.held(user).presence())["worker"]
    note = {"note": "probe", "user": user, "probe": "nonce-1", "reply_to": gateway}
    await tell_worker(bridge.redis, WorkerId(worker), note)
    status = await peer.next(frames.Status)
    await peer.send(frames.StatusResult(id="of something else", busy=True, queue=9, uptime_s=1))
    await peer.send(frames.StatusResult(id=status.id, busy=True, queue=2, uptime_s=1))
    await peer.send(frames.StatusResult(id=status.id, busy=False, queue=0, uptime_s=1))
    reply = await eventually(lambda: bridge.client.xrange(keys.replies(gateway)))
    await bridge.fence(user, peer)
    assert len(await bridge.client.xrange(keys.replies(gateway))) == 1
    assert reply[0][1] == {"probe": "nonce-1", "busy": "1"}


async def test_a_cancel_reaches_the_machine_under_the_frame_it_knows(bridge: Bridge, user: UserId) -> None:
    """One for a job that is not there says nothing to anybody."""
    peer = await bridge.machine(user)
    record = await bridge.submit(user, hinted=False, name="fill_form")
    job = await peer.next(frames.Job)
    worker = WorkerId((await bridge.held(user).presence())["worker"])
    for named in (new_id(), record.job):
        await tell_worker(bridge.redis, worker, {"note": "cancel", "user": user, "job": named})
    assert (await peer.next(frames.JobCancel)).id == job.id
    await bridge.fence(user, peer)
    assert sum(isinstance(frame, frames.JobCancel) for frame in peer.received) == 1


async def test_a_running_job_is_cancelled_over_a_socket_that_it_did_not_come_by(bridge: Bridge, user: UserId) -> None:
    """That the hello lists it is all that this session knows of it; answered, it is no longer to be cancelled."""
    token = await bridge.token(user)
    peer = await bridge.machine(user, token=token)
    record = await bridge.submit(user, hinted=False, name="fill_form")
    await peer.next(frames.Job)
    peer.break_off()
    peer = await bridge.machine(user, token=token, running=[record.job])
    for _ in range(2):
        assert await end_queued(record, bridge.requests, bridge.jobs) is None  # it was begun
        await bridge.jobs.ask_to_stop(record.job, record.user)
    assert (await peer.next(frames.JobCancel)).id == ""
    failure = frames.Failure("cancelled", "cancelled while it ran")
    await peer.send(frames.JobResult(outcome="unknown", job=record.job, error=failure))
    assert (await bridge.ended(record.job)).state == "unknown"
    await bridge.jobs.ask_to_stop(record.job, record.user)
    await bridge.fence(user, peer)
    assert sum(isinstance(frame, frames.JobCancel) for frame in peer.received) == 1


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_job_that_is_cancelled_between_two_sockets_is_stopped_by_the_next(
    bridge: Bridge, user: UserId, is_running: bool
) -> None:
    """Whether the machine still runs it, or is sent it again; and only until it has ended."""
    token = await bridge.token(user)
    peer = await bridge.machine(user, token=token)
    record = await bridge.submit(user, hinted=False, name="fill_form")
    await peer.next(frames.Job)
    peer.break_off()
    await eventually(lambda: _is_reconnecting(bridge, user))
    await bridge.jobs.ask_to_stop(record.job, record.user)
    peer = await bridge.machine(user, token=token, running=[record.job] if is_running else [])
    frame_id = "" if is_running else (await peer.next(frames.Job)).id
    assert (await peer.next(frames.JobCancel)).id == frame_id
    failure = frames.Failure("cancelled", "cancelled while it ran")
    await peer.send(frames.JobResult(outcome="unknown", job=record.job, error=failure))
    assert (await bridge.ended(record.job)).state == "unknown"
    await eventually(lambda: _is_settled(bridge, user))
    assert not await bridge.client.exists(keys.cancels(user))


async def test_a_hinted_job_that_was_cancelled_while_it_waited_is_not_sent(bridge: Bridge, user: UserId) -> None:
    """Its caller was told that it did not run. It waits here, behind one that goes alone, and needs no mark."""
    first = await bridge.submit(user, hinted=False, name="fill_form")
    second, third = [await bridge.submit(user) for _ in range(2)]
    peer = await bridge.machine(user)
    job = await peer.next(frames.Job)
    assert await bridge.held(user).pending() == 3  # all three were taken
    cancelled = await end_queued(second, bridge.requests, bridge.jobs)
    assert cancelled is not None
    assert cancelled.state == "cancelled"
    await bridge.fence(user, peer)  # the note was heeded
    await peer.answer(job)
    job = await peer.next(frames.Job)
    assert (job.job, job.attempt) == (third.job, 1)
    await peer.answer(job)
    assert (await bridge.ended(third.job)).state == "completed"
    await eventually(lambda: _is_settled(bridge, user))
    assert peer.jobs() == [first.job, third.job]
    assert (await bridge.record(second.job)).attempts == 0


async def test_a_burst_of_probes_cuts_nobody_off(bridge: Bridge, user: UserId) -> None:
    """As many callers ask at once, so many that not all are asked on; the socket stays, and jobs go out."""
    peer = await bridge.machine(user)
    worker = WorkerId((await bridge.held(user).presence())["worker"])
    probe = ("XADD", keys.control(worker), "*", "note", "probe", "user", user, "reply_to", "nobody", "probe")
    await bridge.redis.send_many([(*probe, new_id()) for _ in range(4 * SEND_QUEUE_MAX)])
    await bridge.fence(user, peer)
    await bridge.submit(user)
    await peer.answer(await peer.next(frames.Job))
    assert peer.socket.close_code is None


async def test_notes_that_cannot_be_read_harm_nobody(bridge: Bridge, user: UserId) -> None:
    """A newer gateway may write other ones."""
    peer = await bridge.machine(user)
    worker = WorkerId((await bridge.held(user).presence())["worker"])
    for note in ({"x": "y"}, {"note": "nonsense", "user": user}, {"note": "probe", "user": user}, {"user": user}):
        await tell_worker(bridge.redis, worker, note)
    await bridge.fence(user, peer)
    record = await bridge.submit(user)
    assert (await peer.next(frames.Job)).job == record.job


async def test_a_changed_catalogue_reaches_the_door_and_the_record(bridge: Bridge, user: UserId) -> None:
    """Also when there is nothing left in it."""
    peer = await bridge.machine(user)
    held = bridge.held(user)
    for tools in ([frames.Tool("new", hints=frames.Hints(idempotent=True))], []):
        await peer.send(frames.Tools(tools=tools))
        await eventually(lambda tools=tools: _has_tools(bridge, user, {tool.name: "h" for tool in tools}))
    await eventually(lambda: _has_catalogue(bridge, user, "[]"))
    assert (await held.presence())["state"] == "online"


async def test_odd_text_in_a_changed_catalogue_is_mended(bridge: Bridge, user: UserId) -> None:
    """As in a hello: what no caller could be told is not kept."""
    peer = await bridge.machine(user)
    await peer.send(frames.Tools(tools=[frames.Tool("t", "a\x00b", {"title": "\x00"})]))
    mended = [frames.Tool("t", "a\ufffdb", {"title": "\ufffd"})]
    await eventually(lambda: _has_catalogue(bridge, user, msgspec.json.encode(mended).decode()))


async def _has_catalogue(bridge: Bridge, user: UserId, tools: str) -> bool:
    catalogue = await bridge.tokens.catalogue(user)
    return catalogue is not None and catalogue.tools == tools


async def _has_tools(bridge: Bridge, user: UserId, tools: dict[str, str]) -> bool:
    return await bridge.held(user).tools() == tools


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([frames.Tool(f"t{n}") for n in range(257)], "at most 256"),
        ([frames.Tool("t"), frames.Tool("t")], "each once"),
        ([frames.Tool("a b")], "must be ids"),
        ([frames.Tool("t", input_schema={"maximum": 2**70})], "integer beyond 64 bit at $.tools[0]"),
    ],
)
async def test_a_bad_catalogue_is_a_bad_frame(
    bridge: Bridge, user: UserId, tools: list[frames.Tool], reason: str
) -> None:
    """By the rules of the hello; the last good one stays."""
    peer = await bridge.machine(user)
    await peer.send(frames.Tools(tools=tools))
    code, told = await peer.closed()
    assert code == 4501
    assert told is not None
    assert reason in told
    assert await bridge.held(user).tools() == {"echo": "h", "fill_form": "u"}


async def test_a_machine_without_tools_costs_no_more_than_another(bridge: Bridge, user: UserId) -> None:
    """Its catalogue is not asked for again and again."""
    peer = await bridge.machine(user, tools=[])
    before = await bridge.script_calls()
    for _ in range(5):
        await bridge.fence(user, peer)
    assert await bridge.script_calls() - before < 5


async def test_goodbye_takes_presence_away_and_a_lost_socket_does_not(bridge: Bridge, user: UserId) -> None:
    """Without a word the machine counts as reconnecting."""
    peer = await bridge.machine(user)
    peer.break_off()
    await eventually(lambda: _is_reconnecting(bridge, user))
    seen = await bridge.jobs.ask(user, "echo")
    assert state_of(seen, 1e9, keys.Timing(10)) == "reconnecting"
    peer = await bridge.machine(user)
    assert (await bridge.held(user).presence())["state"] == "online"
    async with bridge.counts_close("goodbye"):
        await peer.goodbye()
        await eventually(lambda: _is_absent(bridge, user))
    assert await bridge.held(user).exist() == {"epoch"}


async def _is_reconnecting(bridge: Bridge, user: UserId) -> bool:
    return (await bridge.held(user).presence()).get("state") == "reconnecting"


async def test_many_users_at_once_each_get_their_own_jobs(bridge: Bridge) -> None:
    """Thirty machines with ten jobs each on one worker: every one once, to the right machine."""
    users = [new_user() for _ in range(30)]
    peers = await asyncio.gather(*(bridge.machine(user) for user in users))

    async def work(user: UserId, number: int) -> None:
        peer = peers[number]
        records = [
            await bridge.submit(user, hinted=n % 3 != 0, name="echo" if n % 3 else "fill_form") for n in range(10)
        ]
        for _ in records:
            await peer.answer(await peer.next(frames.Job, within_s=30), f'"{user}"')
        for record in records:
            assert (await bridge.ended(record.job, within_s=30)).outcome == f'{{"result":"{user}"}}'
        assert sorted(peer.jobs()) == sorted(JobId(record.job) for record in records)

    await asyncio.gather(*(work(user, number) for number, user in enumerate(users)))
