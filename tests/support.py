"""What tests of several areas share."""

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")

POLL_EVERY_S = 0.01


async def eventually(condition: Callable[[], T | Awaitable[T]], within_s: float = 10.0) -> T:
    """Wait until `condition`, a plain or async callable, gives something true, and return that.

    Raises:
        AssertionError: it did not within `within_s`; the message has what it gave or raised last. An AssertionError
            raised by the condition counts as not yet; every other error is raised at once.
    """
    deadline = time.monotonic() + within_s
    while True:
        seen: object
        try:
            result = condition()
            value = await result if inspect.isawaitable(result) else result
            if value:
                return value
            seen = value
        except AssertionError as error:
            seen = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s; last: {seen!r}")
        await asyncio.sleep(POLL_EVERY_S)


def redis_database(url: str, number: int) -> str:
    """The URL of a database of this test process: embedded servers are its own, one given by URL is shared."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    shared_with_others = 16 * process if os.environ.get("REDIS_URL") else 0
    return urlunsplit(urlsplit(url)._replace(path=f"/{number + shared_with_others}"))
