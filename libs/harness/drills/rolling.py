"""Drills of a deploy: every worker, or every gateway, told to leave and replaced in turn, under a steady load."""

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
    await _expect_smooth(scene, users, jobs)


async def _expect_smooth(scene: Scene, users: Sequence[str], jobs: Sequence[Asked]) -> None:
    refusals = await expect_load_done(scene, users, jobs)
    scene.check("refusals", {}, dict(refusals))
    slowest_s = max(job.caller.result().at - job.asked_at for job in jobs)
    scene.recovered("slowest job", 0.0, slowest_s, within_s=ANSWERED_WITHIN_S)
