"""`towline jobs`: submit a tool call to a user's machine, read, list and cancel."""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import UNSET
from rich.text import Text

from towline.cli.connection import DEFAULT_URL, LimitOption, UrlOption, UserArgument, call, collect, key_to_use
from towline.cli.terminal import (
    Exit,
    JsonFlag,
    examples,
    note,
    plain,
    write_fields,
    write_json,
    write_table,
)
from towline.client import outcome_of
from towline.wire import json
from towline.wire.api import Job, JobState

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Run tools on a user's machine.")

STYLES = {"completed": "green", "failed": "red", "unknown": "yellow", "expired": "red", "cancelled": "red"}

JobArgument = Annotated[str, typer.Argument(help="The job's id.")]
WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for the job's end, in all.")
]


class SubmittedJob(Job, frozen=True, kw_only=True):
    """A job with the key under which it can be asked for again."""

    idempotency_key: str


@app.command(
    epilog=examples(
        "towline jobs submit alice echo --arg value=hello",
        "towline jobs submit alice http_get --arg url=http://wiki.local/ --wait 60 --json",
        "towline jobs submit alice fill_form --args '{\"order\": 17}' --key order-17 --if-offline queue --wait 0",
    )
)
def submit(
    user: UserArgument,
    tool: Annotated[str, typer.Argument(help="Name of the tool; see `towline machines tools USER`.")],
    *,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="NAME=VALUE", help="One argument; the value is JSON if it can be read as such, else text."
        ),
    ] = None,
    args: Annotated[
        str, typer.Option("--args", metavar="JSON", help="An object of arguments; --arg adds to it.")
    ] = "{}",
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="Idempotency key: the same key gets the same job's answer. By default a fresh one, shown."
        ),
    ] = None,
    wait: WaitOption = 30.0,
    timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="For the tool, from its start (at most 600).")
    ] = 120.0,
    deadline_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="For the job, from its acceptance (at most 86400).")
    ] = 300.0,
    if_offline: Annotated[
        Literal["fail", "queue"], typer.Option(help="Refuse while the machine is offline, or keep the job for it.")
    ] = "fail",
    on_machine_change: Annotated[
        Literal["unknown", "wait"],
        typer.Option(help="A job begun on a machine that was replaced: end it as unknown, or wait for that machine."),
    ] = "unknown",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Run a tool on the user's machine and show how it ended.

    With --json the document has the key as a member `idempotency_key`.
    """
    arguments = parse_arguments(args, arg or [])
    used_key = key_to_use(key)
    if not as_json:
        note(f"key {used_key}")
    job = call(
        url,
        lambda client: client.submit(
            user,
            tool,
            arguments,
            idempotency_key=used_key,
            wait_s=wait,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            if_offline=if_offline,
            on_machine_change=on_machine_change,
        ),
        doing=f"waiting for {tool} on the machine of {user}",
    )
    if as_json:
        write_json(SubmittedJob(**msgspec.structs.asdict(job), idempotency_key=used_key))
    else:
        write_job(job)
    raise typer.Exit(exit_code(job, waited=wait > 0))


@app.command(epilog=examples("towline jobs get 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11 --wait 60"))
def get(job: JobArgument, wait: WaitOption = 0.0, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show a job, if asked to after waiting for its end."""
    found = call(url, lambda client: client.read_job(job, wait_s=wait), doing=f"waiting for job {job}")
    (write_json if as_json else write_job)(found)
    raise typer.Exit(exit_code(found, waited=wait > 0))


@app.command("list", epilog=examples("towline jobs list alice --state failed", "towline jobs list alice --json"))
def list_(
    user: UserArgument,
    *,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only the job of this idempotency key.")] = None,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List a user's jobs, newest first."""
    jobs = call(url, lambda client: collect(client.list_jobs(user, state=state, idempotency_key=key, limit=limit)))
    if as_json:
        for job in jobs:
            write_json(job)
        return
    write_table(
        ("job", "tool", "state", "attempts", "accepted", "took"),
        [(j.job, j.name, _state(j), str(j.attempts), j.accepted_at, _took(j)) for j in jobs],
        empty="no jobs",
    )


@app.command(epilog=examples("towline jobs cancel 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11"))
def cancel(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Cancel a job: at once if it is queued; one that was begun is told to stop, and ends as its machine says."""
    cancelled = call(url, lambda client: client.cancel_job(job))
    (write_json if as_json else write_job)(cancelled)


def parse_arguments(document: str, pairs: list[str]) -> dict[str, Any]:
    """Put a tool's arguments together from `--args` and the `NAME=VALUE` of each `--arg`, which win.

    Raises:
        typer.BadParameter: says which one cannot be read and why.
    """
    try:
        arguments = json.loads(document)
    except json.JsonProblem as problem:
        raise typer.BadParameter(str(problem), param_hint="--args") from problem
    if not isinstance(arguments, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--args")
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--arg")
        try:
            arguments[name] = json.loads(value)
        except json.JsonProblem:
            arguments[name] = value
    return arguments


def exit_code(job: Job, *, waited: bool) -> Exit:
    """Sort a job into exit codes; one that is not ended is no failure unless its end was waited for."""
    if job.terminal:
        return Exit.OK if job.state == "completed" else Exit.NOT_DONE
    return Exit.STILL_OPEN if waited else Exit.OK


def write_job(job: Job) -> None:
    """Show one job to a person, its result as indented JSON."""
    outcome = outcome_of(job)
    write_fields(
        [
            ("job", job.job),
            ("user", job.user),
            ("tool", job.name),
            ("state", _state(job)),
            ("attempts", str(job.attempts)),
            ("accepted", job.accepted_at),
            ("deadline", job.deadline_at if not job.terminal else None),
            ("ended", None if job.ended_at is UNSET else f"{job.ended_at} (after {_took(job)})"),
            ("replayed", "yes: this key was accepted before" if job.replayed else None),
            ("payload", "not the same as when this key was first used" if job.payload_matches is False else None),
            ("machine", "offline; the job stays accepted until its deadline" if job.machine == "offline" else None),
            ("mended", "yes: text that cannot be carried is U+FFFD" if outcome and outcome.mended is True else None),
            ("error", None if outcome is None or outcome.error is UNSET else _error(outcome.error)),
        ]
    )
    if outcome is not None and outcome.error is UNSET:
        print(plain(msgspec.json.format(msgspec.json.encode(outcome.result), indent=2).decode()))


def _error(error: Any) -> str:
    return f"{error.code}: {error.message}" + (" (may be tried again under a new key)" if error.retryable else "")


def _state(job: Job) -> Text:
    return Text(job.state, style=STYLES.get(job.state, "cyan"))


def _took(job: Job) -> str:
    if job.ended_at is UNSET:
        return ""
    took = datetime.fromisoformat(job.ended_at) - datetime.fromisoformat(job.accepted_at)
    return f"{took.total_seconds():.3f} s"
