"""Drills of a deploy: every worker, or every gateway, told to leave and replaced in turn, under a steady load."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from harness.drills.scene import Asked, Scene
from harness.drills.target import Role

USERS = 10
JOBS_PER_S = 20
# The load goes on so long before the first and after the last one leaves.
QUIET_S = 0.5
# What one job may take in the middle of it: a drain's wave, a redial and its own turn.
ANSWERED_WITHIN_S = 10.0


async def rolling_workers(scene: Scene) -> None:
    """The workers are scaled up by one, told to leave and replaced in turn, and scaled down again, under load."""
    await _roll(scene, "worker")


async def rolling_gateways(scene: Scene) -> None:
    """The gateways are scaled up by one, told to leave and replaced in turn, and scaled down again, under load."""
    await _roll(scene, "gateway")


async def _roll(scene: Scene, role: Role) -> None:
    replicas = scene.target.workers if role == "worker" else scene.target.gateways
    usual = len(replicas)
    machines = await scene.new_machines(USERS)
    users = [machine.user for machine in machines]
    scene.say(f"{USERS} users' machines are connected; {JOBS_PER_S} jobs a second from now on")
    async with _load(scene, users) as jobs, scene.nobody_told_offline(users[0]):
        await asyncio.sleep(QUIET_S)
        await scene.target.scale(role, usual + 1)
        scene.say(f"scaled {role}s up to {usual + 1}")
        for replica in list(replicas)[:usual]:
            began_at = time.monotonic()
            code = await replica.term()
            scene.say(
                f"{replica.name} was told to leave (SIGTERM), and left within {time.monotonic() - began_at:.2f} s"
            )
            scene.check(f"{replica.name}: exit code", 0, code)
            await replica.start()
            scene.say(f"{replica.name} is replaced")
        await scene.target.scale(role, usual)
        scene.say(f"scaled {role}s down to {usual}")
        await asyncio.sleep(QUIET_S)
    await _expect_smooth(scene, users, jobs)


@contextlib.asynccontextmanager
async def _load(scene: Scene, users: Sequence[str]) -> AsyncIterator[list[Asked]]:
    """Submit jobs at a steady pace, hinted and unhinted in turn; all are answered when the block has ended."""
    jobs: list[Asked] = []

    async def submit_steadily() -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        for n in range(1_000_000):
            user = users[n % len(users)]
            tool = "look" if n // len(users) % 2 else "work"
            jobs.append(scene.submit(user, tool, f"load-{n}", first=n, seconds=0.02))
            next_at += 1 / JOBS_PER_S
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    load = asyncio.create_task(submit_steadily(), name="load")
    try:
        yield jobs
    finally:
        load.cancel()
        await asyncio.wait([load])
    await asyncio.gather(*(job.caller for job in jobs))


async def _expect_smooth(scene: Scene, users: Sequence[str], jobs: Sequence[Asked]) -> None:
    answers = [job.caller.result() for job in jobs]
    refusals = Counter(refusal for answer in answers for refusal in answer.refusals)
    noted = {user: await scene.target.executions(user) for user in users}
    executed = Counter(noted[job.user][job.key].began if job.key in noted[job.user] else 0 for job in jobs)
    rows = {(user, row.key): row for user in users for row in await scene.evidence.records(user)}
    delivered = sum([await scene.deliveries(user) for user in users], Counter())
    doubled = sum(delivered[row.job] > 1 for row in rows.values())
    broken = sum(answer.broken for answer in answers)
    scene.say(f"{len(jobs)} jobs; {broken} requests broke off and were repeated, {doubled} jobs were delivered again")
    scene.check(
        "jobs completed",
        len(jobs),
        sum(answer.job is not None and answer.job.state == "completed" for answer in answers),
    )
    scene.check("records", len(jobs), len(rows))
    scene.check("executions", {1: len(jobs)}, dict(executed))
    scene.check("refusals", {}, dict(refusals))
    slowest_s = max(job.caller.result().at - job.asked_at for job in jobs)
    scene.recovered("slowest job", 0.0, slowest_s, within_s=ANSWERED_WITHIN_S)
