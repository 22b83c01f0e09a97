"""`towline runs`: have a run followed, watch its events live, see how it is, stop it."""

import asyncio
import time
from typing import Annotated

import typer
from rich.text import Text

from towline.cli.connection import DEFAULT_URL, LimitOption, UrlOption, call, collect
from towline.cli.events import STATE_STYLES, JsonLines, Lines, Writer
from towline.cli.sources import parse_sources
from towline.cli.terminal import Exit, JsonFlag, examples, note, write_fields, write_json, write_table
from towline.client import ApiProblem, Break, Client, End, GatewayUnreachable, RunEvent
from towline.wire.events import PROGRESS_TYPES, TERMINAL_TYPES
from towline.wire.runs import Run, RunSource, RunState

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Follow runs and watch their events.")

# A stream that is quiet for so long may be so because a source cannot be reached: then look, ever less often.
QUIET_S = 3.0
QUIET_MAX_S = 30.0

RunArgument = Annotated[str, typer.Argument(help="The run's id, as your product knows it.")]


@app.command(
    epilog=examples(
        "towline runs follow order-17",
        "towline runs follow order-17 order-18 --from-live",
        "towline runs follow order-17 --json | jq 'select(.type == \"result\")'",
    )
)
def follow(
    runs: Annotated[list[str], typer.Argument(help="Ids of 1 to 20 runs.", metavar="RUN...")],
    *,
    last_event_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on after this event; Ctrl-C says which one was the last.")
    ] = None,
    from_live: Annotated[bool, typer.Option("--from-live", help="Leave out what came before.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show events as they come, until the runs have ended; lost connections are resumed where they broke.

    Ends with 0 when all runs are completed, 1 when one ended otherwise, 130 after Ctrl-C. With --json each line is an
    event `{run, id, source, uid, ts, type, data}`, or `{gap: ...}` where events are missing, or `{end: ...}`.
    """
    writer: Writer = JsonLines() if as_json else Lines(with_run=len(runs) > 1)
    heard_at = time.monotonic()
    last_id = last_event_id
    states: dict[str, str] = {}

    async def write_events(client: Client) -> None:
        nonlocal last_id, heard_at
        wanted = runs[0] if len(runs) == 1 else runs
        async for item in client.events(
            wanted, last_event_id=last_event_id, from_="live" if from_live else "start", on_break=_say_break
        ):
            heard_at = time.monotonic()
            writer.write(item)
            if isinstance(item, RunEvent):
                last_id = item.id
            elif isinstance(item, End):
                states[item.run] = item.state
        for run in runs:
            # Whoever had seen the end before is not told again.
            if run not in states:
                states[run] = (await client.read_run(run)).state

    async def say_failures(client: Client) -> None:
        said: dict[tuple[str, str], str] = {}
        pause_s = QUIET_S
        while True:
            await asyncio.sleep(pause_s)
            if time.monotonic() - heard_at < QUIET_S:
                pause_s = QUIET_S
                continue
            pause_s = min(2 * pause_s, QUIET_MAX_S)
            for run in runs:
                try:
                    sources = (await client.read_run(run)).sources
                except (ApiProblem, GatewayUnreachable):
                    break  # what is wrong there, the stream says
                for source in sources:
                    if source.failure and said.get((run, source.source)) != source.failure:
                        said[run, source.source] = source.failure
                        note(f"{run}: source {source.source} cannot be read: {source.failure}; it is tried again")

    async def follow_all(client: Client) -> None:
        watching = asyncio.create_task(say_failures(client))
        try:
            await write_events(client)
        finally:
            watching.cancel()

    try:
        call(url, follow_all, doing=None)
    except KeyboardInterrupt:
        if last_id is not None:
            note(f"to go on from here: --last-event-id {last_id}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    raise typer.Exit(Exit.OK if set(states.values()) == {"completed"} else Exit.NOT_DONE)


@app.command(
    epilog=examples(
        "towline runs start order-17 --source planner=https://agent.internal/jobs/17/stream --resume ids",
        "towline runs start order-17 --source a=https://a/stream --source b=https://b/stream"
        " --resume ids --resume b=live --header a/Authorization=env:AGENT_A_AUTHORIZATION",
    )
)
def start(
    run: RunArgument,
    *,
    source: Annotated[
        list[str], typer.Option("--source", metavar="NAME=URL", help="An upstream event stream. Repeatable.")
    ],
    resume: Annotated[
        list[str],
        typer.Option(
            "--resume",
            metavar="[SOURCE=]HOW",
            help="How sources go on after a break: ids (Last-Event-ID), replay (they start anew, what was had is left"
            " out), live (what came meanwhile is lost). For all, or for one; repeatable.",
        ),
    ],
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="[SOURCE/]NAME=@FILE",
            help="Send this header upstream, with what the file holds; or NAME=env:VARIABLE. Never the value itself:"
            " arguments are visible to every user of the machine. Repeatable.",
        ),
    ] = None,
    progress_type: Annotated[
        list[str] | None,
        typer.Option(help=f"Type of events that are real work. Repeatable; by default {', '.join(PROGRESS_TYPES)}."),
    ] = None,
    terminal_type: Annotated[
        list[str] | None,
        typer.Option(help=f"Type of events that end their source. Repeatable; by default {', '.join(TERMINAL_TYPES)}."),
    ] = None,
    idle_timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="A source without any byte for so long has ended.")
    ] = 1800.0,
    stall_after_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Without real work for so long the run is reported stalled.")
    ] = 900.0,
    max_duration_s: Annotated[float, typer.Option(metavar="SECONDS", help="Then the run ends as expired.")] = 86_400.0,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Have a run's sources followed into one stream. The same call again changes nothing."""
    sources = parse_sources(source, resume, header or [], idle_timeout_s=idle_timeout_s)
    started = call(
        url,
        lambda client: client.follow_run(
            run,
            sources,
            progress_types=progress_type or PROGRESS_TYPES,
            terminal_types=terminal_type or TERMINAL_TYPES,
            stall_after_s=stall_after_s,
            max_duration_s=max_duration_s,
        ),
    )
    (write_json if as_json else write_run)(started)


@app.command(epilog=examples("towline runs stop order-17"))
def stop(run: RunArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Stop following a run; its stream ends with `stopped`. One that has ended stays as it is."""
    stopped = call(url, lambda client: client.stop_run(run))
    (write_json if as_json else write_run)(stopped)


@app.command(epilog=examples("towline runs show order-17"))
def show(run: RunArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show how a run is: who follows it, and of each source its last sign of life and its last real work."""
    found = call(url, lambda client: client.read_run(run))
    (write_json if as_json else write_run)(found)


@app.command("list", epilog=examples("towline runs list --state stalled", "towline runs list --json"))
def list_(
    *,
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List runs, newest first."""
    found = call(url, lambda client: collect(client.list_runs(state=state, limit=limit)))
    if as_json:
        for run in found:
            write_json(run)
        return
    write_table(
        ("run", "state", "reason", "sources", "created", "ended"),
        [(r.run, _state(r.state), r.reason or "", str(len(r.sources)), r.created_at, r.ended_at or "") for r in found],
        empty="no runs",
    )


def write_run(run: Run) -> None:
    """Show one run to a person."""
    write_fields(
        [
            ("run", run.run),
            ("state", _state(run.state)),
            ("reason", run.reason),
            ("followed by", None if run.terminal else run.owner or "no relay"),
            ("created", run.created_at),
            ("ended", run.ended_at),
            ("real work", ", ".join(run.progress_types)),
            ("ends with", ", ".join(run.terminal_types)),
            ("stalled after", f"{run.stall_after_s:g} s"),
            ("expires after", f"{run.max_duration_s:g} s"),
        ]
    )
    write_table(
        ("source", "is", "connected", "sign of life", "real work", "resumes by", "url"),
        [_source_row(source) for source in run.sources],
        empty="no sources",
    )


def _source_row(source: RunSource) -> tuple[str | Text, ...]:
    state = source.state or source.verdict
    why = source.failure or ": ".join(part for part in (source.reason, source.detail) if part)
    connected = {True: "yes", False: "no", None: ""}[source.connected]
    return (
        source.source,
        Text.assemble(_state(state), f" ({why})" if why else ""),
        connected,
        source.live_at or "",
        source.progress_at or "",
        source.resume,
        source.url,
    )


def _say_break(lost: Break) -> None:
    note(f"{lost.reason}; resuming in {lost.pause_s:.1f} s")


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))
