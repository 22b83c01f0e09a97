"""Runs: drills played on a target again and again, shown while they play, and summed up.

Used by:  `towline drill`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.drills.catalogue import story
from harness.drills.play import play
from harness.drills.report import Check, Report, Summary, summarise
from harness.drills.target import DrillFailed, Target


@dataclass(frozen=True, slots=True)
class Session:
    """Drills that were played on one target.

    Attributes:
        target: by its name.
        heartbeat_s: of the installation.
        allowance_s: what the target's own tools were allowed on top of every limit of time.
        skipped: drills that it cannot play, each with the reason.
    """

    target: str
    heartbeat_s: float
    allowance_s: float
    skipped: Mapping[str, str]
    reports: list[Report] = field(default_factory=list)

    @property
    def is_violated(self) -> bool:
        """Whether something was not as promised."""
        return any(report.violations for report in self.reports)


async def run_drills(
    console: Console, names: Sequence[str], name: str, opened: AbstractAsyncContextManager[Target], *, repeat: int
) -> Session:
    """Play drills one after another on one installation, all of them `repeat` times.

    Args:
        name: of the target.
        opened: gives the target.

    Raises:
        DirectoryBusy, ProcessFailed, ServerMissing, StoreUnavailable: there is no installation to drill.
        DrillFailed: likewise. Where a drill leaves it in a state from which it does not recover, that is a violation,
            and the last drill.
    """
    async with opened as target:
        skipped = {drill: target.cannot[drill] for drill in names if drill in target.cannot}
        session = Session(name, target.heartbeat_s, target.allowance_s, skipped)
        replicas = f"{len(target.gateways)} gateways, {len(target.workers)} workers, {len(target.relays)} relays"
        allowed = f"; {session.allowance_s:g} s are allowed for its own tools" if session.allowance_s else ""
        _say(console, f"target {name}: {replicas}, heartbeat {session.heartbeat_s:g} s{allowed}")
        for drill, reason in skipped.items():
            _say(console, f"skipped: {drill}: {reason}")
        for turn in range(1, repeat + 1):
            for drill in names:
                if drill in skipped:
                    continue
                console.print(
                    f"\n[bold]{drill}[/bold] ({turn} of {repeat}): {story(drill)}", highlight=False, soft_wrap=True
                )
                try:
                    report = await play(drill, target, lambda line: _say(console, line))
                except DrillFailed as failure:
                    # What was found so far is told; on this installation nothing more would tell anything.
                    report = Report(drill)
                    report.checks.append(Check("the installation gets well again", "in time", str(failure), False))
                    session.reports.append(report)
                    _show_checks(console, report)
                    return session
                _show_checks(console, report)
                session.reports.append(report)
    return session


def show_summary(console: Console, session: Session) -> None:
    """Print a row for each drill and kind of cut, and what was skipped."""
    table = Table("drill", "recovery of", "runs", "violations", "p50", "p95", "worst", box=None)
    for row in summarise(session.reports):
        violations = f"[bold red]{row.violations}[/bold red]" if row.violations else "0"
        times = ("" if seconds is None else f"{seconds:.2f} s" for seconds in (row.p50_s, row.p95_s, row.worst_s))
        table.add_row(row.drill, row.label, str(row.runs), violations, *times)
    console.print()
    console.print(table)
    for drill, reason in session.skipped.items():
        _say(console, f"skipped: {drill}: {reason}")


def as_json(session: Session) -> dict[str, Any]:
    """Everything that was found, in plain values."""
    return {
        "target": session.target,
        "heartbeat_s": session.heartbeat_s,
        "allowance_s": session.allowance_s,
        "skipped": dict(session.skipped),
        "violations": sum(len(report.violations) for report in session.reports),
        "runs": [report.as_json() for report in session.reports],
        "summary": [_plain(row) for row in summarise(session.reports)],
    }


def _plain(row: Summary) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row._asdict().items()}


def _say(console: Console, line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)


def _show_checks(console: Console, report: Report) -> None:
    # Lines rather than a table: those would be folded to the width of a terminal, or of none.
    width = max(len(check.what) for check in report.checks)
    for check in report.checks:
        verdict = "[green]ok      [/green]" if check.is_met else "[bold red]VIOLATED[/bold red]"
        found = f"{check.what:{width}}  expected {check.expected}, measured {check.measured}"
        console.print(f"  {verdict}  {escape(found)}", highlight=False, soft_wrap=True)
    _say(console, f"played in {report.took_s:.1f} s, {len(report.violations)} violations")
