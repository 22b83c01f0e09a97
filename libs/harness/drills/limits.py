"""Drills of the limits: a job that kills whoever takes it, a full queue, a deadline."""

import asyncio
import time

from harness.drills.scene import Asked, Scene
from harness.drills.target import Machine

# Stated here, not imported: this is what is promised.
QUEUE_ENTRIES_MAX = 500
BEGIN_MARKS_MAX = 5
# Submissions under way at a time: enough to be quick, few enough to leave the machine to the others.
SUBMITTERS = 16
# Five hundred jobs with side effects, each with a begin mark and two synced writes of its own.
QUEUE_DRAINS_WITHIN_S = 90.0
# A sweeper looks every two seconds.
TOLD_WITHIN_S = 4.0
DEADLINE_S = 1.0
# Ends after the deadline has passed and a sweeper has looked.
LATE_TOOL_S = DEADLINE_S + TOLD_WITHIN_S - 0.5


async def poison(scene: Scene) -> None:
    """A job kills the sidecar each time it is delivered; a supervisor starts that again each time."""
    looking, acting = await scene.new_machines(2)
    async with asyncio.TaskGroup() as group:
        group.create_task(_hinted_poison(scene, looking))
        group.create_task(_unhinted_poison(scene, acting))


async def _hinted_poison(scene: Scene, machine: Machine) -> None:
    job = scene.submit(machine.user, "crash_looking", "poison")
    behind = scene.submit(machine.user, "work", "behind")
    deaths = await _supervise(scene, machine, job)
    scene.say(f"hinted: the job killed the sidecar {deaths} times, then it was given up")
    # The first delivery of a hinted job is not marked; five marks follow.
    deliveries = 1 + BEGIN_MARKS_MAX
    scene.check("hinted: sidecars killed", deliveries, deaths)
    await scene.expect(
        job, "failed", executions=deliveries, deliveries=deliveries, attempts=BEGIN_MARKS_MAX, code="undeliverable"
    )
    await scene.expect(behind, "completed", executions=1, deliveries=1)


async def _unhinted_poison(scene: Scene, machine: Machine) -> None:
    job = scene.submit(machine.user, "crash", "poison")
    behind = scene.submit(machine.user, "work", "behind")
    deaths = await _supervise(scene, machine, job)
    scene.say(f"not hinted: the job killed the sidecar {deaths} time, then the journal knew of it")
    scene.check("not hinted: sidecars killed", 1, deaths)
    await scene.expect(job, "unknown", executions=1, deliveries=2, attempts=2, code="interrupted")
    await scene.expect(behind, "completed", executions=1, deliveries=1)


async def _supervise(scene: Scene, machine: Machine, job: Asked) -> int:
    """Start the sidecar again whenever it was killed, until the job has its answer; returns how often it was."""
    deaths = 0

    async def has_ended() -> bool:
        nonlocal deaths
        if not await machine.is_running():
            await machine.killed(within_s=1)
            deaths += 1
            await machine.start(connected=False)
        return job.caller.done()

    await scene.eventually(f"the poison of {machine.name} has ended", has_ended, within_s=60)
    return deaths


async def queue_full(scene: Scene) -> None:
    """Jobs are kept for a machine that is away, until there is no more room; then it comes."""
    user = scene.new_user()
    keys = [f"kept-{n}" for n in range(QUEUE_ENTRIES_MAX)]
    turns = asyncio.Semaphore(SUBMITTERS)

    async def keep(n: int, key: str) -> str:
        body = {"name": "work", "args": {"mark": key}, "if_offline": "queue"}
        async with turns:
            answer = await scene.caller.submit(user, body, key, wait=False, first=n)
        return "refused" if answer.job is None else answer.job.state

    states = await asyncio.gather(*(keep(n, key) for n, key in enumerate(keys)))
    scene.say(f"{states.count('queued')} jobs are kept for a machine that is away")
    scene.check("jobs kept", QUEUE_ENTRIES_MAX, states.count("queued"))
    over = {"name": "work", "args": {"mark": "over"}, "if_offline": "queue"}
    for n, gateway in enumerate(scene.target.gateways):
        answer = await scene.caller.ask_once(user, over, "over", at=n)
        scene.check(f"{gateway.name}: one more", ("429 queue-full",), answer.refusals)
    scene.check("entries in the stream", QUEUE_ENTRIES_MAX, (await scene.evidence.left(user)).entries)
    scene.check("records", QUEUE_ENTRIES_MAX, len(await scene.evidence.records(user)))
    came_at = time.monotonic()
    machine = await scene.new_machine(user)
    scene.say(f"{machine.name} is connected")

    async def have_ended() -> bool:
        return all(row.ended_ms is not None for row in await scene.evidence.records(user))

    await scene.eventually("every kept job has ended", have_ended, within_s=QUEUE_DRAINS_WITHIN_S, every_s=0.25)
    scene.say(f"all are done {time.monotonic() - came_at:.1f} s after the machine was started")
    scene.recovered("queue drained", came_at, time.monotonic(), within_s=QUEUE_DRAINS_WITHIN_S)
    rows = await scene.evidence.records(user)
    noted = await scene.target.executions(user)
    deliveries = await scene.deliveries(user)
    scene.check("jobs completed", QUEUE_ENTRIES_MAX, sum(row.state == "completed" for row in rows))
    scene.check("jobs executed once", QUEUE_ENTRIES_MAX, sum(key in noted and noted[key].began == 1 for key in keys))
    scene.check("jobs delivered once", QUEUE_ENTRIES_MAX, sum(deliveries[row.job] == 1 for row in rows))
    # What was refused at the door was not recorded: the same key is new.
    await scene.expect(scene.submit(user, "work", "over"), "completed", executions=1, deliveries=1, attempts=1)


async def deadline(scene: Scene) -> None:
    """A deadline passes over a job that runs and over one that waits behind it; the first one's result comes late."""
    machine = await scene.new_machine()
    user = machine.user
    begun = scene.submit(user, "work", "begun", deadline_s=DEADLINE_S, seconds=LATE_TOOL_S)
    await scene.began(begun)
    behind = scene.submit(user, "work", "behind", deadline_s=DEADLINE_S)
    scene.say(f"one job runs and one waits behind it, each with a deadline of {DEADLINE_S:g} s")
    for asked in (begun, behind):
        answer = await asked.caller
        told_s = answer.at - asked.asked_at - DEADLINE_S
        scene.say(f"{asked.key}: {answer.job.state if answer.job else 'refused'}, {told_s:.2f} s after its deadline")
        scene.recovered("told after the deadline", asked.asked_at + DEADLINE_S, answer.at, within_s=TOLD_WITHIN_S)
    noted = (await scene.target.executions(user))[begun.key]
    scene.check("the tool still runs", (1, 0), tuple(noted))

    async def is_late() -> bool:
        return (await scene.record(begun)).late_outcome is not None

    await scene.eventually("the late result is kept beside the record", is_late, within_s=LATE_TOOL_S + 5)
    scene.say("the tool has ended; its late result is kept beside the record and changed nothing")
    await scene.expect(begun, "unknown", executions=1, deliveries=1, attempts=1, code="deadline")
    await scene.expect(behind, "expired", executions=0, deliveries=0, attempts=0, code="expired")
