"""Results: every way in which a machine may answer, and what becomes of it."""

import json

import pytest
from bridge import Bridge, Peer
from job_stores import accepted, new_user
from support import eventually

from common.ids import UserId
from common.store.records import Record
from towline.wire import frames

# A well-formed id that no frame and no job has.
NOBODYS = "01a2296d-eb11-73b1-bd02-58d2eb233670"


async def deliver(bridge: Bridge, user: UserId, peer: Peer, *, hinted: bool = True) -> tuple[Record, frames.Job]:
    """A job of the user, at the machine."""
    record = await bridge.submit(user, hinted=hinted, name="echo" if hinted else "fill_form")
    job = await peer.next(frames.Job)
    assert job.job == record.job
    return record, job


@pytest.mark.parametrize(
    ("members", "state", "outcome"),
    [
        ('"outcome":"completed","result":{"a":  1.0, "b":"ü"}', "completed", '{"result":{"a":  1.0, "b":"ü"}}'),
        ('"outcome":"completed"', "completed", '{"result":null}'),
        ('"outcome":"completed","result":null', "completed", '{"result":null}'),
        (
            '"outcome":"failed","error":{"code":"not-found","message":"no such page","retryable":true}',
            "failed",
            '{"error":{"code":"not-found","message":"no such page","retryable":true}}',
        ),
        (
            '"outcome":"failed"',
            "failed",
            '{"error":{"code":"failed","message":"the machine gave no reason","retryable":false}}',
        ),
        (
            '"outcome":"unknown","error":{"code":"cut-off"}',
            "unknown",
            '{"error":{"code":"cut-off","message":"","retryable":false}}',
        ),
        ('"outcome":"completed","result":"a\\u0000b"', "completed", '{"result":"a\ufffdb","mended":true}'),
        ('"outcome":"completed","result":["\\ud800"]', "completed", '{"result":["\ufffd"],"mended":true}'),
        (
            '"outcome":"failed","error":{"code":"x","message":"a\\u0000b"}',
            "failed",
            '{"error":{"code":"x","message":"a\ufffdb","retryable":false},"mended":true}',
        ),
        ('"outcome":"completed","result":"x","mended":true', "completed", '{"result":"x","mended":true}'),
        ('"outcome":"completed","result":"x","novelty":{"y":[]}', "completed", '{"result":"x"}'),
    ],
)
async def test_an_answer_is_the_outcome(bridge: Bridge, user: UserId, members: str, state: str, outcome: str) -> None:
    """In the machine's own bytes, mended where nobody could read them."""
    peer = await bridge.machine(user)
    record, job = await deliver(bridge, user, peer)
    await peer.send(f'{{"type":"job_result","id":"{job.id}",{members}}}')
    ended = await bridge.ended(record.job)
    assert (ended.state, ended.outcome) == (state, outcome)


@pytest.mark.parametrize(
    "result",
    ["NaN", "[Infinity]", '{"a":1e999}', "[18446744073709551616]", "[" * 70 + "]" * 70, "[" * 5000 + "]" * 5000],
    ids=["nan", "infinity", "float", "integer", "nested", "nested-deep"],
)
async def test_a_result_that_cannot_be_carried_fails_by_name(bridge: Bridge, user: UserId, result: str) -> None:
    """The job, not the socket: the next one is answered over it."""
    peer = await bridge.machine(user)
    record, job = await deliver(bridge, user, peer)
    await peer.send(f'{{"type":"job_result","id":"{job.id}","outcome":"completed","result":{result}}}')
    ended = await bridge.ended(record.job)
    assert ended.state == "failed"
    assert json.loads(ended.outcome or "")["error"]["code"] == "result-unusable"
    record, job = await deliver(bridge, user, peer)
    await peer.answer(job)
    assert (await bridge.ended(record.job)).state == "completed"


