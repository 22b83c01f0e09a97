"""The command `towline`: every installed distribution of ours adds its commands by entry point.

Owns:     the root command and how the others are found: group `towline.commands`, each value a Typer app. It becomes
          `towline NAME COMMAND`, or `towline NAME` if its only command has the entry point's own name.
Promises: what another distribution brings is absent, not broken, where that one is not installed; only the module of
          the command that was called is imported, all of them for `towline --help`.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import typer

from towline import __version__
from towline.cli.terminal import EXIT_CODES

GROUP = "towline.commands"
# Packages that a distribution names in its commands and that may be missing: the harness is in no wheel.
OPTIONAL_PACKAGES = frozenset({"common", "gateway", "worker", "relay", "harness"})


def main() -> None:
    """Run `towline` with the arguments of this process; never returns."""
    points = list(entry_points(group=GROUP))
    called = [point for point in points if point.name in sys.argv[1:2]]
    root(called or points)()


def root(points: Iterable[EntryPoint]) -> typer.Typer:
    """Put the commands of these entry points together, by name."""
    app = typer.Typer(
        name="towline",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Run tools on your users' own machines, and look after the services that carry the calls.",
        epilog=EXIT_CODES,
    )
    # With one command alone Typer would drop its name; a callback keeps the name.
    app.callback()(_options)
    for point in sorted(points, key=lambda point: point.name):
        loaded = _load(point)
        if loaded is None:
            continue
        commands = loaded.registered_commands
        if [command.name for command in commands] == [point.name]:
            app.registered_commands.extend(commands)
        else:
            app.add_typer(loaded, name=point.name, epilog=EXIT_CODES)
    return app


def _load(point: EntryPoint) -> typer.Typer | None:
    try:
        loaded: typer.Typer = point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OPTIONAL_PACKAGES:
            return None
        raise
    return loaded


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"towline {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Take what stands before the command's name."""
