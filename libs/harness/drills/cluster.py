"""Drills of what only a cluster does: pods deleted by force, Deployments rolled out, a node lost, a policy in the way.

Each meets the product at work: jobs at a steady pace, and runs with a watcher at every gateway.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Final

from harness.drills.load import expect_load_done, steady_load
from harness.drills.scene import Asked, Scene
from harness.drills.streams import Followed
from harness.drills.target import ROLES, Cluster, DrillFailed, Kind

USERS = 4
JOBS_PER_S = 4
RUNS = 4
QUIET_S = 1.0
# A pod is made anew and gets ready; a store's must have left before, and reads its data.
DELETED_WITHIN_S = 45.0
# A relay's leases lapse, a machine dials again.
GOES_ON_WITHIN_S = 6.0
# One pod after the other, each with its drain.
ROLLED_WITHIN_S = 120.0
# The other node goes on alone for so long.
ALONE_S = 10.0
# A new pod looks for its stores every few seconds at most.
MENDED_WITHIN_S = 20.0
CUT_S = 10.0
# A job that met the worst of it.
ANSWERED_WITHIN_S = 10.0
DELETED: Final[Sequence[Kind]] = ("worker", "gateway", "relay", "redis", "postgres")
STORE_AWAY = "503 store-unavailable"


async def pods_delete(scene: Scene) -> None:
    """One pod of each kind is deleted in turn, the services' by force and the stores' in order; everything goes on."""
    cluster = _cluster(scene)
    async with _at_work(scene) as (users, jobs, runs):
        for kind in DELETED:
            cut_at = time.monotonic()
            name = await cluster.delete(kind)
            deleted_at = time.monotonic()
            scene.say(f"{name} was deleted; its replacement is ready {deleted_at - cut_at:.1f} s later")
            good_at = max(await asyncio.gather(*(scene.streams.flows(run, after=deleted_at) for run in runs)))
            scene.recovered(f"{kind} deleted, replaced, runs flow", cut_at, good_at, within_s=DELETED_WITHIN_S)
            met = [job for job in jobs if job.asked_at < deleted_at]
            await asyncio.gather(*(job.caller for job in met))
            scene.say(f"all jobs of before are answered {time.monotonic() - deleted_at:.1f} s after that")
    refusals = await _expect_done(scene, users, jobs, runs, slowest_s=DELETED_WITHIN_S)
    scene.check("refusals but `store-unavailable`", [], sorted(set(refusals) - {STORE_AWAY}))


async def rollout(scene: Scene) -> None:
    """Every Deployment is rolled out anew; nothing is refused."""
    cluster = _cluster(scene)
    async with _at_work(scene) as (users, jobs, runs):
        for role in ROLES:
            began_at = time.monotonic()
            await cluster.roll(role)
            scene.say(f"{role}s are rolled out, {time.monotonic() - began_at:.1f} s")
            scene.recovered(f"{role}s rolled out", began_at, time.monotonic(), within_s=ROLLED_WITHIN_S)
            await asyncio.gather(*(scene.streams.flows(run) for run in runs))
    refusals = await _expect_done(scene, users, jobs, runs, slowest_s=ANSWERED_WITHIN_S)
    scene.check("refusals", {}, dict(refusals))


async def node_stop(scene: Scene) -> None:
    """A node loses power with what runs on it; the other one goes on alone, and takes up what was lost."""
    cluster = _cluster(scene)
    async with _at_work(scene) as (users, jobs, runs):
        cut_at = time.monotonic()
        lost = await cluster.stop_node()
        stopped_at = time.monotonic()
        scene.say(f"a node is without power, and with it {', '.join(lost)}")
        scene.check("replicas lost", "> 0", len(lost), is_met=bool(lost))
        good_at = max(await asyncio.gather(*(scene.streams.flows(run, after=stopped_at) for run in runs)))
        scene.recovered("node stopped, runs flow", cut_at, good_at, within_s=GOES_ON_WITHIN_S)
        met = [job for job in jobs if not job.caller.done()]
        last = await asyncio.gather(*(job.caller for job in met))
        answered_at = max((answer.at for answer in last), default=cut_at)
        scene.say(f"the {len(met)} jobs that it met are answered {answered_at - cut_at:.1f} s after the cut")
        scene.recovered("node stopped, jobs answered", cut_at, answered_at, within_s=ANSWERED_WITHIN_S)
        await asyncio.sleep(ALONE_S)
        deleted_at = time.monotonic()
        await cluster.replace_lost()
        scene.say(f"the lost pods were deleted by force; replaced {time.monotonic() - deleted_at:.1f} s later")
        scene.recovered("pods replaced on the other node", deleted_at, time.monotonic(), within_s=DELETED_WITHIN_S)
        await cluster.start_node()
        scene.say(f"the node is back, {time.monotonic() - cut_at:.1f} s after the cut")
        await asyncio.sleep(QUIET_S)
    refusals = await _expect_done(scene, users, jobs, runs, slowest_s=ANSWERED_WITHIN_S)
    scene.check("refusals but `store-unavailable`", [], sorted(set(refusals) - {STORE_AWAY}))


async def network_cut(scene: Scene) -> None:
    """A NetworkPolicy keeps new pods from Redis: a worker's replacement waits, not ready, and the other one serves."""
    cluster = _cluster(scene)
    async with _at_work(scene) as (users, jobs, runs):
        await cluster.cut_off_redis()
        scene.say("no new connection to Redis is let through; killing a worker (SIGKILL)")
        worker = scene.target.workers[0]
        await worker.kill()
        killed_at = time.monotonic()
        await asyncio.sleep(CUT_S)
        scene.check("workers ready while Redis is out of reach", 1, await cluster.ready("worker"))
        answered = [job for job in jobs if job.caller.done() and job.asked_at > killed_at]
        scene.check("jobs answered meanwhile", "> 0", len(answered), is_met=bool(answered))
        await cluster.mend()
        mended_at = time.monotonic()
        scene.say(f"the policy is as before, {mended_at - killed_at:.1f} s later; {len(answered)} jobs were answered")
        await worker.start()
        scene.recovered("mended, the replacement is ready", mended_at, time.monotonic(), within_s=MENDED_WITHIN_S)
    refusals = await _expect_done(scene, users, jobs, runs, slowest_s=CUT_S + MENDED_WITHIN_S)
    scene.check("refusals but `store-unavailable`", [], sorted(set(refusals) - {STORE_AWAY}))


