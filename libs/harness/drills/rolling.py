"""Drills of a deploy, under a steady load: workers and gateways told to leave and replaced in turn, or scaled."""

import asyncio
import time
from collections.abc import Sequence

from harness.drills.load import expect_load_done, steady_load
from harness.drills.scene import Asked, Scene
from harness.drills.target import Role

USERS = 10
JOBS_PER_S = 20
# The load goes on so long before the first and after the last one leaves.
QUIET_S = 0.5
SCALES = (1, 4, 1)
# From four to one a machine may be moved three times, to workers that leave next.
SCALED_WITHIN_S = 20.0
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
    async with steady_load(scene, users, jobs_per_s=JOBS_PER_S) as jobs, scene.nobody_told_offline(users[0]):
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
    await _expect_smooth(scene, users, jobs, within_s=ANSWERED_WITHIN_S)


async def scale(scene: Scene) -> None:
    """Workers, and then gateways, are scaled from one to four and back to one, under load."""
    machines = await scene.new_machines(USERS)
    users = [machine.user for machine in machines]
    scene.say(f"{USERS} users' machines are connected; {JOBS_PER_S} jobs a second from now on")
    async with steady_load(scene, users, jobs_per_s=JOBS_PER_S) as jobs, scene.nobody_told_offline(users[0]):
        roles: dict[Role, int] = {"worker": len(scene.target.workers), "gateway": len(scene.target.gateways)}
        for role, usual in roles.items():
            for count in SCALES:
                began_at = time.monotonic()
                await scene.target.scale(role, count)
                scene.say(f"{role}s: {count}, after {time.monotonic() - began_at:.1f} s")
                await asyncio.sleep(QUIET_S)
            await scene.target.scale(role, usual)
    await _expect_smooth(scene, users, jobs, within_s=SCALED_WITHIN_S)


async def _expect_smooth(scene: Scene, users: Sequence[str], jobs: Sequence[Asked], *, within_s: float) -> None:
    refusals = await expect_load_done(scene, users, jobs)
    scene.check("refusals", {}, dict(refusals))
    slowest_s = max(job.caller.result().at - job.asked_at for job in jobs)
    scene.recovered("slowest job", 0.0, slowest_s, within_s=within_s)