async def test_a_result_of_a_mebibyte_is_carried_and_a_larger_one_fails_by_name(bridge: Bridge, user: UserId) -> None:
    """To the byte; the socket stays."""
    peer = await bridge.machine(user)
    for size, state in ((frames.RESULT_BYTES_MAX, "completed"), (frames.RESULT_BYTES_MAX + 1, "failed")):
        record, job = await deliver(bridge, user, peer)
        await peer.answer(job, f'"{"x" * (size - 2)}"')
        ended = await bridge.ended(record.job)
        assert ended.state == state
        if state == "failed":
            assert '"result-too-large"' in (ended.outcome or "")
            assert f"{size} bytes" in (ended.outcome or "")


async def test_a_result_that_outgrows_the_limit_by_mending_fails_by_name(bridge: Bridge, user: UserId) -> None:
    """Numbers are written anew at their full length."""
    peer = await bridge.machine(user)
    record, job = await deliver(bridge, user, peer)
    await peer.answer(job, f'["\\u0000",{",".join(["1e15"] * 100_000)}]')
    ended = await bridge.ended(record.job)
    assert (ended.state, '"result-too-large"' in (ended.outcome or "")) == ("failed", True)


async def test_a_long_reason_is_cut(bridge: Bridge, user: UserId) -> None:
    """A stack trace of a megabyte is nobody's outcome."""
    peer = await bridge.machine(user)
    record, job = await deliver(bridge, user, peer)
    failure = frames.Failure("x" * 5000, "ü" * 400_000)
    await peer.send(frames.JobResult(outcome="failed", id=job.id, error=failure))
    ended = await bridge.ended(record.job)
    assert len(ended.outcome or "") < 5000


async def test_the_first_result_counts_and_a_second_changes_nothing(brisk_bridge: Bridge, user: UserId) -> None:
    """Under the same frame, and by job id; each one that names the job is acknowledged."""
    bridge = brisk_bridge
    peer = await bridge.machine(user)
    record, job = await deliver(bridge, user, peer)
    await peer.answer(job, '"first"')
    await peer.acknowledgement(record.job)
    await peer.answer(job, '"second"')
    await peer.send(f'{{"type":"job_result","job":"{record.job}","outcome":"failed"}}')
    await eventually(lambda: peer.acknowledged() == [record.job, record.job])
    ended = await bridge.record(record.job)
    assert (ended.state, ended.outcome) == ("completed", '{"result":"first"}')


async def test_a_stored_outcome_is_taken_unasked(brisk_bridge: Bridge, user: UserId) -> None:
    """Also of a job that this session never saw; it ends it, and its entry goes."""
    bridge = brisk_bridge
    peer = await bridge.machine(user)
    record = await accepted(bridge.requests, user)
    await peer.send(f'{{"type":"job_result","job":"{record.job}","outcome":"completed","result":5,"replayed":true}}')
    await peer.acknowledgement(record.job)
    assert (await bridge.record(record.job)).outcome == '{"result":5}'


async def test_an_outcome_for_another_users_job_is_ignored(brisk_bridge: Bridge, user: UserId) -> None:
    """By job id, in whatever way; the owner's machine answers as ever."""
    bridge = brisk_bridge
    owner = new_user()
    owners_peer, liar = await bridge.machine(owner), await bridge.machine(user)
    record, job = await deliver(bridge, owner, owners_peer)
    for said in (f'"job":"{record.job}"', f'"id":"{job.id}"', f'"id":"{job.id}","job":"{record.job}"'):
        await liar.send(f'{{"type":"job_result",{said},"outcome":"completed","result":"a lie"}}')
    # What the liar says of its own afterwards is heard, so the lies were read.
    own, own_job = await deliver(bridge, user, liar)
    await liar.answer(own_job)
    await liar.acknowledgement(own.job)
    assert liar.acknowledged() == [own.job]
    assert not (await bridge.record(record.job)).terminal
    await owners_peer.answer(job, '"the truth"')
    assert (await bridge.ended(record.job)).outcome == '{"result":"the truth"}'


