"""Calls: a tool's function, async or plain, as a coroutine that ends in an outcome.

Owns:     the threads in which plain functions run.
Promises: whatever a tool does (returns, raises, calls `sys.exit`) becomes an outcome; a plain function blocks neither
          the loop nor the end of the process.
Used by:  sidecar.work (call), sidecar.lane (is_confirmed).
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from towline.sidecar.outcome import JobOutcome, completed, raised
from towline.sidecar.tools import Confirm, LocalTool

T = TypeVar("T")


async def call(tool: LocalTool, kwargs: dict[str, Any]) -> JobOutcome:
    """Call the tool. Cancelling this stops an async tool if that lets itself be stopped; a plain one goes on.

    Raises:
        CancelledError: this was cancelled, or the tool cancelled itself.
    """
    if not tool.is_async:
        return await _in_thread(lambda: _outcome_of(tool, kwargs), name=f"tool:{tool.name}")
    try:
        value = await tool.function(**kwargs)
    # A tool that calls sys.exit() has failed; the sidecar has not.
    except (Exception, SystemExit) as error:
        return raised(error)
    return completed(value)


async def is_confirmed(confirm: Confirm, name: str, kwargs: dict[str, Any]) -> bool:
    """Ask the hook. A plain hook may wait for a person, so it gets a thread.

    Raises:
        Exception: whatever the hook raises.
    """
    if inspect.iscoroutinefunction(confirm):
        return bool(await confirm(name, kwargs))
    answer = await _in_thread(lambda: confirm(name, kwargs), name=f"confirm:{name}")
    return bool(await answer if inspect.isawaitable(answer) else answer)


def _outcome_of(tool: LocalTool, kwargs: dict[str, Any]) -> JobOutcome:
    try:
        value = tool.function(**kwargs)
    except (Exception, SystemExit) as error:
        return raised(error)
    return completed(value)


def _in_thread(function: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Run `function` in a daemon thread: executors are joined at exit, and a tool that hangs would hold the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = function()
        except BaseException as error:
            failure = error
        # The loop may have ended meanwhile; then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, value, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
