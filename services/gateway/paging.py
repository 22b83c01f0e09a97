"""Lists, page by page: `?limit=` and an opaque `?cursor=`, which is the id of the last item seen."""

import base64
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway import problems
from gateway.http import Parameter, Request
from gateway.problems import Refusal
from towline.wire.api import PAGE_ITEMS_DEFAULT, PAGE_ITEMS_MAX, Page

Row = TypeVar("Row")
Item = TypeVar("Item")

# The 16 bytes of an id in base64, whose last character has two bits to give.
_CURSOR = re.compile("^[A-Za-z0-9_-]{21}[AQgw]$")
PARAMETERS = (
    Parameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": PAGE_ITEMS_MAX, "default": PAGE_ITEMS_DEFAULT},
        "most items on the page",
    ),
    Parameter(
        "cursor",
        {"type": "string", "pattern": _CURSOR.pattern},
        "`next_cursor` of the page before; opaque",
    ),
)


def limit(request: Request) -> int:
    """`?limit=`. Raises: Refusal."""
    text = request.query("limit")
    if text is None:
        return PAGE_ITEMS_DEFAULT
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= PAGE_ITEMS_MAX):
        raise Refusal(problems.INVALID_REQUEST, f"the query parameter limit is not a number from 1 to {PAGE_ITEMS_MAX}")
    return int(text)


def before(request: Request) -> str | None:
    """The id that `?cursor=` stands for; None starts at the newest. Raises: Refusal."""
    text = request.query("cursor")
    if text is None:
        return None
    if not _CURSOR.fullmatch(text):
        raise Refusal(problems.INVALID_REQUEST, "the query parameter cursor is not a `next_cursor` of an earlier page")
    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(text + "==")))


def page(rows: Sequence[Row], size: int, view: Callable[[Row], Item], id_of: Callable[[Row], str]) -> Page[Item]:
    """Make a page of `size` from rows that were read one further, to know whether there is a next one."""
    shown = rows[:size]
    cursor = None
    if len(rows) > size:
        cursor = base64.urlsafe_b64encode(uuid.UUID(id_of(shown[-1])).bytes).decode().rstrip("=")
    return Page([view(row) for row in shown], cursor)
