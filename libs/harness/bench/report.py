"""The results as files: JSON with every sample, for programs, and a plot."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from harness.bench.figures import Result, Round, Sample


def write_json(path: Path, results: Sequence[Result], rounds: Sequence[Round]) -> None:
    """Write the setup, the figures and every sample of every round."""
    document = {
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "setup": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "figures": [_figure(result) for result in results],
        "rounds": [{name: asdict(sample) for name, sample in samples.items()} for samples in rounds],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _figure(result: Result) -> dict[str, Any]:
    figure = result.figure
    return {
        "figure": figure.name,
        "unit": figure.unit,
        "measured": result.measured,
        "against": figure.against,
        "reference": result.reference,
        "ratio": result.ratio,
        "ratios": list(result.ratios),
        "better": figure.better,
        "bounds": figure.bounds,
        "goal": figure.goal,
        "meets_goal": result.meets(figure.goal),
        "then": figure.then,
        "meets_then": result.meets(figure.then),
    }


def write_plot(path: Path, samples: Mapping[str, Sample], unit: str) -> None:
    """Draw what a unit waits, and where its CPU goes."""
    import matplotlib as mpl  # noqa: PLC0415  # half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (waits, cpu) = plt.subplots(1, 2, figsize=(14, 1.5 + 0.5 * len(samples)), sharey=True, layout="constrained")
    names = list(samples)
    rows = range(len(names))
    waits.barh(rows, [sample.p99_ms or 0.0 for sample in samples.values()], color="#c8d5e8", label="p99")
    waits.barh(rows, [sample.p50_ms or 0.0 for sample in samples.values()], color="#33659d", label="p50")
    waits.set_yticks(rows, names)
    waits.invert_yaxis()
    if any(sample.p50_ms for sample in samples.values()):
        waits.set_xscale("log")
    waits.set_xlabel(f"what a {unit} waits, ms (logarithmic)")
    waits.legend()
    parts = list(dict.fromkeys(part for sample in samples.values() for part in sample.cpu_us))
    left = [0.0] * len(names)
    for number, part in enumerate(parts):
        widths = [sample.cpu_us.get(part, 0.0) for sample in samples.values()]
        cpu.barh(rows, widths, left=left, label=part, color=plt.get_cmap("tab20")(number))
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    cpu.set_xlabel(f"CPU per {unit}, µs, by process (stores not included)")
    if parts:
        cpu.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
