"""Hand-overs that were lost are mended by the worker itself, long before a heartbeat: here that is a minute away."""

from bridge import Bridge
from job_stores import accepted, new_user
from support import eventually

from towline.wire import frames

# The sweep that puts young jobs back (2 s old, every 2 s), and what the machine may take.
MENDED_WITHIN_S = 7.0
# A quiet read of the control stream ends after 5 s, and then the worker looks whether Redis began anew.
SEEN_WITHIN_S = 8.0


async def test_a_job_whose_gateway_died_before_it_was_enqueued_runs_once(quiet_bridge: Bridge) -> None:
    """The record is committed, and Redis never heard of the job: no entry, no waiter, no note to the worker."""
    user = new_user()
    peer = await quiet_bridge.machine(user)
    record = await accepted(quiet_bridge.requests, user, hinted=False, name="fill_form")
    assert await quiet_bridge.held(user).entries() == []

    job = await peer.next(frames.Job, within_s=MENDED_WITHIN_S)
    assert job.job == record.job
    await peer.answer(job)

    ended = await quiet_bridge.ended(record.job)
    assert (ended.state, ended.attempts) == ("completed", 1)
    await quiet_bridge.fence(user, peer)
    assert peer.jobs() == [record.job]
    assert await quiet_bridge.held(user).entries() == []


async def test_a_flush_is_noticed_long_before_the_heartbeat(quiet_bridge: Bridge) -> None:
    """Nothing breaks in a flush: no connection is lost, and an idle machine has nothing to be told of."""
    user = new_user()
    peer = await quiet_bridge.machine(user)
    held = quiet_bridge.held(user)
    assert (await held.presence())["state"] == "online"
    await quiet_bridge.client.flushdb()
    assert await held.presence() == {}

    await eventually(held.presence, SEEN_WITHIN_S)
    record = await quiet_bridge.submit(user)
    job = await peer.next(frames.Job)
    await peer.answer(job)
    assert (await quiet_bridge.ended(record.job)).state == "completed"
    assert peer.jobs() == [record.job]
