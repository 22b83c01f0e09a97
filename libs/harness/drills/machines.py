"""Drills of the users' machines: killed, cut off, asleep, and two at once."""

import asyncio
import time

from harness.drills.scene import Scene
from harness.drills.target import Machine

# A machine that can reach a worker is welcomed within a second or so.
RECONNECTS_WITHIN_S = 3.0
# A restarted one has to start Python first.
RESTARTS_WITHIN_S = 8.0
# A pause that no scheduler makes (sidecar.wake): what is longer was a sleep.
SLEEP_S = 5.5
# For a busy machine of ours.
SLACK_S = 1.5
# What the worker tells a stand-by machine to wait before it tries again (20 s and a tenth), and its welcome.
STANDS_BY_WITHIN_S = 25.0


async def sidecar_kill(scene: Scene) -> None:
    """A sidecar dies in the middle of an action: a hinted one runs again, of any other nobody knows how far it came."""
    acting, looking = await scene.new_machines(2)
    work = scene.submit(acting.user, "work", "action", seconds=30)
    look = scene.submit(looking.user, "look", "look", held=True)
    await asyncio.gather(scene.began(work), scene.began(look))
    scene.say("both tools run; killing both sidecars (SIGKILL)")
    await asyncio.gather(acting.kill(), looking.kill())
    cut_at = time.monotonic()
    scene.say("both are gone; starting them again on their journals")
    await scene.target.let_go(looking.user, look.key)
    await asyncio.gather(acting.start(), looking.start())
    unknown = await scene.expect(work, "unknown", executions=1, deliveries=2, attempts=2, code="interrupted")
    scene.say(f"the action: nobody knows, told {unknown.at - cut_at:.2f} s after the kill; it did not run again")
    again = await scene.expect(look, "completed", executions=2, deliveries=2, attempts=1)
    scene.say(f"the look: ran again, answered {again.at - cut_at:.2f} s after the kill")
    scene.recovered("killed in mid-action", cut_at, unknown.at, within_s=RESTARTS_WITHIN_S)
    scene.recovered("killed while looking", cut_at, again.at, within_s=RESTARTS_WITHIN_S)


async def socket_cut(scene: Scene) -> None:
    """A socket breaks in mid-action: once the machine is back before the tool has ended, once after it has."""
    short, long = await scene.new_machines(2)
    async with scene.nobody_told_offline(short.user):
        await _cut_and_back_before_the_end(scene, short)
    # How long this one stays away is up to the network: `offline` may come to be true.
    await _cut_until_the_end(scene, long)


async def _cut_and_back_before_the_end(scene: Scene, machine: Machine) -> None:
    job = scene.submit(machine.user, "work", "goes-on", held=True)
    await scene.began(job)
    session = (await scene.evidence.presence(machine.user))["session"]
    scene.say("the tool runs; cutting the machine's socket")
    cut_at = time.monotonic()
    await machine.cut()
    await scene.new_session(machine.user, session)
    scene.say(f"a new session after {time.monotonic() - cut_at:.2f} s")
    scene.recovered("cut, back at once", cut_at, time.monotonic(), within_s=RECONNECTS_WITHIN_S)
    await scene.let_go(job)
    await scene.expect(job, "completed", executions=1, deliveries=1, attempts=1)


async def _cut_until_the_end(scene: Scene, machine: Machine) -> None:
    job = scene.submit(machine.user, "work", "ends-alone", held=True)
    await scene.began(job)
    scene.say("the tool runs; cutting the machine's socket, and nobody can be reached")
    await machine.unplug()
    await scene.let_go(job)
    await scene.eventually("the tool has ended", lambda: scene.events(machine.user, "job_ended"))
    scene.say("the tool has ended, nobody was told; the network is back")
    plugged_at = time.monotonic()
    await machine.plug()
    # Redelivered under a new frame id, and answered under that one from the journal.
    answer = await scene.expect(job, "completed", executions=1, deliveries=2, attempts=2)
    frames = {event["frame"] for event in await scene.events(machine.user, "job_delivered")}
    scene.check("frame ids of the job", 2, len(frames))
    scene.say(f"answered from the journal {answer.at - plugged_at:.2f} s later")
    scene.recovered("cut until the end", plugged_at, answer.at, within_s=RECONNECTS_WITHIN_S)


