"""The detector: it reads progress, not life."""

import pytest

from common.store import keys
from relay.health import Change, Detector, Pulse

STALL_AFTER_S = 900.0


@pytest.mark.parametrize(
    ("live_ago", "progress_ago", "verdict"),
    [
        (0, 0, "active"),
        (899, 899, "active"),
        (0, 900, "stalled"),
        (299, 5000, "stalled"),
        (300, 900, "orphaned"),
        (5000, 5000, "orphaned"),
        (301, 301, "active"),
    ],
)
def test_verdicts(live_ago: float, progress_ago: float, verdict: str) -> None:
    now = 10_000.0
    assert Pulse(now - live_ago, now - progress_ago).verdict(now, STALL_AFTER_S) == verdict


def test_life_is_stale_sooner_where_progress_is_expected_sooner() -> None:
    assert Pulse(0.0, 0.0).verdict(5.0, 5.0) == "orphaned"
    assert keys.LIVENESS_TTL_S > 5


def test_each_change_is_told_once() -> None:
    """Pings only: stalled. Nothing at all: orphaned. Work again: recovered, that is active."""
    pulse = Pulse(0.0, 0.0)
    detector = Detector(STALL_AFTER_S, "active")
    told = []
    for now in range(0, 2000, 10):
        if now <= 1000:
            pulse.live_at = float(now)
        if change := detector.look(pulse, float(now)):
            told.append((now, change))
    assert told == [(900, Change("stalled", 900.0)), (1300, Change("orphaned", 1300.0))]
    pulse.live_at = pulse.progress_at = 2000.0
    assert detector.look(pulse, 2000.0) == Change("active", 0.0)
    assert detector.look(pulse, 2001.0) is None


def test_what_a_former_owner_has_told_is_not_told_again() -> None:
    assert Detector(STALL_AFTER_S, "stalled").look(Pulse(900.0, 0.0), 900.0) is None
