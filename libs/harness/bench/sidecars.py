"""Many users' sidecars in one process, as the load rows need them.

    python -m harness.bench.sidecars PLAN

Each is a whole `towline.sidecar.Sidecar` with a socket, a lane and a journal of its own, and logs as `towline sidecar
run` does, so that a job costs what it costs there.
"""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from towline.sidecar import Sidecar, tool
from towline.sidecar.builtin import echo, sleep

INFO = 20


class Laptop(msgspec.Struct, frozen=True):
    """One sidecar. `bridge_url`: the worker that it dials; `token`: a machine token, secret."""

    bridge_url: str
    token: str
    state_dir: str


@tool
async def note(value: str) -> str:
    """Give back the value, like `echo`, but without a hint: so it is marked and journalled."""
    return value


async def run(laptops: Sequence[Laptop]) -> None:
    """Serve until SIGTERM or SIGINT."""
    sidecars = [
        Sidecar(url=each.bridge_url, token=each.token, state_dir=Path(each.state_dir), tools=[echo, sleep, note])
        for each in laptops
    ]

    def stop() -> None:
        for sidecar in sidecars:
            sidecar.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        for sidecar in sidecars:
            group.create_task(sidecar.run())


def main(plan_path: str) -> None:
    """Read who is to be played, and forget the tokens' file."""
    plan = Path(plan_path)
    laptops = msgspec.json.decode(plan.read_bytes(), type=list[Laptop])
    plan.unlink()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    asyncio.run(run(laptops))


if __name__ == "__main__":
    main(*sys.argv[1:])
