"""`towline entries`: post to a thread without watching, and read it when its turn has ended."""

from typing import Annotated

import msgspec
import typer

from towline.cli.connection import DEFAULT_URL, UrlOption, call, key_to_use
from towline.cli.conversation import (
    KeyOption,
    OnBusyOption,
    PostedEntry,
    TextArgument,
    ThreadArgument,
    exit_code,
    given_text,
    write_entries,
    write_turn,
)
from towline.cli.terminal import Exit, JsonFlag, examples, note, write_json
from towline.client import Client
from towline.wire.threads import ThreadView, Turn

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Post entries, and read what was answered."
)


@app.command(epilog=examples("towline entries create 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11 'What is 2 + 2?' --json"))
def create(
    thread: ThreadArgument,
    text: TextArgument,
    *,
    key: KeyOption = None,
    on_busy: OnBusyOption = "queue",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Post an entry and return at once: its turn is under way, and ends whether anybody looks or not.

    With --json the document is `{entry, turn, idempotency_key}`.
    """
    said = given_text(text)
    used_key = key_to_use(key)
    if not as_json:
        note(f"key {used_key}")
    posted = call(url, lambda client: client.post_entry(thread, said, idempotency_key=used_key, on_busy=on_busy))
    if as_json:
        write_json(PostedEntry(**msgspec.structs.asdict(posted), idempotency_key=used_key))
    else:
        write_turn(posted.turn)


@app.command(
    epilog=examples(
        "towline entries read 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11",
        "towline entries read 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11 --wait 0 --json",
    )
)
def read(
    thread: ThreadArgument,
    *,
    turn: Annotated[str | None, typer.Option(metavar="TURN", help="Wait for this turn; by default the newest.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="How long to wait; by default until the turn has ended, at its cap.",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Wait until the thread's newest turn has ended, then show the newest entries and how their turns ended.

    Ends with 0 when that turn was answered (or there is none), 1 when it failed or was cancelled, 5 when the wait was
    over first.
    """
    wait_s = float("inf") if wait is None else wait

    async def wait_and_read(client: Client) -> tuple[Turn | None, ThreadView]:
        view = await client.read_thread(thread)
        wanted = [turn] if turn is not None else [entry.turn for entry in view.entries if entry.role == "user"]
        if not wanted:
            return None, view
        found = await client.read_turn(wanted[-1], wait_s=wait_s)
        if found.thread != view.thread:
            raise typer.BadParameter(f"it is a turn of thread {found.thread}", param_hint="--turn")
        return found, await client.read_thread(thread)

    try:
        found, view = call(url, wait_and_read, doing="waiting for the end of the turn")
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    (write_json if as_json else write_entries)(view)
    raise typer.Exit(Exit.OK if found is None else exit_code(found))
