"""What the harness adds to the command line: `up`, `demo`, `bench`, `drill`, `soak` (development only, in no wheel)."""

import asyncio
import contextlib
import json as stdlib_json
import random
import signal
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common.errors import OtherMigrations, StoreUnavailable
from harness.bench.ground import BenchFailed
from harness.bench.profiling import Profiled, run_profile
from harness.bench.rounds import run_bench
from harness.bench.rows import ROWS
from harness.carriers import ServerMissing
from harness.demo import run_demo
from harness.demo_timeline import StepFailed
from harness.drills.catalogue import DRILLS, story
from harness.drills.compose import ComposeTarget, open_compose_target
from harness.drills.kube import KubeTarget, open_kube_target
from harness.drills.local import LocalTarget, open_target
from harness.drills.runs import as_json, run_drills, show_summary
from harness.drills.target import DrillFailed, Target
from harness.runner import DirectoryBusy, ProcessFailed
from harness.soak.history import read_history
from harness.soak.plan import Plan, make_plan
from harness.soak.report import show_verdict
from harness.soak.run import HISTORY, run_soak
from harness.up import run_up

up = typer.Typer()
demo = typer.Typer()
bench = typer.Typer()
drill = typer.Typer(no_args_is_help=True, help="Cut an installation where it can be cut, and count what comes of it.")
soak = typer.Typer()

STATE_DIRECTORY = Path(".towline")
RESULTS_DIRECTORY = Path("bench-results")
# Short, for drills that wait for presence to lapse.
LOCAL_HEARTBEAT_S = 2.0


@demo.command("demo")
def demo_() -> None:
    """Show what Towline promises, on real processes of this machine, then stay up until Ctrl-C.

    Starts PostgreSQL, Valkey, two gateways, two workers, two relays and a sidecar, and leaves nothing behind.
    """
    _run(run_demo(Console()))


