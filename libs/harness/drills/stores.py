"""Drills of the stores: restarted, losing everything, and standing still, each with jobs under way."""

import asyncio
import time

from harness.drills.caller import ANSWERS_WITHIN_S
from harness.drills.load import expect_load_done, steady_load
from harness.drills.scene import Scene
from harness.drills.target import Store

# Every loop is back at work so long after its store is.
RECOVERS_WITHIN_S = 10.0

# Enough that every process is in the middle of something when a store stops answering.
LOAD_USERS = 5
LOAD_JOBS_PER_S = 5
# A statement on its way to a server that stands still is given up after twenty seconds, and the next one waits for it.
SAYS_NO_WITHIN_S = 60.0

EVENT_RUNS = 4
EVENT_SOURCES = 2
EVENTS_AWAY_S = 3.0
# The load goes on so long before a store stands still and after it has gone on.
QUIET_S = 0.5


async def redis_restart(scene: Scene) -> None:
    """Redis goes away with one job running and one queued behind it, and comes back with what it had."""
    machine = await scene.new_machine()
    user = machine.user
    running = scene.submit(user, "work", "running", held=True)
    await scene.began(running)
    behind = scene.submit(user, "work", "behind")
    await scene.eventually("the second job is durable", lambda: _is_durable(scene, user, "behind"))
    process = await scene.evidence.redis_process()
    async with scene.nobody_told_offline(user):
        scene.say("one job runs, one is queued behind it; stopping Redis")
        await scene.target.redis.stop()
        await _expect_closed_door(scene, user)
        late = scene.submit(user, "work", "while-away")
        await scene.let_go(running)
        scene.say("the tool has ended meanwhile; starting Redis")
        await scene.target.redis.start()
        back_at = time.monotonic()
        answers = await asyncio.gather(running.caller, behind.caller, late.caller)
        last_at = max(answer.at for answer in answers)
        scene.say(f"all three are answered {last_at - back_at:.2f} s after Redis was back")
        scene.recovered("Redis restarted", back_at, last_at, within_s=RECOVERS_WITHIN_S)

        async def is_another() -> bool:
            return await scene.evidence.redis_process() != process

        await scene.eventually("another process of Redis", is_another)
        for job in (running, behind, late):
            await scene.expect(job, "completed", executions=1, deliveries=1, attempts=1)


async def redis_restart_under_events(scene: Scene) -> None:
    """Redis goes away while runs flow; what their upstreams say meanwhile waits, and comes in order afterwards."""
    runs = [await scene.streams.follow(EVENT_SOURCES) for _ in range(EVENT_RUNS)]
    for number, run in enumerate(runs):
        for gateway in range(len(scene.target.gateways)):
            scene.streams.watch(run, first=gateway + number)
    await asyncio.gather(*(scene.streams.flows(run) for run in runs))
    process = await scene.evidence.redis_process()
    before = [await scene.streams.said(run) for run in runs]
    scene.say(f"{EVENT_RUNS} runs of {EVENT_SOURCES} sources flow; stopping Redis")
    await scene.target.redis.stop()
    await asyncio.sleep(EVENTS_AWAY_S)
    meanwhile = sum(
        now[source] - then[source]
        for then, now in zip(before, [await scene.streams.said(run) for run in runs], strict=True)
        for source in now
    )
    scene.check("events said meanwhile", "> 0", meanwhile, is_met=meanwhile > 0)
    scene.say(f"{meanwhile} events were said meanwhile; starting Redis")
    await scene.target.redis.start()
    back_at = time.monotonic()
    good_at = max(await asyncio.gather(*(scene.streams.flows(run, after=back_at) for run in runs)))
    scene.say(f"all watchers see events again {good_at - back_at:.2f} s after Redis was back")
    scene.recovered("Redis restarted under events", back_at, good_at, within_s=RECOVERS_WITHIN_S)

    async def is_another() -> bool:
        return await scene.evidence.redis_process() != process

    await scene.eventually("another process of Redis", is_another)
    await scene.streams.end(*runs)
    await scene.streams.expect(*runs)


async def redis_flush(scene: Scene) -> None:
    """Redis loses everything with one job running and one queued behind it."""
    machine = await scene.new_machine()
    user = machine.user
    running = scene.submit(user, "work", "running", held=True)
    await scene.began(running)
    behind = scene.submit(user, "work", "behind")

    async def is_queued() -> bool:
        return (await scene.evidence.left(user)).entries == 2

    await scene.eventually("both jobs are in Redis", is_queued)
    born = await scene.evidence.born()
    async with scene.nobody_told_offline(user):
        scene.say("one job runs, one is queued behind it; flushing Redis")
        cut_at = time.monotonic()
        await scene.target.redis.flush()

        async def is_asserted() -> bool:
            return bool(await scene.evidence.presence(user))

        await scene.eventually("presence is asserted again", is_asserted)
        scene.say(f"presence is back after {time.monotonic() - cut_at:.2f} s")
        scene.check("a new bridge:born", True, await scene.evidence.born() not in ("", born))
        await scene.let_go(running)
        answers = await asyncio.gather(running.caller, behind.caller)
        last_at = max(answer.at for answer in answers)
        scene.say(f"both jobs are answered {last_at - cut_at:.2f} s after the flush")
        scene.recovered("Redis flushed", cut_at, last_at, within_s=RECOVERS_WITHIN_S)
        for job in (running, behind):
            await scene.expect(job, "completed", executions=1, deliveries=1, attempts=1)


