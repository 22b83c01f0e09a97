"""Insisting: a call to a store, repeated until it is answered."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from common.errors import StoreUnavailable
from common.process.backoff import Backoff

logger = structlog.get_logger(__name__)

T = TypeVar("T")


async def insist(what: str, call: Callable[[], Awaitable[T]], **ids: str) -> T:
    """Make a call that is safe to repeat, again and again while its store is away; whoever waits limits the time.

    Args:
        what: names the call in the log.
        ids: what it is about, for the log.
    """
    backoff = Backoff(first_s=0.05, cap_s=2.0)
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            logger.warning("store_awaited", call=what, **ids, error=str(error))
            await asyncio.sleep(backoff.next_s())
