"""What counts as a coherent telling of a turn, and what is found to be wrong with one that is not."""

import pytest

from harness.drills.dialogue import Heard, read_story
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, Ended, Message, ThreadEventData, ToolCall, ToolResult

Item = tuple[str, ThreadEventData]

STARTED: Item = (events.TURN_STARTED, Attempt("t", 1))
RESTARTED: Item = (events.TURN_RESTARTED, Attempt("t", 2))
COMPLETED: Item = (events.TURN_COMPLETED, Ended("t", entry="e2"))
CALL: Item = (events.TOOL_CALL, ToolCall("t", "s1", "look", {}))
RESULT: Item = (events.TOOL_RESULT, ToolResult("t", "s1", "completed", {}))
ANSWER: Item = (events.MESSAGE, Message("e2", "t", "agent", "a b"))


def piece(attempt: int, n: int, text: str) -> Item:
    return events.MESSAGE_DELTA, Delta("t", attempt, n, text)


def heard(*items: Item) -> list[Heard]:
    return [Heard(kind, data.turn, f"1-{number}", float(number), data) for number, (kind, data) in enumerate(items)]


def test_a_turn_that_was_begun_again_says_what_its_last_attempt_said() -> None:
    story = read_story(
        heard(
            STARTED, CALL, RESULT, piece(1, 1, "a "), RESTARTED, piece(2, 1, "a "), piece(2, 2, "b"), ANSWER, COMPLETED
        )
    )
    assert story.faults == []
    told = story.turns["t"]
    assert (told.text, told.end, told.restarts) == ("a b", events.TURN_COMPLETED, 1)
    assert story.answers == {"t": "a b"}


def test_a_turn_that_was_cancelled_before_it_began_is_told_by_its_end_alone() -> None:
    story = read_story(heard((events.TURN_CANCELLED, Ended("t"))))
    assert story.faults == []
    assert story.turns["t"].end == events.TURN_CANCELLED


def test_a_gap_is_counted_and_is_no_fault() -> None:
    story = read_story([Heard(events.GAP, "", "", 0.0, None), *heard(STARTED)])
    assert (story.gaps, story.faults) == (1, [])


def test_after_a_gap_something_may_be_missing_and_come_again() -> None:
    before = heard(STARTED, piece(1, 1, "a "), ANSWER, COMPLETED)
    again = [item._replace(id=f"2-{item.id}") for item in heard(piece(1, 4, "b"), ANSWER, COMPLETED)]
    gap = Heard(events.GAP, "", "", 0.0, None)
    assert read_story([*before[:2], gap, *again]).faults == []
    assert read_story([*before, gap, *again[1:]]).faults == []


def test_also_after_a_gap_a_turn_has_one_answer_and_one_end() -> None:
    gap = Heard(events.GAP, "", "", 0.0, None)
    other_end = Heard(events.TURN_FAILED, "t", "9-1", 0.0, Ended("t"))
    other_answer = Heard(events.MESSAGE, "t", "9-2", 0.0, Message("e3", "t", "agent", "c"))
    faults = read_story([*heard(STARTED, ANSWER, COMPLETED), gap, other_end, other_answer]).faults
    assert faults == ["after signal.dispatch.completed (signal.dispatch.failed of t)", "a second answer of t"]


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        pytest.param(
            [STARTED, COMPLETED, piece(1, 1, "a")], "after signal.dispatch.completed", id="word-after-the-end"
        ),
        pytest.param([STARTED, COMPLETED, COMPLETED], "after signal.dispatch.completed", id="two-ends"),
        pytest.param([STARTED, piece(1, 2, "b")], "piece (1, 2) where (1, 1) was due", id="hole"),
        pytest.param([STARTED, piece(1, 1, "a"), piece(1, 1, "a")], "piece (1, 1) where (1, 2)", id="doubled-piece"),
        pytest.param([STARTED, RESTARTED, piece(1, 1, "a")], "piece (1, 1) where (2, 1)", id="word-of-an-old-attempt"),
        pytest.param([STARTED, STARTED], "without a word", id="two-starts"),
        pytest.param([RESTARTED], "before it was begun", id="no-start"),
        pytest.param([STARTED, RESULT], "without a call", id="result-without-call"),
        pytest.param([STARTED, CALL, CALL], "called again", id="two-calls"),
        pytest.param([STARTED, CALL, RESULT, RESULT], "a second result", id="two-results"),
        pytest.param([STARTED, ANSWER, ANSWER], "told again", id="entry-twice"),
    ],
)
def test_what_is_not_coherent_is_named(items: list[Item], fault: str) -> None:
    assert any(fault in found for found in read_story(heard(*items)).faults)


def test_an_event_that_comes_twice_is_named() -> None:
    (started,) = heard(STARTED)
    assert "signal.dispatch.started 1-0 came again" in read_story([started, started]).faults
