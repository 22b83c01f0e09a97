"""Runs: drills played on a target again and again, shown while they play, and summed up.

Used by:  `towline drill`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.drills.catalogue import story
from harness.drills.local import open_target
from harness.drills.play import play
from harness.drills.report import Report, Summary, summarise


async def run_drills(
    console: Console, names: Sequence[str], directory: Path, *, repeat: int, heartbeat_s: float
) -> list[Report]:
    """Play drills one after another on one installation of this machine, all of them `repeat` times.

    Raises:
        DirectoryBusy, ProcessFailed, ServerMissing: there is no installation to drill.
        DrillFailed: a drill left it in a state from which it did not recover.
    """
    reports: list[Report] = []
    console.print(
        f"starting the stores, two gateways, two workers and two relays; heartbeat {heartbeat_s:g} s", highlight=False
    )
    async with open_target(directory, heartbeat_s=heartbeat_s) as target:
        for turn in range(1, repeat + 1):
            for name in names:
                console.print(
                    f"\n[bold]{name}[/bold] ({turn} of {repeat}): {story(name)}", highlight=False, soft_wrap=True
                )
                report = await play(name, target, lambda line: _say(console, line))
                _show_checks(console, report)
                reports.append(report)
    if any(report.violations for report in reports):
        console.print(f"\nlogs: {directory}", highlight=False, soft_wrap=True)
    return reports


def show_summary(console: Console, reports: Sequence[Report]) -> None:
    """Print a row for each drill and kind of cut."""
    table = Table("drill", "recovery of", "runs", "violations", "p50", "p95", "worst", box=None)
    for row in summarise(reports):
        violations = f"[bold red]{row.violations}[/bold red]" if row.violations else "0"
        times = ("" if seconds is None else f"{seconds:.2f} s" for seconds in (row.p50_s, row.p95_s, row.worst_s))
        table.add_row(row.drill, row.label, str(row.runs), violations, *times)
    console.print()
    console.print(table)


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Everything that was found, in plain values."""
    return {
        "violations": sum(len(report.violations) for report in reports),
        "runs": [report.as_json() for report in reports],
        "summary": [_plain(row) for row in summarise(reports)],
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
