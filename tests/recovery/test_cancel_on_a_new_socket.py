"""A job is cancelled though its socket has changed: a real sidecar, and the worker that it came from is gone."""

import asyncio
import json
import os
from pathlib import Path

import sidecar_tools
from job_stores import new_user
from support import eventually

from harness.sidecars import Sidecar
from harness.stack import Stack
from towline.client import Client, outcome_of
from towline.wire import api

# Whether the machine is there is found out this often.
HEARTBEAT_S = 1.0


def connections(sidecar: Sidecar) -> int:
    """How often it was welcomed."""
    lines = [json.loads(line) for line in sidecar.read_log().splitlines() if line.startswith("{")]
    return sum(line["event"] == "connected" for line in lines)


async def test_a_running_job_is_cancelled_after_its_worker_was_killed(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    """While no worker is there. The next session knows the job from the hello alone, and the cancel from Redis.

    The tool is stopped, the job `unknown`, and the lane free.
    """
    executions = tmp_path / "executions"
    env = {"EXECUTIONS": str(executions), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    user = new_user()
    async with Stack(
        tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as stack:
        gateway, worker = await asyncio.gather(stack.add_gateway(), stack.add_worker())
        sidecar = await stack.add_sidecar(user, tools=[sidecar_tools.__file__], env=env)
        async with Client(gateway.url, stack.api_key) as client:
            job = await client.submit(user, "click", {"button": "slow", "seconds": 100}, idempotency_key="slow")
            await eventually(executions.exists)
            worker.kill()
            asked = await client.cancel_job(job.job)
            assert not asked.terminal
            await worker.start_ready()
            await eventually(lambda: connections(sidecar) == 2, 20)

            async def ended() -> api.Job | None:
                now = await client.read_job(job.job)
                return now if now.terminal else None

            answered = await eventually(ended, 20)
            outcome = outcome_of(answered)
            assert outcome is not None
            assert isinstance(outcome.error, api.Failure)
            assert (answered.state, answered.attempts, outcome.error.code) == ("unknown", 1, "cancelled")
            after = await client.submit(user, "click", {"button": "next"}, idempotency_key="next", wait_s=10)
            assert after.state == "completed"
        assert executions.read_text().splitlines() == ["click slow", "click next"]
