"""Every drill of the event path, once, on one installation of this machine.

The scenarios are in `harness.drills`; docs/how-to/run-a-drill.md says what each cuts and what must hold. Each makes its
cut, proves that it happened, and counts events lost, doubled and out of order, gaps, last events, and who was told
the end.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.drills.catalogue import EVENT_DRILLS
from harness.drills.local import LocalTarget, open_target
from harness.drills.play import play

# Enough that they do not fit into one wake-up of the gateway; `towline drill` plays it with five hundred.
CLIENTS = 60
# Here drills count; how fast the product recovers is measured by `towline drill` on a machine that does nothing else.
PATIENCE = 4.0


@pytest.fixture(scope="module")
async def target(state_directory: Path) -> AsyncIterator[LocalTarget]:
    """Two gateways, two relays, and stores of their own, which are restarted."""
    async with open_target(state_directory / "event-drills", heartbeat_s=2.0, workers=0) as target:
        yield target


@pytest.mark.parametrize("name", EVENT_DRILLS)
async def test_drill_finds_no_violation(name: str, target: LocalTarget) -> None:
    """The timeline is printed; a violation names what was expected and what was measured."""
    report = await play(name, target, print, patience=PATIENCE, clients=CLIENTS)
    assert report.checks
    assert not report.violations
