"""Drills of the gateways: killed while a caller waits, and with submissions on their way in."""

import asyncio
import time

from harness.drills.scene import Scene
from harness.drills.target import Gateway

# A caller goes to the other gateway at once, where the key joins the job.
RETRY_WITHIN_S = 3.0
# A job whose record is durable and that never reached Redis: a sweeper puts it back within five seconds.
HANDOVER_WITHIN_S = 6.0
SUBMISSIONS = 40


async def gateway_kill(scene: Scene) -> None:
    """A gateway dies while a caller waits, and with forty submissions on their way in."""
    machine = await scene.new_machine()
    gateway = scene.target.gateways[0]
    await _killed_while_waiting(scene, machine.user, gateway)
    await gateway.start()
    scene.say(f"{gateway.name} is back")
    await _killed_while_accepting(scene, machine.user, gateway)
    await gateway.start()
    scene.say(f"{gateway.name} is back")


async def _killed_while_waiting(scene: Scene, user: str, gateway: Gateway) -> None:
    job = scene.submit(user, "work", "waited-for", held=True)
    await scene.began(job)
    scene.say(f"the tool runs, a caller waits at {gateway.name}; killing it (SIGKILL)")
    cut_at = time.monotonic()
    await gateway.kill()
    await scene.let_go(job)
    answer = await scene.expect(job, "completed", executions=1, deliveries=1, attempts=1)
    scene.say(f"the caller took the key to another gateway; answered {answer.at - cut_at:.2f} s after the kill")
    scene.recovered("killed while a caller waits", cut_at, answer.at, within_s=RETRY_WITHIN_S)
    scene.check("the caller's broken requests", ">= 1", answer.broken, is_met=answer.broken >= 1)
    scene.check("the answer is a replay", True, answer.job is not None and answer.job.replayed)


async def _killed_while_accepting(scene: Scene, user: str, gateway: Gateway) -> None:
    jobs = [scene.submit(user, "work", f"burst-{n}") for n in range(SUBMISSIONS)]

    async def has_accepted_some() -> bool:
        return any(row.key.startswith("burst-") for row in await scene.evidence.records(user))

    await scene.eventually("a submission of the burst is durable", has_accepted_some)
    cut_at = time.monotonic()
    await gateway.kill()
    accepted = sum(row.key.startswith("burst-") for row in await scene.evidence.records(user))
    scene.say(f"{SUBMISSIONS} submissions on their way, at least one durable; killed {gateway.name} (SIGKILL)")
    answers = await asyncio.gather(*(job.caller for job in jobs))
    last_at = max(answer.at for answer in answers)
    broken = sum(answer.broken > 0 for answer in answers)
    scene.say(f"{accepted} were durable right after it, {broken} callers lost their gateway and took the key elsewhere")
    scene.recovered("killed while accepting", cut_at, last_at, within_s=HANDOVER_WITHIN_S)
    rows = {row.key: row for row in await scene.evidence.records(user)}
    noted = await scene.target.executions(user)
    deliveries = await scene.deliveries(user)
    keys = [job.key for job in jobs]
    scene.check("callers whose gateway was lost", "> 0", broken, is_met=broken > 0)
    scene.check("jobs completed", SUBMISSIONS, sum(rows[key].state == "completed" for key in keys if key in rows))
    scene.check("jobs executed once", SUBMISSIONS, sum(noted[key].began == 1 for key in keys if key in noted))
    scene.check("jobs delivered once", SUBMISSIONS, sum(deliveries[rows[key].job] == 1 for key in keys if key in rows))
    told = {(answer.job.job, answer.outcome) for answer in answers if answer.job is not None}
    scene.check("different answers", SUBMISSIONS, len(told))
