"""Stand-ins as processes of their own: the program's side, and the side of the harness that runs it.

Owns:     the process of a stand-in, and the HTTP client that speaks to its control API, while it is `running`.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.loopback import LoopbackServer
from harness.ports import free_port, is_http_ready
from harness.runner import Process

READY_WITHIN_S = 20.0
# It answers at once, unless it is saying thousands of events a second on half a core.
ANSWER_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class StandIn:
    """A stand-in that runs. `http`: a client whose base URL is its root, `url`."""

    url: str
    http: httpx.AsyncClient


@asynccontextmanager
async def running_stand_in(module: str, directory: Path, name: str) -> AsyncIterator[StandIn]:
    """Run `python -m {module}`, with its log in `directory`, for as long as the context lasts.

    Raises:
        ProcessFailed: it did not get ready.
    """
    port = free_port()
    argv = [sys.executable, "-m", module, "--port", str(port)]
    process = Process(name, argv, directory=directory, env={})
    await process.start()
    try:
        await process.wait_ready(lambda: is_http_ready(port), within_s=READY_WITHIN_S)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_WITHIN_S) as http:
            yield StandIn(url, http)
    finally:
        await process.stop()


def serve_until_stopped(make: Callable[[int], LoopbackServer], description: str) -> None:
    """Be the program of a stand-in: serve on `--port` until SIGTERM or SIGINT; print the port once it listens."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--port", type=int, default=0, help="a loopback port; 0 takes any free one")
    port: int = parser.parse_args().port

    async def serve() -> None:
        async with make(port) as server:
            print(f"listening on {server.host}:{server.port}", flush=True)
            await stop_signal()

    asyncio.run(serve())


async def stop_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    await stop.wait()
