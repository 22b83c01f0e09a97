"""Lists, page by page: `?limit=` and an opaque `?cursor=`, which is the id of the last item seen (of a run, whose id
its caller chose, with the time before it)."""

import base64
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.ids import RunId
from common.store.runs import Run
from gateway import problems
from gateway.http import Parameter
from gateway.problems import Refusal
from gateway.request import Request
from towline.wire.api import PAGE_ITEMS_DEFAULT, PAGE_ITEMS_MAX, Page

Row = TypeVar("Row")
Item = TypeVar("Item")

# The 16 bytes of an id in base64, whose last character has two bits to give.
_CURSOR = re.compile("^[A-Za-z0-9_-]{21}[AQgw]$")
# Milliseconds since the Unix epoch in hexadecimal, and the id.
_CURSOR_OF_RUN = re.compile("^([0-9a-f]{11})-([A-Za-z0-9][A-Za-z0-9._:@-]{0,199})$")


def _parameters(cursor: re.Pattern[str]) -> tuple[Parameter, ...]:
    return (
        Parameter(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": PAGE_ITEMS_MAX, "default": PAGE_ITEMS_DEFAULT},
            "most items on the page",
        ),
        Parameter("cursor", {"type": "string", "pattern": cursor.pattern}, "`next_cursor` of the page before; opaque"),
    )


PARAMETERS = _parameters(_CURSOR)
PARAMETERS_OF_RUNS = _parameters(_CURSOR_OF_RUN)


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
        raise _no_cursor()
    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(text + "==")))


def page(rows: Sequence[Row], size: int, view: Callable[[Row], Item], id_of: Callable[[Row], str]) -> Page[Item]:
    """Make a page of `size` from rows that were read one further, to know whether there is a next one."""
    shown = rows[:size]
    cursor = None
    if len(rows) > size:
        cursor = base64.urlsafe_b64encode(uuid.UUID(id_of(shown[-1])).bytes).decode().rstrip("=")
    return Page([view(row) for row in shown], cursor)


def before_run(request: Request) -> tuple[int, RunId] | None:
    """The run that `?cursor=` stands for, as its `created_ms` and id; None starts at the newest. Raises: Refusal."""
    text = request.query("cursor")
    if text is None:
        return None
    found = _CURSOR_OF_RUN.fullmatch(text)
    if found is None:
        raise _no_cursor()
    return int(found[1], 16), RunId(found[2])


def page_of_runs(rows: Sequence[Run], size: int, view: Callable[[Run], Item]) -> Page[Item]:
    """As `page`, for runs."""
    shown = rows[:size]
    cursor = f"{shown[-1].created_ms:011x}-{shown[-1].run}" if len(rows) > size else None
    return Page([view(row) for row in shown], cursor)


def _no_cursor() -> Refusal:
    return Refusal(problems.INVALID_REQUEST, "the query parameter cursor is not a `next_cursor` of an earlier page")
