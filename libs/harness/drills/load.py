"""A steady load of jobs, and what must have become of it: each done once, by record, answer and the tools' own notes.

Used by:  the scenarios whose cut is to meet a product at work.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from harness.drills.scene import Asked, Scene

TOOL_S = 0.02


@contextlib.asynccontextmanager
async def steady_load(scene: Scene, users: Sequence[str], *, jobs_per_s: float) -> AsyncIterator[list[Asked]]:
    """Submit jobs at a steady pace, hinted and unhinted in turn; all are answered when the block has ended."""
    jobs: list[Asked] = []

    async def submit_steadily() -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        for n in range(1_000_000):
            user = users[n % len(users)]
            tool = "look" if n // len(users) % 2 else "work"
            jobs.append(scene.submit(user, tool, f"load-{n}", first=n, seconds=TOOL_S))
            next_at += 1 / jobs_per_s
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    load = asyncio.create_task(submit_steadily(), name="load")
    try:
        yield jobs
    finally:
        load.cancel()
        await asyncio.wait([load])
    await asyncio.gather(*(job.caller for job in jobs))


async def expect_load_done(scene: Scene, users: Sequence[str], jobs: Sequence[Asked]) -> Counter[str]:
    """Check that each answered job of a load was done once; returns what callers were refused on the way."""
    answers = [job.caller.result() for job in jobs]
    noted = {user: await scene.target.executions(user) for user in users}
    executed = Counter(noted[job.user][job.key].began if job.key in noted[job.user] else 0 for job in jobs)
    rows = {(user, row.key): row for user in users for row in await scene.evidence.records(user)}
    delivered = sum([await scene.deliveries(user) for user in users], Counter())
    doubled = sum(delivered[row.job] > 1 for row in rows.values())
    broken = sum(answer.broken for answer in answers)
    scene.say(f"{len(jobs)} jobs; {broken} requests broke off and were repeated, {doubled} jobs were delivered again")
    completed = sum(answer.job is not None and answer.job.state == "completed" for answer in answers)
    scene.check("jobs completed", len(jobs), completed)
    scene.check("records", len(jobs), sum((job.user, job.key) in rows for job in jobs))
    scene.check("executions", {1: len(jobs)}, dict(executed))
    return Counter(refusal for answer in answers for refusal in answer.refusals)
