"""The count of many runs: each way in which a log can be wrong is told, and none is taken for another."""

import pytest

from harness.many_runs import faults_in


@pytest.mark.parametrize(
    ("numbers", "faults"),
    [
        ([1, 2, 3, 4], []),
        ([], ["4 missing, the first is 1"]),
        ([1, 3, 4], ["1 missing, the first is 2"]),
        ([1, 2, 2, 3, 4], ["1 repeated"]),
        ([1, 3, 2, 4], ["1 out of order"]),
        ([1, 2, 3, 4, 5], ["1 that nobody said"]),
        ([1, 2, 3, 1, 2, 3], ["1 missing, the first is 4", "3 repeated", "1 out of order"]),
    ],
)
def test_faults_are_named(numbers: list[int], faults: list[str]) -> None:
    assert faults_in(numbers, 4) == faults
