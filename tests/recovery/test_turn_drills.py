"""Every drill of the turn path that leaves workers and stores alone, once, on one installation of this machine.

The scenarios are in `harness.drills`; docs/how-to/run-a-drill.md says what each cuts and what must hold. Each makes its
cut, proves that it happened, and counts terminals, usage rows, entries in order, model calls, executions of tools,
and what every watcher was told.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.drills.catalogue import TURN_DRILLS
from harness.drills.local import LocalTarget, open_target
from harness.drills.play import play

# Here drills count; how fast the product recovers is measured by `towline drill` on a machine that does nothing else.
PATIENCE = 4.0
# Long enough to leave and to come back in the middle; `towline drill` waits longer than web requests live.
SLOW_S = 5.0


@pytest.fixture(scope="module")
async def target(state_directory: Path) -> AsyncIterator[LocalTarget]:
    """Two gateways, two workers, and stores of their own, which are restarted."""
    async with open_target(state_directory / "turn-drills", heartbeat_s=2.0, relays=0) as target:
        yield target


@pytest.mark.parametrize("name", TURN_DRILLS)
async def test_drill_finds_no_violation(name: str, target: LocalTarget) -> None:
    """The timeline is printed; a violation names what was expected and what was measured."""
    report = await play(name, target, print, patience=PATIENCE, slow_s=SLOW_S)
    assert report.checks
    assert not report.violations
