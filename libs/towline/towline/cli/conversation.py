"""A thread as people and programs read it, and what its turns make of the exit code.

Used by:  `towline threads`, `towline entries`.
"""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from towline.cli.answer import ending
from towline.cli.terminal import Exit, note, plain, write_fields
from towline.wire.threads import Entry, OnBusy, Posted, Thread, ThreadView, Turn

STATE_STYLES = {"queued": "cyan", "running": "cyan", "completed": "green", "failed": "red", "cancelled": "red"}
ROLE_STYLES = {"user": "bold", "agent": "bold green"}

ThreadArgument = Annotated[str, typer.Argument(help="The thread's id.")]
TextArgument = Annotated[str, typer.Argument(help="What to say; - reads it from standard input.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key: the same key is the same entry. By default a fresh one, shown."),
]
OnBusyOption = Annotated[
    OnBusy,
    typer.Option(help="While a turn of the thread is open: wait for it, refuse this entry, or cancel that turn first."),
]


class PostedEntry(Posted, frozen=True, kw_only=True):
    """What was posted, with the key under which it can be posted again."""

    idempotency_key: str


def given_text(text: str) -> str:
    """Return the text of an argument, or all of standard input for `-`."""
    return sys.stdin.read() if text == "-" else text


def exit_code(turn: Turn) -> Exit:
    """Sort a turn whose end was waited for into exit codes."""
    if not turn.terminal:
        return Exit.STILL_OPEN
    return Exit.OK if turn.state == "completed" else Exit.NOT_DONE


def write_thread(thread: Thread) -> None:
    """Show a thread to a person, without what was said."""
    write_fields(
        [
            ("thread", thread.thread),
            ("agent", thread.agent),
            ("user", thread.user),
            ("model", thread.model),
            ("created", thread.created_at),
            ("last used", thread.used_at),
        ]
    )


def write_entries(view: ThreadView) -> None:
    """Show what was said, and at each entry of the user how its turn stands."""
    if not view.entries:
        note("no entries")
        return
    turns = {turn.turn: turn for turn in view.turns}
    console = Console(highlight=False)
    for entry in view.entries:
        turn = turns.get(entry.turn) if entry.role == "user" else None
        console.print(_head(entry, turn), soft_wrap=True)
        console.print(Text(plain(entry.text)), soft_wrap=True)
        if turn is not None and turn.state not in ("completed", "queued", "running"):
            console.print(Text(plain(ending(turn)), style="red"), soft_wrap=True)


def write_turn(turn: Turn) -> None:
    """Show one turn to a person."""
    write_fields(
        [
            ("turn", turn.turn),
            ("thread", turn.thread),
            ("answers", turn.entry),
            ("agent", turn.agent),
            ("state", Text(ending(turn), style=STATE_STYLES.get(turn.state, ""))),
            ("attempts", str(turn.attempts)),
            ("accepted", turn.accepted_at),
            ("started", turn.started_at),
            ("ended", turn.ended_at),
            ("replayed", "yes: this key was accepted before" if turn.replayed else None),
            ("payload", "not the same as when this key was first used" if turn.payload_matches is False else None),
        ]
    )


def _head(entry: Entry, turn: Turn | None) -> Text:
    text = Text(f"#{entry.position} ", style="dim")
    text.append(entry.role, style=ROLE_STYLES.get(entry.role, ""))
    text.append(f"  {entry.created_at}", style="dim")
    if turn is not None:
        text.append(f"  {turn.state}", style=STATE_STYLES.get(turn.state, ""))
        marks = [f"attempts {turn.attempts}"] if turn.attempts > 1 else []
        marks += [f"replayed {turn.replays} times"] if turn.replays else []
        text.append("".join(f", {mark}" for mark in marks), style="yellow")
        text.append(f"  turn {turn.turn}", style="dim")
    return text
