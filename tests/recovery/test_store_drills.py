"""Every drill of the stores under jobs, once, on one installation of this machine.

The scenarios are in `harness.drills`; docs/how-to/run-a-drill.md says what each cuts and what must hold. Each makes its
cut, proves that it happened, and counts executions, deliveries, terminals and what is left behind.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.drills.catalogue import STORE_DRILLS
from harness.drills.local import LocalTarget, open_target
from harness.drills.play import play

# Short, for every presence time is a multiple of it; long enough that one and a half of them, the grace of a lost
# socket, outlast a redial on a busy machine.
HEARTBEAT_S = 2.0
# Here drills count; how fast the product recovers is measured by `towline drill` on a machine that does nothing else.
PATIENCE = 4.0


@pytest.fixture(scope="module")
async def target(state_directory: Path) -> AsyncIterator[LocalTarget]:
    """Two gateways, two workers, and stores of their own, which are restarted, flushed and frozen."""
    async with open_target(state_directory / "store-drills", heartbeat_s=HEARTBEAT_S, relays=0) as target:
        yield target


@pytest.mark.parametrize("name", STORE_DRILLS)
async def test_drill_finds_no_violation(name: str, target: LocalTarget) -> None:
    """The timeline is printed; a violation names what was expected and what was measured."""
    report = await play(name, target, print, patience=PATIENCE)
    assert report.checks
    assert not report.violations
