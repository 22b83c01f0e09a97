"""`towline threads`: begin a thread, read it, say something and watch the answer come."""

import contextlib
import sys
from typing import Annotated

import msgspec
import typer

from towline.cli.answer import Answers, JsonLines, Writer
from towline.cli.connection import DEFAULT_URL, LimitOption, UrlOption, call, collect, key_to_use
from towline.cli.conversation import (
    KeyOption,
    OnBusyOption,
    PostedEntry,
    TextArgument,
    ThreadArgument,
    exit_code,
    given_text,
    write_entries,
    write_thread,
)
from towline.cli.terminal import Exit, JsonFlag, examples, note, write_json, write_table
from towline.client import Break, Client
from towline.wire.threads import Posted, Turn

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Talk with agents.")


@app.command(epilog=examples("towline threads create helper --user alice", "towline threads create helper --json"))
def create(
    agent: Annotated[str, typer.Argument(help="Name of the agent that answers; see `towline agents list`.")],
    *,
    user: Annotated[
        str | None, typer.Option(help="Whose machine the agent's tools run on; without one it has no tools.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model in place of the agent's own.")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Begin a thread; its id is written to standard output."""
    thread = call(url, lambda client: client.create_thread(agent, user=user, model=model))
    if as_json:
        write_json(thread)
    else:
        print(thread.thread)


@app.command(epilog=examples("towline threads show 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11"))
def show(thread: ThreadArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show a thread with its newest entries: how each turn stands, its attempts, whether its key came again."""
    view = call(url, lambda client: client.read_thread(thread))
    if as_json:
        write_json(view)
        return
    write_thread(view)
    write_entries(view)


@app.command("list", epilog=examples("towline threads list --agent helper --user alice"))
def list_(
    *,
    agent: Annotated[str | None, typer.Option(help="Only threads of this agent.")] = None,
    user: Annotated[str | None, typer.Option(help="Only threads of this user.")] = None,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List threads, newest first."""
    threads = call(url, lambda client: collect(client.list_threads(agent=agent, user=user, limit=limit)))
    if as_json:
        for thread in threads:
            write_json(thread)
        return
    write_table(
        ("thread", "agent", "user", "model", "created", "last used"),
        [(t.thread, t.agent, t.user or "", t.model or "", t.created_at, t.used_at) for t in threads],
        empty="no threads",
    )


@app.command(
    epilog=examples(
        "towline threads say 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11 'Which of my files are about taxes?'",
        "towline threads say 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11 - --key order-17 < question.txt",
    )
)
def say(
    thread: ThreadArgument,
    text: TextArgument,
    *,
    key: KeyOption = None,
    on_busy: OnBusyOption = "queue",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Say something and show the answer as it comes, until the turn has ended; lost connections are resumed.

    A terminal shows the answer live; an attempt that begins again voids what was shown. A pipe gets the answer once, at
    the end. With --json each line is an event, or `{gap: ...}` where events are missing; the first is `{posted: ...}`
    and the last `{turn: ...}`. Ctrl-C ends the watching, not the turn.

    Ends with 0 when it was answered, 1 when the turn failed or was cancelled, 130 after Ctrl-C.
    """
    said = given_text(text)
    used_key = key_to_use(key)
    writer: Writer = JsonLines() if as_json else Answers(is_live=sys.stdout.isatty())
    posted: Posted | None = None
    ended: Turn | None = None
    if not as_json:
        note(f"key {used_key}")

    async def post_and_follow(client: Client) -> None:
        nonlocal posted, ended
        posted = await client.post_entry(thread, said, idempotency_key=used_key, on_busy=on_busy)
        if as_json:
            entry = PostedEntry(**msgspec.structs.asdict(posted), idempotency_key=used_key)
            print(msgspec.json.encode({"posted": entry}).decode(), flush=True)
        elif posted.turn.payload_matches is False:
            note("this key was first used with another text; what follows is the answer to that one")
        async with contextlib.aclosing(client.follow_turn(posted.turn, on_break=_say_break)) as items:
            async for item in items:
                writer.write(item)
                ended = item if isinstance(item, Turn) else None

    try:
        call(url, post_and_follow, doing=None)
    except KeyboardInterrupt:
        note(_how_to_go_on(posted, used_key))
        raise typer.Exit(Exit.INTERRUPTED) from None
    assert ended is not None
    raise typer.Exit(exit_code(ended))


def _how_to_go_on(posted: Posted | None, key: str) -> str:
    if posted is None:
        return f"nobody knows whether it was posted: the same with --key {key} finds out"
    return f"the turn goes on: towline entries read {posted.turn.thread} --turn {posted.turn.turn}"


def _say_break(lost: Break) -> None:
    note(f"{lost.reason}; resuming in {lost.pause_s:.1f} s")
