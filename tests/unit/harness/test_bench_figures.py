"""The arithmetic of the bench: percentiles, ratios within a round, medians over rounds, goals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bench.figures import Figure, Sample, median_sample, percentile, result_of


def a_sample(*, p50_ms: float = 1.0, cpu_us: float = 100.0, wall_s: float = 1.0) -> Sample:
    return Sample(
        units=1000,
        wall_s=wall_s,
        p50_ms=p50_ms,
        p99_ms=2 * p50_ms,
        cpu_us={"gateway": cpu_us, "worker": cpu_us / 2},
        driver_cpu_us=10.0,
        stores_cpu_us={"postgres": cpu_us / 4},
    )


def a_figure(**changes: object) -> Figure:
    settings: dict[str, object] = {
        "name": "p50",
        "runs": ("ours", "peer"),
        "unit": "ms",
        "measured": lambda samples: samples["ours"].p50_ms,
        "against": "peer",
        "reference": lambda samples: samples["peer"].p50_ms,
    }
    return Figure(**(settings | changes))  # type: ignore[arg-type]


def rounds_of(*pairs: tuple[float, float]) -> list[dict[str, Sample]]:
    return [{"ours": a_sample(p50_ms=ours), "peer": a_sample(p50_ms=peer)} for ours, peer in pairs]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 50, 5.0),
        ([5.0], 99, 5.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 100, 100.0),
        ([2.0, 1.0], 0, 1.0),
    ],
)
def test_percentile_is_the_nearest_rank(values, percent, expected):
    assert percentile(values, percent) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 100))
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(values, percent):
    found = percentile(values, percent)
    needed = percent / 100 * len(values)
    assert sum(value <= found for value in values) >= needed
    assert sum(value < found for value in values) < needed


def test_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_ratio_is_taken_within_a_round_and_then_the_median():
    """The machine was four times slower in the second round: both sides were, so the ratio is not moved."""
    result = result_of(a_figure(), rounds_of((2.0, 1.0), (8.0, 4.0), (2.2, 1.0)))

    assert result.ratios == pytest.approx([2.0, 2.0, 2.2])
    assert result.ratio == pytest.approx(2.0)
    assert result.measured == pytest.approx(2.2)
    assert result.reference == pytest.approx(1.0)


def test_one_wild_round_moves_no_figure():
    calm, wild = [(2.0, 1.0)] * 4, [(90.0, 1.0)]

    assert result_of(a_figure(), rounds_of(*calm, *wild)).ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changes", "bound", "met"),
    [
        ({}, 2.0, True),
        ({}, 1.9, False),
        ({"better": "higher"}, 2.0, True),
        ({"better": "higher"}, 2.1, False),
        ({"bounds": "value"}, 4.0, True),
        ({"bounds": "value"}, 3.9, False),
        ({}, None, None),
    ],
)
def test_bounds_hold_the_ratio_or_the_value_in_the_figures_direction(changes, bound, met):
    """Measured 4 ms against 2 ms: twice as much."""
    assert result_of(a_figure(**changes), rounds_of((4.0, 2.0))).meets(bound) is met


def test_no_rounds_make_no_figure():
    with pytest.raises(ValueError, match="no rounds"):
        result_of(a_figure(), [])
    with pytest.raises(ValueError, match="no samples"):
        median_sample([])


def test_sample_adds_up_its_processes_but_not_the_stores():
    sample = a_sample(cpu_us=100.0, wall_s=2.0)

    assert sample.total_cpu_us == pytest.approx(150.0)
    assert sample.rate == pytest.approx(500.0)


def test_median_sample_takes_each_number_by_itself():
    samples = [a_sample(p50_ms=1, cpu_us=300), a_sample(p50_ms=3, cpu_us=100), a_sample(p50_ms=2, cpu_us=200)]

    middle = median_sample(samples)

    assert (middle.p50_ms, middle.p99_ms) == (2, 4)
    assert middle.cpu_us == {"gateway": 200, "worker": 100}
    assert middle.stores_cpu_us == {"postgres": 50}
    assert middle.driver_cpu_us == 10
