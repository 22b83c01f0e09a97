"""Two clocks and what they say of a machine's sleep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.sidecar.wake import GAP_S, Clocks


@pytest.mark.parametrize(
    ("wall_s", "monotonic_s", "slept"),
    [
        (1.0, 1.0, False),
        (4.9, 4.9, False),
        (90.0, 1.0, True),  # a closed lid: the monotonic clock paused
        (90.0, 90.0, True),  # a stopped process, a wedged loop
        (1.0, 90.0, True),
        (3601.0, 1.0, True),  # the clock was set
        (-3599.0, 1.0, True),
        (0.9, 1.0, False),  # slewed by NTP
        (-2.0, 1.0, False),
    ],
)
def test_gaps(wall_s: float, monotonic_s: float, slept: bool) -> None:
    clocks = Clocks(1_000_000.0, 500.0)
    assert clocks.slept(1_000_000.0 + wall_s, 500.0 + monotonic_s) is slept
    assert not clocks.slept(1_000_001.0 + wall_s, 501.0 + monotonic_s), "reported once"


@given(st.lists(st.floats(0, GAP_S), max_size=50), st.floats(-0.001, 0.001))
def test_a_machine_that_is_awake_never_slept(steps: list[float], drift: float) -> None:
    wall, monotonic = 1_000_000.0, 0.0
    clocks = Clocks(wall, monotonic)
    for step in steps:
        wall += step * (1 + drift) * 0.99
        monotonic += step * 0.99
        assert not clocks.slept(wall, monotonic)