async def laptop_sleep(scene: Scene) -> None:
    """The lid is closed with one job running and one waiting behind it, for longer than presence lasts, and opened."""
    machine = await scene.new_machine()
    user, heartbeat_s = machine.user, scene.target.heartbeat_s
    running = scene.submit(user, "look", "running", heeds_offline=True, held=True)
    await scene.began(running)
    waiting = scene.submit(user, "look", "waiting", heeds_offline=True)

    async def is_in_the_lane() -> bool:
        return len(await scene.events(user, "job_delivered")) == 2

    await scene.eventually("the second job waits in the machine's lane", is_in_the_lane)
    scene.say("one job runs, one waits behind it on the machine; closing the lid (SIGSTOP)")
    closed_at = time.monotonic()
    await machine.freeze()

    async def is_offline() -> bool:
        seen = await scene.caller.presence(user)
        return seen is not None and seen.state == "offline"

    # Two heartbeats without a sign of life, up to one until the worker looks, a second in which it tries to say so, one
    # and a half heartbeats of grace.
    lapse_s = 4.5 * heartbeat_s + 1
    await scene.eventually("the machine is said to be offline", is_offline, within_s=lapse_s + SLACK_S)
    scene.say(f"said to be offline {time.monotonic() - closed_at:.2f} s after the lid was closed")
    scene.recovered("presence lapses", closed_at, time.monotonic(), within_s=lapse_s + SLACK_S)
    told = await asyncio.gather(running.caller, waiting.caller)
    for answer, asked in zip(told, (running, waiting), strict=True):
        measured = "nothing" if answer.job is None else f"{answer.job.state}, machine {answer.job.machine}"
        is_met = answer.job is not None and not answer.job.terminal and answer.job.machine == "offline"
        scene.check(f"{asked.key}: its caller is told", "not ended, machine offline", measured, is_met=is_met)
    await asyncio.sleep(max(0.0, closed_at + SLEEP_S - time.monotonic()))
    began = {key: noted.began for key, noted in (await scene.target.executions(user)).items()}
    scene.check("begun before the wake", {"running": 1}, began)
    await scene.target.let_go(user, running.key)
    woken_at = time.monotonic()
    await machine.thaw()
    scene.say(f"opened the lid after {woken_at - closed_at:.1f} s (SIGCONT)")
    running, waiting = scene.again(running), scene.again(waiting)
    last = await waiting.caller
    scene.recovered("awake again", woken_at, last.at, within_s=RECONNECTS_WITHIN_S)
    await scene.expect(running, "completed", executions=1, deliveries=2)
    await scene.expect(waiting, "completed", executions=1, deliveries=2)
    await _expect_start_after_welcome(scene, user, (await scene.record(waiting)).job)


async def _expect_start_after_welcome(scene: Scene, user: str, job: str) -> None:
    events = await scene.events(user, "slept", "connected", "job_started")
    order = [event["event"] for event in events if event.get("job", job) == job]
    scene.check("the machine's log", ["connected", "slept", "connected", "job_started"], order)


async def two_machines(scene: Scene) -> None:
    """A second machine of a user stands by while the first one lives, and takes over when that dies in mid-action."""
    first = await scene.new_machine()
    user, heartbeat_s = first.user, scene.target.heartbeat_s
    before = await scene.evidence.presence(user)
    second = await scene.new_machine(user, connected=False)

    async def is_told_to_stand_by() -> bool:
        return any(event.get("code") == 4003 for event in await scene.events(user, "disconnected"))

    await scene.eventually("the second machine is told to stand by", is_told_to_stand_by)
    scene.say(f"{second.name} is told to stand by (4003), {first.name} stays")
    async with scene.nobody_told_offline(user):
        served = scene.submit(user, "work", "served")
        await scene.expect(served, "completed", executions=1, deliveries=1)
        await asyncio.sleep(2 * heartbeat_s)
        now = await scene.evidence.presence(user)
        scene.check("the session, two heartbeats later", before["session"], now["session"])
        scene.check("welcomes", 1, len(await scene.events(user, "connected")))
    job = scene.submit(user, "work", "begun-on-the-first", seconds=30)
    await scene.began(job)
    scene.say(f"the tool runs on {first.name}; killing it (SIGKILL)")
    cut_at = time.monotonic()
    await first.kill()

    async def has_taken_over() -> bool:
        return (await scene.evidence.presence(user)).get("machine", before["machine"]) != before["machine"]

    await scene.eventually("the second machine takes over", has_taken_over, within_s=STANDS_BY_WITHIN_S)
    scene.say(f"{second.name} took over {time.monotonic() - cut_at:.1f} s after the kill")
    scene.recovered("second takes over", cut_at, time.monotonic(), within_s=STANDS_BY_WITHIN_S)
    # Begun on the first: never sent to the second, whatever it could do.
    await scene.expect(job, "unknown", executions=1, deliveries=1, code="machine-changed")
