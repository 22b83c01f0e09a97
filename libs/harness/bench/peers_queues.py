"""Task queues as peers: Celery, taskiq and arq, each with its workers in processes of their own.

Promises: a queue that polls is frozen while it is not under load, so that it does not cost the others; the client's CPU
          counts as the queue's, as submitting is half of its work.
"""

import asyncio
import dataclasses
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harness.bench.figures import Sample
from harness.bench.ground import LOAD_WITHIN_S, BenchFailed, Ground, Load
from harness.bench.peers import READY_WITHIN_S
from harness.bench.task_queues import READY, Plan
from harness.runner import Process

LIBS = Path(__file__).parents[2]
ARQ_REQUIREMENTS = LIBS.parent / "requirements" / "arq.txt"
TASKIQ_WORKERS = 2
# taskiq's workers do not leave while their queue is empty, and have nothing to finish.
STOP_WITHIN_S = 2.0


class TaskQueue:
    """One queue.

    Args:
        module: drives it, under `python`.
        polls: whether its workers ask Redis for work again and again.
    """

    def __init__(
        self, ground: Ground, module: str, workers: Process, *, python: str = sys.executable, polls: bool = False
    ) -> None:
        self._ground = ground
        self._module = module
        self._workers = workers
        self._python = python
        self._polls = polls
        self._rest()

    async def run(self, load: Load) -> Sample:
        """Put it under a load. Raises: BenchFailed."""
        plan = Plan(load.jobs, load.in_flight, load.seconds, LOAD_WITHIN_S)
        self._workers.thaw()
        try:
            sample = await self._ground.measure(
                [self._module, "drive"],
                plan,
                pids={"workers": self._workers.pid},
                python=self._python,
            )
        finally:
            self._rest()
        return dataclasses.replace(sample, cpu_us={"client": sample.driver_cpu_us, **sample.cpu_us}, driver_cpu_us=0.0)

    def _rest(self) -> None:
        if self._polls:
            self._workers.freeze()


@asynccontextmanager
async def open_celery(ground: Ground) -> AsyncIterator[TaskQueue]:
    """Run Celery's workers until the block ends. Raises: ProcessFailed."""
    module = "harness.bench.peers_celery"
    workers = ground.process("celery-workers", module, "work")
    async with _serving(workers, ready=1):
        yield TaskQueue(ground, module, workers)


@asynccontextmanager
async def open_taskiq(ground: Ground) -> AsyncIterator[TaskQueue]:
    """Run taskiq's workers until the block ends. Raises: ProcessFailed."""
    module = "harness.bench.peers_taskiq"
    workers = ground.process(
        *("taskiq-workers", "taskiq", "worker", f"{module}:broker", "--workers", str(TASKIQ_WORKERS)),
        *("--ack-type", "when_saved", "--max-prefetch", "100", "--no-parse", "--log-level", "WARNING"),
    )
    async with _serving(workers, ready=TASKIQ_WORKERS):
        yield TaskQueue(ground, module, workers)


@asynccontextmanager
async def open_arq(ground: Ground) -> AsyncIterator[TaskQueue]:
    """Run arq's worker until the block ends, in an environment of its own. Raises: BenchFailed, ProcessFailed."""
    module, python = "harness.bench.peers_arq", await _arq_environment(ground.directory.parent / "arq")
    workers = ground.process("arq-worker", module, "work", python=python)
    async with _serving(workers, ready=1):
        yield TaskQueue(ground, module, workers, python=python, polls=True)


@asynccontextmanager
async def _serving(workers: Process, *, ready: int) -> AsyncIterator[None]:
    async def is_ready() -> bool:
        return workers.read_log().count(READY) >= ready

    await workers.start()
    try:
        await workers.wait_ready(is_ready, within_s=READY_WITHIN_S)
        yield
    finally:
        await workers.stop(within_s=STOP_WITHIN_S)


async def _arq_environment(directory: Path) -> str:
    """Make the environment that arq needs, unless it is there; returns its Python. Raises: BenchFailed."""
    python, stamp = directory / "bin" / "python", directory / "requirements.sha256"
    wanted = hashlib.sha256(ARQ_REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        await _run(sys.executable, "-m", "venv", "--clear", str(directory))
        await _run(
            *(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--require-hashes", "-r", str(ARQ_REQUIREMENTS)),
        )
        (site,) = directory.glob("lib/python*/site-packages")
        (site / "harness.pth").write_text(f"{LIBS}\n")
        stamp.write_text(wanted)
    return str(python)


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise BenchFailed(f"{' '.join(command)} ended with {process.returncode}: {output.decode()[-2000:]}")
