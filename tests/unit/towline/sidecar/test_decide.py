"""What a delivery leads to, for every combination of what is known about its job."""

import itertools

import pytest

from towline.sidecar.decide import Join, Refuse, Replay, Row, Run, State, Unknown, decide
from towline.sidecar.outcome import completed
from towline.wire.frames import Hints

OUTCOME = completed("ran")
ROWS = [None, Row(State.RUNNING), Row(State.ENDED, OUTCOME), Row(State.ACKNOWLEDGED)]
HINTS = [None, Hints(), Hints(read_only=True), Hints(idempotent=True), Hints(destructive=True)]


@pytest.mark.parametrize(("running", "row"), list(itertools.product([True, False], ROWS)))
@pytest.mark.parametrize("hints", HINTS)
@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("accepted_at_ms", [99, 100, 101])
def test_only_a_job_that_nobody_knows_runs(
    running: bool, row: Row | None, hints: Hints | None, hinted: bool, accepted_at_ms: int
) -> None:
    decision = decide(
        name="t", hinted=hinted, accepted_at_ms=accepted_at_ms, running=running, row=row, horizon_ms=100, hints=hints
    )
    if running:
        assert decision == Join()
    elif row is not None and row.state is State.ENDED:
        assert decision == Replay(OUTCOME)
    elif row is not None or accepted_at_ms <= 100:
        assert isinstance(decision, Unknown)
    elif hints is None:
        assert isinstance(decision, Refuse)
        assert decision.code == "unknown-tool"
    elif hinted and not hints.repeatable:
        assert isinstance(decision, Refuse)
        assert decision.code == "hints-changed"
    else:
        assert decision == Run()


def test_a_tool_that_became_repeatable_still_runs_as_accepted() -> None:
    """The frame says unhinted: it is journalled, whatever the tool says now."""
    decision = decide(
        name="t",
        hinted=False,
        accepted_at_ms=1,
        running=False,
        row=None,
        horizon_ms=0,
        hints=Hints(read_only=True),
    )
    assert decision == Run()
