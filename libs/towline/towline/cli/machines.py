"""`towline machines`: what is known of a user's machine, what it offers, and whether it answers."""

from typing import Any

import typer
from msgspec import UNSET
from rich.text import Text

from towline.cli.connection import DEFAULT_URL, UrlOption, UserArgument, call
from towline.cli.terminal import Exit, JsonFlag, examples, write_fields, write_json, write_table
from towline.wire.api import Presence
from towline.wire.frames import Hints, Tool

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Look at the machines of your users.")

STYLES = {"online": "green", "reconnecting": "yellow", "offline": "red", "unknown": "yellow"}


@app.command(epilog=examples("towline machines show alice"))
def show(user: UserArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show whether the user's machine is connected, and what waits for it."""
    presence = call(url, lambda client: client.presence(user))
    (write_json if as_json else _write_presence)(presence)


@app.command(epilog=examples("towline machines probe alice"))
def probe(user: UserArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Ask the machine itself; it answers also while a job runs. The exit code is 1 when it does not."""
    presence = call(url, lambda client: client.presence(user, probe=True), doing=f"asking the machine of {user}")
    (write_json if as_json else _write_presence)(presence)
    raise typer.Exit(Exit.OK if presence.probed is True else Exit.NOT_DONE)


@app.command(epilog=examples("towline machines tools alice", "towline machines tools alice --json"))
def tools(user: UserArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the tools that the user's machine announced when it connected last."""
    catalogue = call(url, lambda client: client.tools(user))
    if as_json:
        write_json(catalogue)
        return
    write_table(
        ("tool", "arguments", "hints", "description"),
        [(tool.name, _arguments(tool), _hints(tool.hints), tool.description) for tool in catalogue.tools],
        empty="no machine of this user has connected yet" if catalogue.machine is None else "this machine has no tools",
    )


def _write_presence(presence: Presence) -> None:
    write_fields(
        [
            ("state", Text(presence.state, style=STYLES.get(presence.state, ""))),
            ("since", presence.since),
            ("machine", presence.machine),
            ("worker", presence.worker),
            ("last seen", presence.last_seen_at),
            ("busy", None if presence.busy is None else ("yes" if presence.busy else "no")),
            ("queued", None if presence.queued is None else str(presence.queued)),
            ("probe", None if presence.probed is UNSET else _probe(presence)),
        ]
    )


def _probe(presence: Presence) -> str:
    if not presence.probed:
        return "no answer"
    return f"answered in {presence.rtt_ms:.1f} ms" if isinstance(presence.rtt_ms, float) else "answered"


def _arguments(tool: Tool) -> str:
    """The names of a schema's properties; optional ones end in `?`. Machines are not trusted to send a sound schema."""
    properties: Any = tool.input_schema.get("properties")
    required: Any = tool.input_schema.get("required")
    if not isinstance(properties, dict):
        return ""
    needed = required if isinstance(required, list) else []
    return ", ".join(name if name in needed else f"{name}?" for name in properties)


def _hints(hints: Hints) -> str:
    names = ("read_only", "idempotent", "destructive")
    return ", ".join(name.replace("_", "-") for name in names if getattr(hints, name))
