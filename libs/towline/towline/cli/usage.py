"""`towline usage`: what turns used, by thread, agent or day."""

from datetime import datetime
from typing import Annotated

import typer

from towline.cli.connection import DEFAULT_URL, LimitOption, UrlOption, call, collect
from towline.cli.terminal import JsonFlag, examples, write_json, write_table
from towline.wire.threads import Usage

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(
    "usage",
    epilog=examples(
        "towline usage --thread 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11",
        "towline usage --agent helper --day 2026-01-31 --limit 1000 --json",
    ),
)
def usage(
    *,
    thread: Annotated[str | None, typer.Option(metavar="THREAD", help="Only turns of this thread.")] = None,
    agent: Annotated[str | None, typer.Option(metavar="AGENT", help="Only turns that this agent answered.")] = None,
    day: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="Only turns that ended on this day, UTC."),
    ] = None,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show what ended turns used, newest first: tokens, calls, seconds. The last line adds up those that are shown."""
    wanted_day = None if day is None else day.date()
    rows = call(url, lambda client: collect(client.usage(thread=thread, agent=agent, day=wanted_day, limit=limit)))
    if as_json:
        for row in rows:
            write_json(row)
        return
    write_table(
        ("ended", "thread", "turn", "agent", "seam", "model", "tokens in", "out", "model calls", "tool calls", "took"),
        [*map(_cells, rows), _total(rows)] if rows else [],
        empty="no usage",
    )


def _cells(row: Usage) -> tuple[str, ...]:
    return (
        row.ended_at,
        row.thread,
        row.turn,
        row.agent,
        row.seam,
        row.model or "",
        str(row.input_tokens),
        str(row.output_tokens),
        str(row.model_calls),
        str(row.tool_calls),
        f"{row.seconds:.3f} s",
    )


def _total(rows: list[Usage]) -> tuple[str, ...]:
    return (
        "total",
        f"{len({row.thread for row in rows})} threads",
        f"{len({row.turn for row in rows})} turns",
        "",
        "",
        "",
        str(sum(row.input_tokens for row in rows)),
        str(sum(row.output_tokens for row in rows)),
        str(sum(row.model_calls for row in rows)),
        str(sum(row.tool_calls for row in rows)),
        f"{sum(row.seconds for row in rows):.3f} s",
    )
