"""The smoke that Compose, kind and CI run, against an installation of the harness: it passes, and it can fail."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import eventually, redis_database

from harness.agent.server import Agent
from harness.model.server import Model
from harness.servers import Servers
from harness.stack import Stack, Worker, inherited_environment

WITHIN_S = 90.0


class Smoked(NamedTuple):
    """The program has ended."""

    code: int
    out: str
    err: str


class Installation(NamedTuple):
    """What the smoke is given."""

    stack: Stack
    variables: dict[str, str]

    async def smoke(self, **variables: str) -> Smoked:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "harness.smoke"),
            env={**inherited_environment(), **self.variables, **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
        assert b"Traceback" not in err, err.decode()
        assert process.returncode is not None
        return Smoked(process.returncode, out.decode(), err.decode())


@pytest.fixture(scope="module")
async def installation(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Installation]:
    """One of each service, two workers, and the stand-ins."""
    redis_url = redis_database(servers.redis_url, 1)
    async with (
        Agent() as agent,
        Model() as model,
        Stack(state_directory / "smoke", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=2.0) as stack,
    ):
        async with asyncio.TaskGroup() as group:
            group.create_task(stack.add_gateway())
            group.create_task(stack.add_relay())
            for _ in range(2):
                group.create_task(stack.add_worker())
        variables = {
            "TOWLINE_URL": stack.gateways[0].url,
            "TOWLINE_API_KEY": stack.api_key,
            "TOWLINE_BRIDGE_URL": stack.bridge_url,
            "SMOKE_AGENT_URL": f"http://127.0.0.1:{agent.port}",
            "SMOKE_MODEL_URL": model.url,
        }
        yield Installation(stack, variables)


async def test_it_says_what_was_as_promised_and_leaves_nothing(installation: Installation) -> None:
    smoked = await installation.smoke()
    assert (smoked.code, smoked.err) == (0, "")
    steps = [line.split("s  ", 1)[1].partition(" ")[0] for line in smoked.out.splitlines()]
    assert steps == ["gateway", "machine:", "job:", "job:", "run:", "turn:", "turn:", "machine:", "ok"]
    assert "201 events of 201" in smoked.out


async def test_a_key_that_nobody_knows_fails_it(installation: Installation) -> None:
    smoked = await installation.smoke(TOWLINE_API_KEY="twk_nobody")
    assert smoked.code == 1
    assert "401" in smoked.err


async def test_an_agent_that_is_not_there_fails_it_by_name(installation: Installation) -> None:
    smoked = await installation.smoke(SMOKE_AGENT_URL="http://127.0.0.1:9")
    assert smoked.code == 1
    assert "stand-in agent at http://127.0.0.1:9 does not answer" in smoked.err
    assert "job: the same key again" in smoked.out


async def test_a_host_that_may_not_be_called_fails_it(installation: Installation) -> None:
    """The installation's own refusal, not a time that runs out."""
    smoked = await installation.smoke(SMOKE_MODEL_URL="http://192.0.2.1/v1")
    assert smoked.code == 1
    assert "192.0.2.1" in smoked.err


async def test_without_a_key_it_is_not_begun(installation: Installation) -> None:
    smoked = await installation.smoke(TOWLINE_API_KEY="")
    assert smoked.code == 2
    assert "TOWLINE_API_KEY" in smoked.err


async def test_it_passes_while_the_worker_of_its_machine_is_killed(installation: Installation) -> None:
    """The work goes on through the other worker; the smoke only takes longer."""
    smoking = asyncio.create_task(installation.smoke())
    worker = await eventually(lambda: _holder(installation.stack.workers), WITHIN_S)
    worker.kill()
    smoked = await smoking
    await worker.stop()
    await worker.start_ready()
    assert smoked.code == 0, smoked.err


async def _holder(workers: list[Worker]) -> Worker | None:
    for worker in workers:
        if (await worker.read_metrics())["towline_bridge_sockets"]:
            return worker
    return None
