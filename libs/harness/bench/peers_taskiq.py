"""taskiq on Redis streams, as a peer.

    python -m taskiq worker harness.bench.peers_taskiq:broker ...
    python -m harness.bench.peers_taskiq drive PLAN RESULT

Set up for many short tasks on two cores: the broker that acknowledges (a stream with a group), after the result is
saved; two worker processes; 100 messages a read. taskiq asks for results again and again; here a middleware announces
them, so that nobody does. Takes `REDIS_URL`.
"""

import asyncio
import os
import sys
from typing import Any
from uuid import uuid4

import redis.asyncio
from taskiq import TaskiqEvents, TaskiqMessage, TaskiqMiddleware, TaskiqResult, TaskiqState
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

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

CHANNEL = "bench:taskiq:done"
URL = os.environ.get("REDIS_URL", "redis://127.0.0.1")


class Announcer(TaskiqMiddleware):
    """Says that a result can be fetched."""

    async def post_save(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:  # noqa: ARG002  # taskiq names it
        """Publish the id of the task whose result was saved."""
        client = redis.asyncio.Redis(connection_pool=broker.connection_pool)
        await client.publish(CHANNEL, message.task_id)


broker = (
    RedisStreamBroker(URL, queue_name="bench:taskiq", maxlen=10_000)
    .with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=300))
    .with_middlewares(Announcer())
)


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def _say_ready(_: TaskiqState) -> None:
    print(READY, flush=True)


@broker.task(task_name="echo")
async def echo(value: str) -> str:
    """Give back the value."""
    return value


async def drive(plan: Plan) -> Measured:
    """Send tasks and wait for their results. Raises: TimeoutError, WrongAnswer."""
    await broker.startup()
    try:
        async with open_announcements(URL, CHANNEL) as announcements:

            async def run_job() -> object:
                task_id = uuid4().hex
                saved = announcements.expect(task_id)
                task = await echo.kicker().with_task_id(task_id).kiq(VALUE)
                await saved
                return (await task.get_result()).return_value

            return await run_closed_loop(plan, run_job)
    finally:
        await broker.shutdown()


def main(_: str, plan_path: str, result_path: str) -> None:
    """Drive; the workers are taskiq's own command."""
    write_measured(result_path, asyncio.run(drive(read_plan(plan_path))))


if __name__ == "__main__":
    main(*sys.argv[1:])