async def test_a_machine_that_claims_to_run_another_users_job_changes_nothing(
    brisk_bridge: Bridge, user: UserId
) -> None:
    """Its hello keeps the job from nobody, its answer does not end it, and it is not the one that is told to stop."""
    bridge = brisk_bridge
    owner = new_user()
    record = await bridge.submit(owner, hinted=False, name="fill_form")
    liar = await bridge.machine(user, running=[record.job])
    owners_peer = await bridge.machine(owner)
    job = await owners_peer.next(frames.Job)
    assert (job.job, job.attempt) == (record.job, 1)
    await bridge.jobs.ask_to_stop(record.job, record.user)
    assert (await owners_peer.next(frames.JobCancel)).id == job.id
    await liar.send(f'{{"type":"job_result","job":"{record.job}","outcome":"completed","result":"a lie"}}')
    # What the liar says of its own afterwards is heard, so the lie was read.
    own, own_job = await deliver(bridge, user, liar)
    await liar.answer(own_job)
    await liar.acknowledgement(own.job)
    assert liar.acknowledged() == [own.job]
    assert not any(isinstance(frame, frames.JobCancel) for frame in liar.received)
    assert not (await bridge.record(record.job)).terminal
    await owners_peer.answer(job, '"the truth"')
    assert (await bridge.ended(record.job)).outcome == '{"result":"the truth"}'


@pytest.mark.parametrize(
    "said",
    [f'"id":"{NOBODYS}"', f'"job":"{NOBODYS}"', '"id":"nonsense"', '"job":"nonsense"', '"job":"\\u0000"', '"id":""'],
)
async def test_a_result_of_nothing_is_ignored(brisk_bridge: Bridge, user: UserId, said: str) -> None:
    """Unknown frames and jobs, and ids that are none; the session goes on."""
    bridge = brisk_bridge
    peer = await bridge.machine(user)
    await peer.send(f'{{"type":"job_result",{said},"outcome":"completed","result":1}}')
    record, job = await deliver(bridge, user, peer)
    await peer.answer(job)
    await peer.acknowledgement(record.job)
    assert peer.acknowledged() == [record.job]


async def test_a_result_under_a_frame_of_an_older_socket_is_not_taken(bridge: Bridge, user: UserId) -> None:
    """Frame ids are of one session; the job comes again under a new one."""
    token = await bridge.token(user)
    peer = await bridge.machine(user, token=token)
    record, old = await deliver(bridge, user, peer)
    peer.break_off()
    peer = await bridge.machine(user, token=token)
    job = await peer.next(frames.Job)
    await peer.answer(old, '"old"')
    await bridge.fence(user, peer)
    assert not (await bridge.record(record.job)).terminal
    await peer.answer(job, '"new"')
    assert (await bridge.ended(record.job)).outcome == '{"result":"new"}'


async def test_a_busy_lane_takes_nothing_until_its_tool_has_returned(bridge: Bridge, user: UserId) -> None:
    """The job has ended at once; the second answer under the same frame frees the place."""
    peer = await bridge.machine(user)
    record, job = await deliver(bridge, user, peer, hinted=False)
    await peer.send(frames.JobResult(outcome="unknown", id=job.id, lane_busy=True))
    assert (await bridge.ended(record.job)).state == "unknown"
    waiting = await bridge.submit(user)
    await bridge.fence(user, peer)
    await eventually(lambda: _has_entry(bridge, user, waiting))
    await bridge.fence(user, peer)
    assert peer.jobs() == [record.job]
    await peer.send(frames.JobResult(outcome="unknown", id=job.id))
    assert (await peer.next(frames.Job)).job == waiting.job


async def _has_entry(bridge: Bridge, user: UserId, record: Record) -> bool:
    return await bridge.held(user).entries() == [record.job]


async def test_acknowledgements_are_gathered(bridge: Bridge, user: UserId) -> None:
    """Nothing waits for one, so 32 share a frame, long before the next heartbeat."""
    peer = await bridge.machine(user)
    records = [await bridge.submit(user) for _ in range(40)]
    for record in records:
        job = await peer.next(frames.Job)
        assert job.job == record.job
        await peer.answer(job)
    acknowledgement = await peer.next(frames.JobResultAck, within_s=5)
    assert len(acknowledgement.jobs) == 32
    assert set(acknowledgement.jobs) < {record.job for record in records}
