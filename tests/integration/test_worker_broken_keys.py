"""What is broken in one user's keys costs nobody else anything: no machine its socket, no job its sweep."""

import json
from collections.abc import Mapping

import pytest
from bridge import Bridge
from job_stores import accepted, new_user
from support import eventually

from common.ids import UserId, WorkerId, new_id
from common.store import keys
from common.store.control import tell_worker
from towline.wire import frames
from worker.delivery import AHEAD_MAX


def log_of(bridge: Bridge, event: str, user: UserId) -> list[dict[str, str]]:
    """Lines of the worker's log about a user."""
    lines = [json.loads(line) for line in bridge.worker.read_log().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event and line.get("user") == user]


def body(**members: object) -> str:
    """An entry's body, but for what `members` say."""
    sound = {"job": new_id(), "key": "k", "name": "echo", "args": {}, "timeout_s": 1, "hinted": True}
    return json.dumps({**sound, "accepted_ms": 1_000, "deadline_ms": 2_000, **members})


UNREADABLE: list[Mapping[str | bytes, str | bytes]] = [
    {"job": "x"},
    {"job": "x", "body": ""},
    {"job": "x", "body": '{"job":"x"}'},
    {"job": "x", "body": body(job="no id")},
    {"job": "x", "body": body(deadline_ms=10**17)},
    {"job": "x", "body": body(args="?").replace('"?"', "[" * 500_000 + "]" * 500_000)},  # too deep for every Python
    {"job": "x", "body": body(args="?").encode().replace(b"?", b"\xff")},
]


@pytest.mark.parametrize("connected", [True, False])
async def test_entries_that_cannot_be_read_are_removed(bridge: Bridge, user: UserId, connected: bool) -> None:
    """More of them than a session has places, taken or claimed: what is behind them is delivered at once."""
    bystander = await bridge.machine(new_user())
    if connected:
        peer = await bridge.machine(user)
    for number in range(2 * AHEAD_MAX):
        await bridge.client.xadd(keys.jobs(user), dict(UNREADABLE[number % len(UNREADABLE)]))
    record = await bridge.submit(user)
    if not connected:
        peer = await bridge.machine(user)
    job = await peer.next(frames.Job, within_s=5)
    assert job.job == record.job
    await peer.answer(job)
    assert (await bridge.ended(record.job)).state == "completed"
    held = bridge.held(user)
    await eventually(lambda: _is_empty(bridge, user))
    assert (await held.index(), await held.pending()) == ({"bytes": "0"}, 0)
    assert len({line["entry"] for line in log_of(bridge, "entry_unreadable", user)}) == 2 * AHEAD_MAX
    assert bystander.socket.close_code is None


async def _is_empty(bridge: Bridge, user: UserId) -> bool:
    return await bridge.held(user).entries() == []


async def test_a_job_whose_entry_was_spoilt_is_put_back(bridge: Bridge, user: UserId) -> None:
    """The entry goes out of the index, so the sweeper sees that the job is missing."""
    record = await accepted(bridge.requests, user)
    entry = await bridge.client.xadd(keys.jobs(user), {"job": record.job, "body": "{"})
    await bridge.client.hset(keys.jobs_index(user), mapping={record.job: f"{entry} 37", "bytes": "37"})
    peer = await bridge.machine(user)
    job = await peer.next(frames.Job, within_s=15)
    assert job.job == record.job
    await peer.answer(job)
    await eventually(lambda: _is_empty(bridge, user))
    assert await bridge.held(user).index() == {"bytes": "0"}


async def test_a_user_whose_keys_are_broken_does_not_stop_the_sweep(bridge: Bridge, user: UserId) -> None:
    """Neither what is to be put back nor what is to be settled: another user's jobs are, and the worker serves on."""
    other = new_user()
    peer = await bridge.machine(other)
    await bridge.client.set(keys.jobs(user), "no stream")
    try:
        for one in (user, other):
            await accepted(bridge.requests, one, deadline_s=5)
        job = await peer.next(frames.Job, within_s=15)  # nobody enqueued it but the sweeper
        await peer.answer(job)
        assert log_of(bridge, "user_passed_over", user)
        late = [await bridge.submit(other, hinted=False, name="fill_form", deadline_s=1) for _ in range(2)]
        await peer.next(frames.Job)  # not answered: the other one's deadline passes behind it
        assert (await bridge.ended(late[1].job)).state == "expired"
        await eventually(lambda: log_of(bridge, "job_unsettled", user))
        assert peer.socket.close_code is None
        worker = WorkerId((await bridge.held(other).presence())["worker"])
        await tell_worker(bridge.redis, worker, {"note": "work", "user": other})
        await bridge.fence(other, peer)
    finally:
        await bridge.client.delete(keys.jobs(user))
