"""arq, as a peer.

    python -m harness.bench.peers_arq work
    python -m harness.bench.peers_arq drive PLAN RESULT

Set up for many short tasks: its queue is looked into every millisecond (it cannot wait for it; the default is 500 ms),
100 jobs at a time. arq asks for results again and again; here its hook announces them, so that nobody does. Takes
`REDIS_URL`.

arq needs an older redis-py than the product, so this runs in an environment of its own (requirements/arq.txt).
"""

import asyncio
import os
import sys
from typing import Any, ClassVar
from uuid import uuid4

from arq import create_pool, run_worker
from arq.connections import RedisSettings
from arq.jobs import Job

from harness.bench.load import Measured
from harness.bench.task_queues import (
    READY,
    VALUE,
    Plan,
    open_announcements,
    read_plan,
    run_closed_loop,
    write_measured,
)

CHANNEL = "bench:arq:done"
QUEUE = "bench:arq"
URL = os.environ.get("REDIS_URL", "redis://127.0.0.1")
# At 5 ms a job alone takes 5.6 ms instead of 1.9; many at once are as fast. Between its loads the bench freezes it.
POLL_EVERY_S = 0.001


async def echo(_: dict[str, Any], value: str) -> str:
    """Give back the value."""
    return value


async def _say_ready(_: dict[str, Any]) -> None:
    print(READY, flush=True)


async def _announce(context: dict[str, Any]) -> None:
    await context["redis"].publish(CHANNEL, context["job_id"])


class WorkerSettings:
    """What arq reads."""

    functions: ClassVar = [echo]
    redis_settings = RedisSettings.from_dsn(URL)
    queue_name = QUEUE
    on_startup = _say_ready
    after_job_end = _announce
    max_jobs = 100
    poll_delay = POLL_EVERY_S
    keep_result = 300


async def drive(plan: Plan) -> Measured:
    """Send jobs and wait for their results. Raises: TimeoutError, WrongAnswer."""
    pool = await create_pool(RedisSettings.from_dsn(URL), default_queue_name=QUEUE)
    try:
        async with open_announcements(URL, CHANNEL) as announcements:

            async def run_job() -> object:
                job_id = uuid4().hex
                done = announcements.expect(job_id)
                await pool.enqueue_job("echo", VALUE, _job_id=job_id)
                await done
                info = await Job(job_id, pool, _queue_name=QUEUE).result_info()
                return info and info.result

            return await run_closed_loop(plan, run_job)
    finally:
        await pool.aclose()


def main(role: str, plan_path: str = "", result_path: str = "") -> None:
    """Play one of the two."""
    if role == "work":
        run_worker(WorkerSettings)
    else:
        write_measured(result_path, asyncio.run(drive(read_plan(plan_path))))


if __name__ == "__main__":
    main(*sys.argv[1:])
