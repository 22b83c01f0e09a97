"""`towline turns`: see how one answer comes along, or have it stopped."""

from typing import Annotated

import typer

from towline.cli.connection import DEFAULT_URL, UrlOption, call
from towline.cli.conversation import exit_code, write_turn
from towline.cli.terminal import Exit, JsonFlag, examples, write_json

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Look at turns, and stop them.")

TurnArgument = Annotated[str, typer.Argument(help="The turn's id, as `towline threads show` has it.")]


@app.command(
    epilog=examples(
        "towline turns show 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11",
        "towline turns show 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11 --wait 60 --json",
    )
)
def show(
    turn: TurnArgument,
    *,
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait for its end so long.")] = 0.0,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show how a turn stands; it goes on whether anybody looks or not.

    Ends with 0 when it was answered or is open, 1 when it failed or was cancelled, 5 when the wait was over first.
    """
    try:
        found = call(url, lambda client: client.read_turn(turn, wait_s=wait))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    (write_json if as_json else write_turn)(found)
    raise typer.Exit(exit_code(found) if wait or found.terminal else Exit.OK)


@app.command(epilog=examples("towline turns cancel 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11"))
def cancel(turn: TurnArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Cancel a turn: at once if nobody runs it, else its worker is told. One that has ended stays as it is."""
    told = call(url, lambda client: client.cancel_turn(turn))
    (write_json if as_json else write_turn)(told)
