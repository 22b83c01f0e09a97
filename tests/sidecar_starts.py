"""Sidecars for tests: in this process, or as processes of their own. None outlives its block."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sidecar_tools
import structlog
from support import eventually

from harness.stack import inherited_environment
from towline.sidecar import Sidecar

TOKEN = "tlm-secret-of-ada"


class Started(Sidecar):
    """A sidecar that runs in a task of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tools=sidecar_tools.ALL, **settings)
        self._running = asyncio.create_task(self.run())

    async def ended(self) -> None:
        """Stop it, and wait until it has."""
        self.stop()
        await asyncio.wait_for(asyncio.shield(self._running), 15)


Start = Callable[..., Started]


@asynccontextmanager
async def open_sidecars(url: str, directory: Path) -> AsyncIterator[Start]:
    """A function that starts one which dials `url`, with settings as of `Sidecar`; state in `directory`/state."""
    started: list[Started] = []
    sidecar_tools.release.clear()

    def start(**settings: Any) -> Started:
        if "token_file" not in settings:
            settings.setdefault("token", "secret")
        started.append(Started(**{"url": url, "state_dir": directory / "state", **settings}))
        return started[-1]

    yield start
    sidecar_tools.release.set()
    for sidecar in started:
        await sidecar.ended()


class Process:
    """`towline sidecar run` as a process.

    Attributes:
        log: what it wrote.
        variables: of its environment, beside the inherited ones.
    """

    def __init__(self, url: str, directory: Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self._arguments = arguments
        self.log = directory / f"log-{id(self):x}"
        self.variables = {
            "TOWLINE_TOKEN": TOKEN,
            "TOWLINE_BRIDGE_URL": url,
            "TOWLINE_STATE_DIR": str(directory / "state"),
            "TOWLINE_LOG_LEVEL": "debug",
            "EXECUTIONS": str(directory / "executions"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **variables,
        }

    async def start(self) -> "Process":
        """Start it; it need not have connected yet."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "towline.cli", "sidecar", "run", "--log-format", "json"),
                *("--tools", sidecar_tools.__file__, *self._arguments),
                env={**inherited_environment(), **self.variables},
                stdout=log,
                stderr=log,
            )
        return self

    async def ended(self, within_s: float = 15) -> int:
        """Wait for its end; the exit code."""
        return await asyncio.wait_for(self.process.wait(), within_s)

    async def kill(self) -> None:
        """SIGKILL, and it is gone."""
        self.process.kill()
        await self.process.wait()

    async def said(self, event: str, *, within_s: float = 15) -> None:
        """Wait for an event in the log."""
        await eventually(lambda: f'"event":"{event}"' in self.log.read_text(), within_s)


NewProcess = Callable[..., Process]


@asynccontextmanager
async def open_processes(url: str, directory: Path) -> AsyncIterator[NewProcess]:
    """A function that makes processes which dial `url`: arguments of the command line, and variables by name."""
    made: list[Process] = []

    def new(*arguments: str, **variables: str) -> Process:
        made.append(Process(url, directory, arguments, variables))
        return made[-1]

    yield new
    for one in made:
        if one.process.returncode is None:
            await one.kill()


@asynccontextmanager
async def logged() -> AsyncIterator[list[Any]]:
    """What sidecars of this process log meanwhile, as dictionaries."""
    with structlog.testing.capture_logs() as lines:
        yield lines
