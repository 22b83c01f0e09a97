"""Hand-overs that were lost are mended by the worker itself, long before a heartbeat: here that is a minute away."""

from pathlib import Path

from bridge import Bridge, open_bridge
from job_stores import accepted, new_user
from support import eventually

from common.ids import new_id
from common.store import keys
from harness.faults import TcpProxy
from towline.wire import frames
from worker.sweeper import ENDED_FROM_S, REQUEUED_TOGETHER

# The sweep that puts young jobs back (2 s old, every 2 s), and what the machine may take.
MENDED_WITHIN_S = 7.0
# A quiet read of the control stream ends after 5 s, and then the worker looks whether Redis began anew.
SEEN_WITHIN_S = 8.0
# The first sweep of a worker that has just started.
SWEPT_WITHIN_S = 10.0


async def test_a_job_whose_gateway_died_before_it_was_enqueued_runs_once(quiet_bridge: Bridge) -> None:
    """The record is committed, and Redis never heard of the job: no entry, no waiter, no note to the worker."""
    user = new_user()
    peer = await quiet_bridge.machine(user)
    record = await accepted(quiet_bridge.requests, user, hinted=False, name="fill_form")
    assert await quiet_bridge.held(user).entries() == []

    async with quiet_bridge.counts('towline_job_redeliveries_total{reason="requeued"}'):
        job = await peer.next(frames.Job, within_s=MENDED_WITHIN_S)
    assert job.job == record.job
    await peer.answer(job)

    ended = await quiet_bridge.ended(record.job)
    assert (ended.state, ended.attempts) == ("completed", 1)
    await quiet_bridge.fence(user, peer)
    assert peer.jobs() == [record.job]
    assert await quiet_bridge.held(user).entries() == []


async def test_more_lost_jobs_than_are_put_back_together_all_come_once(quiet_bridge: Bridge) -> None:
    """Each with its arguments in memory: after a loss of Redis they are not all read at once."""
    user = new_user()
    peer = await quiet_bridge.machine(user)
    lost = [await accepted(quiet_bridge.requests, user) for _ in range(2 * REQUEUED_TOGETHER + 1)]
    for _ in lost:
        await peer.answer(await peer.next(frames.Job, within_s=MENDED_WITHIN_S))
    ends = [await quiet_bridge.ended(record.job) for record in lost]
    assert {(end.state, end.attempts) for end in ends} == {("completed", 1)}
    await quiet_bridge.fence(user, peer)
    assert sorted(peer.jobs()) == sorted(record.job for record in lost)
    counts = [line["count"] for line in quiet_bridge.logged("jobs_requeued")]
    assert (sum(counts), max(counts) <= REQUEUED_TOGETHER) == (len(lost), True)
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


async def test_a_settle_that_was_lost_is_made_good_though_the_machine_stays_away(
    state_directory: Path, postgres_url: str, redis_url: str
) -> None:
    """The outcome is durable, and Redis never hears of it: the worker loses Redis, then its life."""
    proxy = TcpProxy(redis_url)
    await proxy.start()
    try:
        async with open_bridge(
            state_directory / f"bridge-{new_id()}",
            postgres_url=postgres_url,
            redis_url=redis_url,
            heartbeat_s=60,
            env={"REDIS_URL": proxy.url},
        ) as bridge:
            user = new_user()
            peer = await bridge.machine(user)
            record = await bridge.submit(user)
            job = await peer.next(frames.Job)
            proxy.refuse()
            proxy.cut()
            await peer.answer(job)
            assert (await bridge.ended(record.job)).state == "completed"
            bridge.worker.kill()
            peer.break_off()
            await proxy.heal()
            held = bridge.held(user)
            assert await held.entries() == [record.job]

            async def is_due() -> bool:
                ends = await bridge.requests.ended_jobs(
                    older_than_s=ENDED_FROM_S, younger_than_s=60, after=None, limit=1000
                )
                return record.job in [end.job for end in ends]

            await eventually(is_due)
            await bridge.worker.start_ready()

            async def is_settled() -> bool:
                return await held.entries() == []

            await eventually(is_settled, SWEPT_WITHIN_S)
            assert set(await held.index()) <= {"bytes"}
            assert await held.pending() == 0
            assert (await bridge.jobs.ask(user, "echo")).bytes == 0

            # A fail-over brings it back: connections break, and the replica had not heard of the settle either.
            await bridge.client.delete(keys.result(record.job))
            assert await bridge.jobs.enqueue(record, "{}", None)
            proxy.cut()
            await eventually(is_settled, SWEPT_WITHIN_S)
    finally:
        await proxy.stop()
