"""What all commands share on the terminal: exit codes, tables for people, JSON for programs, one line for an error.

Promises: standard output has results only, everything else goes to standard error; text that comes from a machine or
          a server cannot steer the terminal it is shown on.
Used by:  every command, those of `towline-services` included.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Wide enough that a table in a pipe or file is not folded.
PIPE_COLUMNS = 240


class Exit(IntEnum):
    """Exit codes."""

    OK = 0
    NOT_DONE = 1
    USAGE = 2
    REFUSED = 3
    UNAVAILABLE = 4
    STILL_OPEN = 5
    INTERRUPTED = 130  # as shells report a program that Ctrl-C has ended


EXIT_CODES = (
    "Exit codes: 0 ok; 1 the job or turn failed, expired, was cancelled, or may or may not have run (unknown), or a"
    " probe was not answered; 2 wrong usage or settings; 3 refused (4xx); 4 no answer or not available (5xx, network,"
    " stores); 5 the wait was over before the job or turn ended; 130 Ctrl-C."
)

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Write JSON for programs: one document, or one line per item of a list.")
]


def examples(*commands: str) -> str:
    """Write the epilog of a command's help. Square brackets would be read as markup."""
    return "\n\n".join(["Examples:", *(f"  {command}" for command in commands)])


def fail(code: Exit, message: str) -> NoReturn:
    """Say in one line on standard error what went wrong, and end with this exit code."""
    note(f"towline: {' '.join(message.split())}")
    raise typer.Exit(code)


def note(message: str) -> None:
    """Write one line to standard error: not a result, so no program reads it."""
    print(plain(message), file=sys.stderr)


def plain(text: str) -> str:
    """Replace control characters, which could move the cursor or change what stands on the screen."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def write_json(value: Any) -> None:
    """Write one document in one line; outcomes keep their own bytes."""
    print(msgspec.json.encode(value).decode())


def write_fields(fields: Iterable[tuple[str, str | Text | None]]) -> None:
    """Show one thing: a name and a value per line; a value of None is left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        if value is not None:
            table.add_row(name, _cell(value))
    _console().print(table)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, empty: str) -> None:
    """Show a list; without rows only the remark `empty`, on standard error."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        note(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*row)
    _console().print(table)


def progress(message: str) -> AbstractContextManager[object]:
    """Show that something is waited for, on standard error and only if that is a terminal."""
    console = Console(stderr=True)
    return console.status(Text(plain(message))) if console.is_terminal else nullcontext()


def _cell(value: str | Text) -> Text:
    return value if isinstance(value, Text) else Text(plain(value))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
