"""The demonstration's timeline, what ends it early (a product that does not keep its word), and who comes back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console

from harness.stack import Service

KILLED_WITHIN_S = 10.0


class StepFailed(Exception):
    """The product did not do what the demonstration promises."""


class Timeline:
    """Lines with the time since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        after_s = time.monotonic() - self._began
        self._console.print(f"[dim]{after_s:6.2f} s[/dim]  {text}", highlight=False, soft_wrap=True)


def expect(condition: bool, what: str) -> None:
    """Raise `StepFailed` unless the product kept its word."""
    if not condition:
        raise StepFailed(what)


class Returns:
    """Services that were killed and come back while the timeline goes on; made by `open_returns`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, service: Service) -> None:
        """Start a service again, as what watches over it would."""
        task = asyncio.get_running_loop().create_task(self._bring_back(service), name=f"return:{service.name}")
        self._tasks.append(task)

    async def wait(self) -> None:
        """Wait until all are back. Raises: ProcessFailed."""
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Bring nobody back any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bring_back(self, service: Service) -> None:
        await service.wait(within_s=KILLED_WITHIN_S)
        await service.start_ready()
        self._say(f"{service.name} is back")


@asynccontextmanager
async def open_returns(say: Callable[[str], None]) -> AsyncIterator[Returns]:
    """Bring services back until the block ends: nothing is started once the stack below it is being stopped."""
    returns = Returns(say)
    try:
        yield returns
    finally:
        await returns.cancel()