async def postgres_restart(scene: Scene) -> None:
    """Postgres goes away while a tool runs, so that its outcome cannot be made durable, and comes back."""
    machine = await scene.new_machine()
    user = machine.user
    running = scene.submit(user, "work", "running", held=True)
    await scene.began(running)
    worker = await scene.holder(user)
    before = await scene.evidence.presence(user)
    job = (await scene.record(running)).job
    async with scene.nobody_told_offline(user):
        scene.say("a tool runs; stopping Postgres")
        await scene.target.postgres.stop()
        async with asyncio.TaskGroup() as group:
            # A gateway gives its store five seconds before it says no.
            group.create_task(_expect_closed_door(scene, user))
            await scene.let_go(running)
            # Likewise a worker, before it tries again.
            await scene.logged(worker, "store_awaited", call="finish", job=job)
            scene.say(f"the tool has ended, its outcome waits in {worker.name}")
        scene.check("the caller is told before it is durable", False, running.caller.done())
        scene.say("no gateway takes a job; starting Postgres")
        late = scene.submit(user, "work", "while-away")
        await scene.target.postgres.start()
        back_at = time.monotonic()
        answers = await asyncio.gather(running.caller, late.caller)
        last_at = max(answer.at for answer in answers)
        scene.say(f"both jobs are answered {last_at - back_at:.2f} s after Postgres was back")
        scene.recovered("Postgres restarted", back_at, last_at, within_s=RECOVERS_WITHIN_S)
        for asked in (running, late):
            await scene.expect(asked, "completed", executions=1, deliveries=1, attempts=1)
        now = await scene.evidence.presence(user)
        scene.check("the machine's session", before["session"], now["session"])


async def redis_freeze(scene: Scene) -> None:
    """Redis stands still under load (SIGSTOP): no connection breaks, nothing is answered; then it goes on."""
    await _stands_still(scene, "Redis", scene.target.redis)


async def postgres_freeze(scene: Scene) -> None:
    """Postgres stands still under load (SIGSTOP): no connection breaks, nothing is answered; then it goes on."""
    await _stands_still(scene, "Postgres", scene.target.postgres)


async def _stands_still(scene: Scene, name: str, store: Store) -> None:
    users = [machine.user for machine in await scene.new_machines(LOAD_USERS)]
    scene.say(f"{LOAD_USERS} users' machines are connected; {LOAD_JOBS_PER_S} jobs a second from now on")
    async with scene.nobody_told_offline(users[0]):
        async with steady_load(scene, users, jobs_per_s=LOAD_JOBS_PER_S) as jobs:
            await asyncio.sleep(QUIET_S)
            scene.say(f"freezing {name} (SIGSTOP)")
            cut_at = time.monotonic()
            await store.freeze()
            await _expect_closed_door(scene, users[0], within_s=SAYS_NO_WITHIN_S)
            scene.say(f"no gateway takes a job, {time.monotonic() - cut_at:.1f} s after the freeze; {name} goes on")
            met = [job for job in jobs if not job.caller.done()]
            back_at = time.monotonic()
            await store.thaw()
            await asyncio.sleep(QUIET_S)
        last_at = max(job.caller.result().at for job in met)
        scene.say(f"the {len(met)} jobs that it met are answered {last_at - back_at:.2f} s after {name} went on")
        scene.recovered(f"{name} stood still", back_at, last_at, within_s=RECOVERS_WITHIN_S)
        await _expect_all_ended(scene, users[0])
        refusals = await expect_load_done(scene, users, jobs)
        others = sorted(set(refusals) - {"503 store-unavailable"})
        scene.check("refusals but `store-unavailable`", [], others)


async def _expect_all_ended(scene: Scene, user: str) -> None:
    """What was answered 503 may have been recorded as the store went on; then it comes to its end like any other."""

    async def have_ended() -> bool:
        return all(row.ended_ms is not None for row in await scene.evidence.records(user))

    await scene.eventually("every record has ended", have_ended)


async def _is_durable(scene: Scene, user: str, key: str) -> bool:
    return any(row.key == key for row in await scene.evidence.records(user))


async def _expect_closed_door(scene: Scene, user: str, *, within_s: float = ANSWERS_WITHIN_S) -> None:
    if scene.target.cluster:
        # There a store that is stopped is as silent as one that stands still: nobody has its address who would refuse.
        within_s = SAYS_NO_WITHIN_S
    body = {"name": "look", "args": {"mark": "refused"}}
    gateways = list(scene.target.gateways)
    asks = [scene.caller.ask_once(user, body, "refused", at=n, within_s=within_s) for n in range(len(gateways))]
    answers = await asyncio.gather(*asks)
    for gateway, answer in zip(gateways, answers, strict=True):
        scene.check(f"{gateway.name}: a new job", ("503 store-unavailable",), answer.refusals)
