"""What all calls of the client share: one request and its answer, lists in pages, waits in rounds, ids in paths.

Owns:     the transport, and how an answer becomes a struct.
Promises: what is not this API's is `GatewayUnreachable`, never a value; an id cannot leave its place in a path.
Used by:  the calls by noun: `jobs`, `machines`, `runs`, `agents`, `threads`, `turns`.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

import msgspec

from towline.transport import GatewayUnreachable, InvalidRequest, Method, Transport
from towline.wire.api import PAGE_ITEMS_DEFAULT, Page
from towline.wire.ids import is_id, parse_idempotency_key

# Before a wait goes on, growing from round to round: a replica that drains, or has no place for another waiter, answers
# at once, and must not be asked in a tight loop.
WAIT_PAUSE_FIRST_S = 0.1
WAIT_PAUSE_MAX_S = 2.0

T = TypeVar("T")


class Calls:
    """A gateway at the other end of a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _call(
        self,
        answer: type[T],
        method: Method,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
        wait_until: float = 0.0,
    ) -> T:
        response = await self._transport.request(
            method, path, params=params, body=body, headers=headers or {}, wait_until=wait_until
        )
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.DecodeError as error:
            raise GatewayUnreachable(f"{self._transport.url} gave an answer that is not this API's: {error}") from error

    async def _list(
        self, page_type: type[Page[T]], path: str, params: Mapping[str, str | None], limit: int | None
    ) -> AsyncIterator[T]:
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE_ITEMS_DEFAULT if left is None else min(left, PAGE_ITEMS_DEFAULT)
            given = {name: value for name, value in {**params, "cursor": cursor}.items() if value is not None}
            page = await self._call(page_type, "GET", path, params={"limit": str(size), **given})
            for item in page.items:
                yield item
            left = None if left is None else left - len(page.items)
            cursor = page.next_cursor
            if cursor is None:
                return


async def wait_for(item: T, is_over: Callable[[T], bool], read: Callable[[], Awaitable[T]], *, until: float) -> T:
    """Read something again until it is over, or until this monotonic time; returns what was read last.

    Args:
        read: is to wait at the gateway for what is left.
    """
    pause_max_s = WAIT_PAUSE_FIRST_S
    while not is_over(item) and (left_s := until - time.monotonic()) > 0:
        await asyncio.sleep(random.uniform(0, min(pause_max_s, left_s)))  # noqa: S311 (spread, no secret)
        pause_max_s = min(2 * pause_max_s, WAIT_PAUSE_MAX_S)
        item = await read()
    return item


def in_path(text: str, what: str) -> str:
    """Write an id as one segment of a path. Raises: InvalidRequest."""
    # Also keeps `..` and `/` out of the path.
    if not is_id(text):
        raise InvalidRequest(
            f"{text!r} is no {what} id: 1-200 characters of A-Z a-z 0-9 . _ : @ -, the first a letter or digit"
        )
    return quote(text, safe=":@")


def idempotency(key: str) -> dict[str, str]:
    """Write the header of a key. Raises: InvalidRequest."""
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    try:
        parse_idempotency_key([f'"{escaped}"'])
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return {"Idempotency-Key": f'"{escaped}"'}


def checked_event_id(text: str | None) -> str:
    """Take the id of an event as a header may carry it; None becomes the empty one. Raises: InvalidRequest."""
    if text is not None and not (text.isascii() and text.isprintable()):
        raise InvalidRequest(f"{text[:40]!r} is no event's id")
    return text or ""
