"""Lists, page by page: `?limit=` and an opaque `?cursor=`, which says where the last item seen stands in its order."""

import base64
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.ids import AgentId, RunId, TurnId
from common.store.agents import Agent
from common.store.runs import Run
from common.store.threads import Entry
from common.store.usage import UsageRow
from gateway import problems
from gateway.http import Parameter
from gateway.problems import Refusal
from gateway.request import Request
from towline.wire.api import PAGE_ITEMS_DEFAULT, PAGE_ITEMS_MAX, Page
from towline.wire.ids import ID_PATTERN

Row = TypeVar("Row")
Item = TypeVar("Item")

# The 16 bytes of an id of ours in base64, whose last character has two bits to give.
_UUID = "[A-Za-z0-9_-]{21}[AQgw]"
# Milliseconds since the Unix epoch in hexadecimal.
_TIME = "[0-9a-f]{11}"
_CURSOR = re.compile(f"^{_UUID}$")
_CURSOR_OF_RUN = re.compile(f"^({_TIME})-({ID_PATTERN})$")
_CURSOR_OF_AGENT = re.compile(f"^{ID_PATTERN}$")
_CURSOR_OF_ENTRY = re.compile("^[1-9][0-9]{0,17}$")
_CURSOR_OF_USAGE = re.compile(f"^({_TIME})-({_UUID})-([a-z0-9._:-]{{1,200}})$")


def _parameters(cursor: re.Pattern[str]) -> tuple[Parameter, ...]:
    return (
        Parameter(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": PAGE_ITEMS_MAX, "default": PAGE_ITEMS_DEFAULT},
            "most items on the page",
        ),
        Parameter("cursor", {"type": "string", "pattern": cursor.pattern}, "`next_cursor` of the page before; opaque"),
    )


# Of lists of what has an id of ours.
PARAMETERS = _parameters(_CURSOR)
PARAMETERS_OF_RUNS = _parameters(_CURSOR_OF_RUN)
PARAMETERS_OF_AGENTS = _parameters(_CURSOR_OF_AGENT)
PARAMETERS_OF_ENTRIES = _parameters(_CURSOR_OF_ENTRY)
PARAMETERS_OF_USAGE = _parameters(_CURSOR_OF_USAGE)


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
    found = _cursor(request, _CURSOR)
    return None if found is None else _id_of(found[0])


def page(rows: Sequence[Row], size: int, view: Callable[[Row], Item], id_of: Callable[[Row], str]) -> Page[Item]:
    """Make a page of `size` from rows that were read one further, to know whether there is a next one."""
    return _page(rows, size, view, lambda row: _text_of(id_of(row)))


def before_run(request: Request) -> tuple[int, RunId] | None:
    """The run that `?cursor=` stands for, as its `created_ms` and id; None starts at the newest. Raises: Refusal."""
    found = _cursor(request, _CURSOR_OF_RUN)
    return None if found is None else (int(found[1], 16), RunId(found[2]))


def page_of_runs(rows: Sequence[Run], size: int, view: Callable[[Run], Item]) -> Page[Item]:
    """As `page`, for runs."""
    return _page(rows, size, view, lambda row: f"{row.created_ms:011x}-{row.run}")


def after_agent(request: Request) -> AgentId | None:
    """The agent that `?cursor=` stands for; None starts at the first name. Raises: Refusal."""
    found = _cursor(request, _CURSOR_OF_AGENT)
    return None if found is None else AgentId(found[0])


def page_of_agents(rows: Sequence[Agent], size: int, view: Callable[[Agent], Item]) -> Page[Item]:
    """As `page`, for agents."""
    return _page(rows, size, view, lambda row: row.agent)


def after_position(request: Request) -> int:
    """The entry that `?cursor=` stands for, by its position; 0 starts at the first. Raises: Refusal."""
    found = _cursor(request, _CURSOR_OF_ENTRY)
    return 0 if found is None else int(found[0])


def page_of_entries(rows: Sequence[Entry], size: int, view: Callable[[Entry], Item]) -> Page[Item]:
    """As `page`, for entries."""
    return _page(rows, size, view, lambda row: f"{row.position}")


def before_usage(request: Request) -> tuple[int, TurnId, str] | None:
    """The row that `?cursor=` stands for: `at_ms`, turn and seam; None starts at the newest. Raises: Refusal."""
    found = _cursor(request, _CURSOR_OF_USAGE)
    return None if found is None else (int(found[1], 16), TurnId(_id_of(found[2])), found[3])


def page_of_usage(rows: Sequence[UsageRow], size: int, view: Callable[[UsageRow], Item]) -> Page[Item]:
    """As `page`, for usage."""
    return _page(rows, size, view, lambda row: f"{row.at_ms:011x}-{_text_of(row.turn)}-{row.seam}")


def _page(rows: Sequence[Row], size: int, view: Callable[[Row], Item], cursor_of: Callable[[Row], str]) -> Page[Item]:
    shown = rows[:size]
    return Page([view(row) for row in shown], cursor_of(shown[-1]) if len(rows) > size else None)


def _cursor(request: Request, pattern: re.Pattern[str]) -> re.Match[str] | None:
    text = request.query("cursor")
    if text is None:
        return None
    found = pattern.fullmatch(text)
    if found is None:
        raise Refusal(problems.INVALID_REQUEST, "the query parameter cursor is not a `next_cursor` of an earlier page")
    return found


def _text_of(id_: str) -> str:
    return base64.urlsafe_b64encode(uuid.UUID(id_).bytes).decode().rstrip("=")


def _id_of(text: str) -> str:
    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(text + "==")))
