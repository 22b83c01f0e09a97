"""The results as people read them: one table of figures beside their goals, and one of where the CPU went."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from harness.bench.figures import Figure, Result, Sample


def figures_table(results: Sequence[Result], left_out: Sequence[tuple[Figure, str]] = ()) -> Table:
    """Each figure with its goals, and whether it meets them; then those that were left out, and why."""
    table = Table(title="figures: medians of the rounds", title_justify="left")
    for column in ("figure", "measured", "against", "ratio", "goal", "", "then", ""):
        table.add_column(column, justify="left" if column in ("figure", "against", "") else "right")
    for result in results:
        figure = result.figure
        table.add_row(
            figure.name,
            f"{number(result.measured)} {figure.unit}",
            f"{figure.against}: {number(result.reference)} {figure.unit}",
            f"{number(result.ratio)} ×",
            _bound(figure, figure.goal),
            _verdict(result.meets(figure.goal)),
            _bound(figure, figure.then),
            _verdict(result.meets(figure.then)),
        )
    for figure, reason in left_out:
        table.add_row(figure.name, "", f"{figure.against}: {reason}", "", _bound(figure, figure.goal), "", "", "")
    return table


def runs_table(samples: Mapping[str, Sample], unit: str = "job") -> Table:
    """Each run: rate, waits, CPU of a unit by process; the stores and the load generator stand apart."""
    table = Table(title=f"runs: medians of the rounds; CPU in µs per {unit}", title_justify="left")
    has_memory = any(sample.memory_kib for sample in samples.values())
    for column in ("run", "per s", "p50 ms", "p99 ms", "CPU", "of which", "stores", "driver"):
        table.add_column(column, justify="left" if column in ("run", "of which", "stores") else "right")
    if has_memory:
        table.add_column("KiB")
    for name, sample in samples.items():
        table.add_row(
            name,
            number(sample.rate),
            _wait(sample.p50_ms),
            _wait(sample.p99_ms),
            number(sample.total_cpu_us),
            _parts(sample.cpu_us),
            _parts(sample.stores_cpu_us),
            number(sample.driver_cpu_us),
            *([_parts(sample.memory_kib)] if has_memory else []),
        )
    return table


def number(value: float) -> str:
    """Three figures that count."""
    if value >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _parts(cpu_us: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {used:.0f}" if used >= 100 else f"{name} {number(used)}" for name, used in cpu_us.items())


def _wait(wait_ms: float | None) -> str:
    return "" if wait_ms is None else number(wait_ms)


def _bound(figure: Figure, bound: float | None) -> str:
    if bound is None:
        return ""
    sign = "≤" if figure.better == "lower" else "≥"
    return f"{sign} {bound:g} {'×' if figure.bounds == 'ratio' else figure.unit}"


def _verdict(met: bool | None) -> Text:
    if met is None:
        return Text("")
    return Text("ok", style="green") if met else Text("no", style="bold red")