@up.command("up")
def up_(
    *,
    gateways: Annotated[int, typer.Option(min=1, max=8, help="How many gateways.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=8, help="How many workers.")] = 1,
    relays: Annotated[int, typer.Option(min=1, max=8, help="How many relays.")] = 1,
    heartbeat_s: Annotated[float, typer.Option(min=0.2, max=60, help="How often presence is refreshed.")] = 10.0,
) -> None:
    """Run the product on this machine until Ctrl-C; data and logs stay in `.towline/up`."""
    directory = STATE_DIRECTORY.absolute() / "up"
    _run(run_up(Console(), directory, gateways=gateways, workers=workers, relays=relays, heartbeat_s=heartbeat_s))


@bench.command("bench")
def bench_(
    *,
    rows: Annotated[str, typer.Option(help=f"Which rows, separated by commas: {','.join(ROWS)}.")] = ",".join(ROWS),
    quick: Annotated[bool, typer.Option("--quick", help="Try the bench itself out: two short rounds.")] = False,
    profile: Annotated[
        Profiled | None, typer.Option(help="Measure nothing; show where the time of this process goes instead.")
    ] = None,
) -> None:
    """Measure beside simpler systems in the same run: a table, and JSON and a plot in `bench-results/`.

    Takes some minutes and both cores; how to read it: docs/how-to/read-the-bench.md.
    """
    directory = STATE_DIRECTORY.absolute() / "bench"
    console = Console()
    if profile:
        _run(run_profile(console, directory, RESULTS_DIRECTORY, profile))
        return
    chosen = rows.split(",")
    if unknown := [row for row in chosen if row not in ROWS]:
        raise typer.BadParameter(f"no row is called {unknown[0]!r}; there are {', '.join(ROWS)}", param_hint="--rows")
    _run(run_bench(console, directory, RESULTS_DIRECTORY, chosen, quick=quick))


class DrillTarget(StrEnum):
    """What is drilled."""

    local = "local"
    compose = "compose"
    kube = "kube"


_TargetName = Annotated[
    DrillTarget,
    typer.Option(
        "--target",
        help="Where: an installation that is started on this machine, or one that is up already: under Compose"
        " (make compose-up), in a local cluster (make kind-up).",
    ),
]
_Namespace = Annotated[str, typer.Option("--namespace", help="Of the installation in the cluster.")]
_Repeat = Annotated[int, typer.Option(min=1, help="How often.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the reports as JSON; the timeline goes to standard error.")]
_HeartbeatS = Annotated[
    float | None,
    typer.Option(
        "--heartbeat-s",
        min=0.5,
        max=10,
        help="How often presence is refreshed, on this machine (2); others have theirs.",
    ),
]


@drill.command("list")
def drill_list(*, target: _TargetName = DrillTarget.local) -> None:
    """Say what there is."""
    reasons = {
        DrillTarget.local: LocalTarget.cannot,
        DrillTarget.compose: ComposeTarget.cannot,
        DrillTarget.kube: KubeTarget.cannot,
    }[target]
    for name in DRILLS:
        skipped = f"  (not on {target.value}: {reasons[name]})" if name in reasons else ""
        typer.echo(f"{name:27} {story(name)}{skipped}")


@drill.command("run")
def drill_run(
    name: Annotated[str, typer.Argument(help="One of `towline drill list`.")],
    *,
    target: _TargetName = DrillTarget.local,
    namespace: _Namespace = "towline",
    repeat: _Repeat = 1,
    heartbeat_s: _HeartbeatS = None,
    json: _Json = False,
) -> None:
    """Play one drill. Ends non-zero when something was not as promised."""
    if name not in DRILLS:
        raise typer.BadParameter(f"there is no drill {name!r}; there are {', '.join(DRILLS)}", param_hint="NAME")
    _drill([name], target, namespace, repeat, heartbeat_s, json=json)


@drill.command("all")
def drill_all(
    *,
    target: _TargetName = DrillTarget.local,
    namespace: _Namespace = "towline",
    repeat: _Repeat = 1,
    heartbeat_s: _HeartbeatS = None,
    json: _Json = False,
) -> None:
    """Play every drill on one installation, and sum up. Ends non-zero when something was not as promised."""
    _drill(list(DRILLS), target, namespace, repeat, heartbeat_s, json=json)


def _drill(
    names: list[str], target: DrillTarget, namespace: str, repeat: int, heartbeat_s: float | None, *, json: bool
) -> None:
    directory = STATE_DIRECTORY.absolute() / "drill"
    opened: AbstractAsyncContextManager[Target]
    if target is not DrillTarget.local and heartbeat_s is not None:
        raise typer.BadParameter("an installation that is up has its own heartbeat", param_hint="--heartbeat-s")
    match target:
        case DrillTarget.local:
            opened = open_target(directory, heartbeat_s=heartbeat_s or LOCAL_HEARTBEAT_S)
        case DrillTarget.compose:
            directory /= "compose"
            opened = open_compose_target(directory)
        case DrillTarget.kube:
            directory /= "kube"
            opened = open_kube_target(directory, namespace)
    _run(_play_drills(names, target, opened, directory, repeat, json=json))


async def _play_drills(
    names: list[str],
    target: DrillTarget,
    opened: AbstractAsyncContextManager[Target],
    directory: Path,
    repeat: int,
    *,
    json: bool,
) -> None:
    console = Console(stderr=json)
    session = await run_drills(console, names, target.value, opened, repeat=repeat)
    if json:
        typer.echo(stdlib_json.dumps(as_json(session), indent=2))
    else:
        show_summary(console, session)
    if session.is_violated:
        console.print(f"\nlogs: {directory}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@soak.command("soak")
def soak_(
    *,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long the plan is; some more for its end.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="What decides the plan; drawn and printed when not given.")] = None,
    users: Annotated[int, typer.Option(min=1, max=50, help="How many users, each with a machine.")] = 6,
    heartbeat_s: Annotated[float, typer.Option(min=0.2, max=60, help="How often presence is refreshed.")] = 2.0,
    check: Annotated[Path | None, typer.Option(help="Only check the history in this file again.")] = None,
) -> None:
    """Run the product under random load and random faults, and check its whole history against the promises.

    Ends non-zero when a promise was broken. The history and all logs stay in `.towline/soak`.
    """
    console = Console()
    if check is not None:
        if show_verdict(console, read_history(check)):
            raise typer.Exit(1)
        return
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    _run(_run_soak(console, make_plan(chosen, seconds=minutes * 60, users=users, heartbeat_s=heartbeat_s)))


async def _run_soak(console: Console, plan: Plan) -> None:
    directory = STATE_DIRECTORY.absolute() / "soak"
    console.print(f"seed {plan.seed}: {len(plan.requests)} requests, {len(plan.runs)} runs, {len(plan.faults)} faults")
    with console.status("starting") as status:
        history = await run_soak(plan, directory, status.update)
    console.print(f"history: {directory / HISTORY}", highlight=False, soft_wrap=True)
    if show_verdict(console, history.events):
        raise typer.Exit(1)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run until done, SIGINT or SIGTERM; what was started is stopped in any case."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await work

    try:
        asyncio.run(main())
    except (
        BenchFailed,
        StepFailed,
        ProcessFailed,
        DirectoryBusy,
        DrillFailed,
        OtherMigrations,
        ServerMissing,
        StoreUnavailable,
    ) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