@contextlib.asynccontextmanager
async def _at_work(scene: Scene) -> AsyncIterator[tuple[list[str], list[Asked], list[Followed]]]:
    """Machines, jobs at a steady pace and runs that flow; with the block the jobs end, and are all answered."""
    users = [machine.user for machine in await scene.new_machines(USERS)]
    runs = [await scene.streams.follow(2) for _ in range(RUNS)]
    for number, run in enumerate(runs):
        for gateway in range(len(scene.target.gateways)):
            scene.streams.watch(run, first=gateway + number)
    await asyncio.gather(*(scene.streams.flows(run) for run in runs))
    scene.say(f"{USERS} users' machines, {JOBS_PER_S} jobs a second, and {RUNS} runs of two sources, all watched")
    async with steady_load(scene, users, jobs_per_s=JOBS_PER_S) as jobs:
        await asyncio.sleep(QUIET_S)
        yield users, jobs, runs


async def _expect_done(
    scene: Scene, users: Sequence[str], jobs: Sequence[Asked], runs: Sequence[Followed], *, slowest_s: float
) -> Counter[str]:
    """Each job done once, each run without a hole; returns what callers were refused on the way."""
    refusals = await expect_load_done(scene, users, jobs)
    scene.recovered("slowest job", 0.0, max(job.caller.result().at - job.asked_at for job in jobs), within_s=slowest_s)
    await scene.streams.end(*runs)
    await scene.streams.expect(*runs)
    return refusals


def _cluster(scene: Scene) -> Cluster:
    cluster = scene.target.cluster
    if cluster is None:
        raise DrillFailed("this target is no cluster")
    return cluster
