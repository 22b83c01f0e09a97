"""The load that `scripts/kind-load` puts on a cluster, against an installation of the harness: it keeps count, and it
sees a promise broken.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import eventually, redis_database

from harness.agent.server import Agent
from harness.model.server import Model
from harness.servers import Servers
from harness.stack import Stack

LOAD = Path(__file__).parents[2] / "kind/load.py"
WITHIN_S = 90.0


class Loaded(NamedTuple):
    """The load is over."""

    code: int
    out: str


class Installation(NamedTuple):
    """What the load is put on."""

    stack: Stack
    variables: dict[str, str]

    async def load(self, program: str, *arguments: str) -> Loaded:
        """Run the program as the script does: from standard input."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-", *arguments),
            env={**os.environ, **self.variables},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(WITHIN_S):
            out, _ = await process.communicate(program.encode())
        assert process.returncode is not None
        return Loaded(process.returncode, out.decode())


@pytest.fixture(scope="module")
async def installation(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Installation]:
    """One of each service, two workers, and the stand-ins."""
    redis_url = redis_database(servers.redis_url, 1)
    async with (
        Agent() as agent,
        Model() as model,
        Stack(state_directory / "load", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=2.0) as stack,
    ):
        async with asyncio.TaskGroup() as group:
            group.create_task(stack.add_gateway())
            group.create_task(stack.add_relay())
            for _ in range(2):
                group.create_task(stack.add_worker())
        yield Installation(
            stack,
            {
                "TOWLINE_URL": stack.gateways[0].url,
                "TOWLINE_API_KEY": stack.api_key,
                "TOWLINE_BRIDGE_URL": stack.bridge_url,
                "SMOKE_AGENT_URL": f"http://127.0.0.1:{agent.port}",
                "SMOKE_MODEL_URL": model.url,
            },
        )


async def test_everything_is_kept_while_a_worker_is_killed(installation: Installation) -> None:
    """And nothing is refused: the gateway was not touched."""
    loading = asyncio.create_task(installation.load(LOAD.read_text(), *("--seconds", "8", "--refusals-max", "0")))

    async def is_loaded() -> bool:
        return any([(await worker.read_metrics())["towline_bridge_sockets"] for worker in installation.stack.workers])

    await eventually(is_loaded, WITHIN_S)
    worker = max(installation.stack.workers, key=lambda worker: worker.name)
    worker.kill()
    loaded = await loading
    await worker.stop()
    await worker.start_ready()
    assert loaded.code == 0, loaded.out
    assert loaded.out.count("  ok  ") == 10, loaded.out
    assert "jobs completed: expected 0" not in loaded.out


@pytest.mark.parametrize(
    ("promise", "kept", "broken"),
    [
        ("jobs executed once", "self.executions[mark] += 1", "self.executions[mark] += 2"),
        ("events missing", 'seen.append(json.loads(item.data)["n"])', "pass"),
        ("events twice or out of order", 'seen.append(json.loads(item.data)["n"])', "seen += [1, 1]"),
        ("second answers that differ", """f'"{key}"'""", """f'"{key}-{time.monotonic_ns()}"'"""),
    ],
)
async def test_a_promise_that_is_broken_fails_it(
    installation: Installation, promise: str, kept: str, broken: str
) -> None:
    """Played by a program that does, or sees, something else than what happened."""
    program = LOAD.read_text()
    assert program.count(kept) == 1
    loaded = await installation.load(program.replace(kept, broken), *("--seconds", "1"))
    assert loaded.code == 1, loaded.out
    assert f"VIOLATED  {promise}" in loaded.out
