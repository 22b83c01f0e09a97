"""A session that is ending takes no more jobs, and takes nothing else down with it."""

from collections import Counter
from pathlib import Path

from support import eventually

from harness.drills.local import open_target
from towline.client import Client


async def test_worker_survives_jobs_for_a_session_that_is_being_closed(state_directory: Path) -> None:
    """The machine is frozen, so the close of its revoked session waits for an answer; jobs arrive meanwhile.

    They stay for the user's next session, and the worker goes on serving.
    """
    async with (
        open_target(state_directory / "ending", heartbeat_s=10.0, gateways=1, workers=1) as target,
        Client(target.gateways[0].url, target.api_key) as client,
    ):
        machine = await target.add_machine("ada")
        (worker,) = target.workers
        await machine.freeze()
        async for token in client.list_machine_tokens("ada"):
            await client.revoke_machine_token("ada", token.token_id)
        jobs = [await client.submit("ada", "work", {"mark": f"job-{n}"}, idempotency_key=f"job-{n}") for n in range(20)]

        async def has_ended() -> bool:
            return '"session_ended"' in await worker.logs()

        await eventually(has_ended)
        assert await worker.is_running()
        await target.remove_machine(machine)
        heir = await target.add_machine("ada")
        states = Counter([(await client.read_job(job.job, wait_s=20)).state for job in jobs])
        # One may have been marked as begun on the frozen machine, alone, and is never sent to another one.
        assert states["completed"] + states["unknown"] == len(jobs)
        assert states["unknown"] <= 1
        await target.remove_machine(heir)
