"""A short soak: random load and faults by one seed, and a history that breaks no promise."""

from collections import Counter

import pytest

from harness.soak.checker import check
from harness.soak.history import read_history
from harness.soak.plan import FAULTS, make_plan
from harness.soak.report import count, excerpt
from harness.soak.run import HISTORY, run_soak

# Its plan has a fault of every kind of target: gateway, worker, relay, machine, upstream, Redis and PostgreSQL.
SEED = 14733
SECONDS = 20


@pytest.mark.timeout(150)  # its last jobs have a deadline of a minute
async def test_a_short_soak_breaks_no_promise(state_directory):
    """Thirteen processes, every kind of target at fault, and nothing lost, doubled, late or untrue."""
    plan = make_plan(SEED, seconds=SECONDS, users=4, heartbeat_s=1.0)
    assert len({FAULTS[fault.kind].role for fault in plan.faults}) == 7
    directory = state_directory / "soak"

    history = await run_soak(plan, directory, lambda _: None)

    violations = check(history.events)
    excerpts = ["\n".join([str(violation), *excerpt(history.events, violation)]) for violation in violations[:5]]
    assert not violations, "\n\n".join(excerpts)
    # A soak in which nothing happened would break nothing either.
    counts = count(history.events)
    assert counts.faults == Counter(fault.kind for fault in plan.faults)
    assert counts.outcomes["completed"] > 10
    assert counts.executions >= counts.outcomes["completed"]
    assert counts.presence["online"] > 0
    assert counts.runs["completed"] > 0
    assert counts.events > 100
    assert counts.resumed > 0
    assert read_history(directory / HISTORY) == history.events
