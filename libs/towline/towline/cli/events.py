"""How a run's events look: lines for people, coloured on a terminal, or JSON lines for programs.

Promises: a line is written out at once, also into a pipe, and no event's text can steer the terminal.
Used by:  `towline runs follow`.
"""

import sys
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from rich.console import Console
from rich.text import Text

from towline.cli.terminal import plain
from towline.client import End, Gap, RunEvent, RunItem
from towline.wire import events

STATE_STYLES = {
    "active": "cyan",
    "stalled": "yellow",
    "orphaned": "yellow",
    "stopping": "yellow",
    "completed": "green",
    "failed": "red",
    "stopped": "red",
    "expired": "red",
}
OWN_STYLE = "yellow"
PROGRESS_STYLE = "cyan"
SOURCE_CHARACTERS_MIN = 10
TYPE_CHARACTERS_MIN = 12


class Writer(Protocol):
    """Writes items to standard output as they come."""

    def write(self, item: RunItem) -> None: ...


class JsonLines:
    """One JSON object a line: an event as it is, or `{"gap": ...}`, or `{"end": ...}`."""

    def write(self, item: RunItem) -> None:
        """Write one line."""
        document = {"gap": item} if isinstance(item, Gap) else {"end": item} if isinstance(item, End) else item
        sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
        sys.stdout.buffer.flush()


class Lines:
    """Time, source, type and data of an event, on one line however many the data has."""

    def __init__(self, *, with_run: bool) -> None:
        """Args: with_run: begin each line with the run's id."""
        self._console = Console(highlight=False)
        self._with_run = with_run

    def write(self, item: RunItem) -> None:
        """Write one line; a terminal breaks it where it is too long."""
        text = Text()
        if self._with_run:
            text.append(f"{plain(item.run)}  ", style="bold")
        if isinstance(item, RunEvent):
            _event(text, item)
        elif isinstance(item, Gap):
            text.append("events are missing here; those that follow may repeat earlier ones", style="bold red")
        else:
            text.append(f"the run has ended: {plain(item.state)}", style=f"bold {STATE_STYLES.get(item.state, '')}")
        self._console.print(text, soft_wrap=True)


def _event(text: Text, event: RunEvent) -> None:
    is_own = events.is_own(event.type)
    style = OWN_STYLE if is_own else PROGRESS_STYLE if events.is_progress(event.type) else ""
    text.append(f"{_time(event.ts)}  ", style="dim")
    text.append(f"{plain(event.source):<{SOURCE_CHARACTERS_MIN}}  ")
    text.append(f"{plain(event.type):<{TYPE_CHARACTERS_MIN}}  ", style=style)
    text.append(plain(" ".join(event.data.split("\n"))))


def _time(ts_ms: int) -> str:
    try:
        return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return str(ts_ms)
