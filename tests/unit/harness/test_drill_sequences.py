"""What counts as lost, doubled, disordered and excused in what a watcher saw."""

import pytest

from harness.drills.sequences import Seen, Tally, tally, total
from towline.wire import events


def seen(*numbers: int | str, source: str = "a") -> list[Seen]:
    """Events of a source by number; names of events and frames by name."""
    return [Seen("output", source, n) if isinstance(n, int) else Seen(n, source, 0) for n in numbers]


@pytest.mark.parametrize(
    ("items", "said", "expected"),
    [
        pytest.param(seen(1, 2, 3), 3, Tally(events=3), id="faithful"),
        pytest.param(seen(1, 3), 3, Tally(events=2, lost=1), id="hole"),
        pytest.param(seen(1, 2), 4, Tally(events=2, lost=2), id="end missing"),
        pytest.param([*seen(1), *seen(1, source="b")], 1, Tally(events=1, strays=1), id="stray"),
        pytest.param([], 2, Tally(lost=2), id="nothing"),
        pytest.param(seen(1, 2, 2, 3), 3, Tally(events=4, doubled=1), id="doubled"),
        pytest.param(seen(1, 2, 3, 1, 2, 3), 3, Tally(events=6, doubled=3), id="replayed"),
        pytest.param(seen(1, 3, 2), 3, Tally(events=3, disordered=1), id="disordered"),
        pytest.param(seen(1, 3, 2, 2), 3, Tally(events=4, disordered=1, doubled=1), id="disordered and doubled"),
        pytest.param(seen(1, events.GAP, 4), 4, Tally(events=2, gaps=1, excused=2), id="gap"),
        pytest.param(
            seen(1, events.GAP, 4, 2), 4, Tally(events=3, gaps=1, excused=1, disordered=1), id="late behind a gap"
        ),
        pytest.param(seen(1, events.GAP, 4, 6), 6, Tally(events=3, gaps=1, excused=2, lost=1), id="hole behind a gap"),
        pytest.param(
            seen(1, 2, events.GAP, 1, 2, 3), 3, Tally(events=5, gaps=1, repeated=2), id="repeated after a gap"
        ),
        pytest.param(
            seen(1, 2, events.GAP, 1, 3), 3, Tally(events=4, gaps=1, repeated=1), id="no hole in what was seen before"
        ),
        pytest.param(seen(1, events.GAP), 3, Tally(events=1, gaps=1, excused=2), id="gap at the end"),
        pytest.param(seen(1, events.DISCONTINUITY, 3), 3, Tally(events=2, gaps=1, excused=1), id="live source"),
        pytest.param(seen(1, events.RUN_ENDED, events.END), 1, Tally(events=1, terminals=1, ends=1), id="ended"),
        pytest.param(
            seen(1, events.RUN_ENDED, 2), 2, Tally(events=2, terminals=1, after_terminal=1), id="event after the end"
        ),
    ],
)
def test_counts(items: list[Seen], said: int, expected: Tally) -> None:
    assert tally(items, {"a": said}) == expected


def test_sources_are_counted_by_themselves_and_a_gap_excuses_each_once() -> None:
    items = [*seen(1, 2), *seen(1, source="b"), *seen(events.GAP, source=""), *seen(4), *seen(3, source="b")]
    found = tally([*items, *seen(6)], {"a": 6, "b": 3})
    assert found == Tally(events=6, gaps=1, excused=2, lost=1)


def test_a_word_about_one_source_excuses_no_other() -> None:
    found = tally([*seen(1, events.DISCONTINUITY), *seen(2, source="b")], {"a": 2, "b": 2})
    assert (found.excused, found.lost) == (1, 1)


def test_what_a_live_source_said_before_it_was_followed_is_excused() -> None:
    items = seen(3, 4, 6)
    assert tally(items, {"a": 6}, live={"a"}) == Tally(events=3, excused=2, lost=1)
    assert tally(items, {"a": 6}) == Tally(events=3, lost=3)


def test_totals_add_up() -> None:
    assert total([Tally(events=2, lost=1), Tally(events=3, ends=1)]) == Tally(events=5, lost=1, ends=1)
