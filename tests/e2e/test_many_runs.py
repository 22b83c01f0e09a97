"""Many runs at once over three relays: nothing lost, nothing doubled, and the runs are shared out evenly.

A short form of `python -m harness.many_runs`, which counts 200 runs for five minutes.
"""

from pathlib import Path

import pytest

from harness.many_runs import Load, run_many
from harness.runner import temporary_directory


@pytest.mark.timeout(120)
async def test_every_event_of_many_runs_is_in_the_logs_once() -> None:
    said: list[str] = []
    load = Load(runs=60, sources=3, rate=5, seconds=10, relays=3)
    with temporary_directory() as directory:
        findings = await run_many(load, Path(directory), said.append)
    print("\n".join(said), findings)
    assert findings.problems == []
    assert findings.events == load.runs * load.sources * load.events_per_source
