"""What of an answer is shown while it comes, and what is still missing at the end."""

from towline.cli.answer import AnswerText
from towline.wire.thread_events import Delta


def delta(n: int, text: str, *, attempt: int = 1) -> Delta:
    return Delta("t", attempt, n, text)


def told(*deltas: Delta, begins: int = 1) -> AnswerText:
    text = AnswerText()
    text.begin(begins)
    for each in deltas:
        text.add(each)
    return text


def test_deltas_are_shown_as_they_come_and_nothing_is_left() -> None:
    text = AnswerText()
    assert not text.begin(1)
    assert [text.add(delta(1, "fo")), text.add(delta(2, "ur"))] == ["fo", "ur"]
    assert text.rest("four") == ""


def test_what_no_delta_brought_comes_at_the_end() -> None:
    """Agents that do not stream, and deltas that were lost with their worker."""
    assert told().rest("four") == "four"
    assert told(delta(1, "fo")).rest("four") == "ur"


def test_a_delta_counts_once() -> None:
    text = told(delta(1, "fo"))
    assert text.add(delta(1, "fo")) == ""
    assert text.rest("four") == "ur"


def test_a_newer_attempt_voids_what_was_shown() -> None:
    text = told(delta(1, "fi"))
    assert text.begin(2)
    assert text.add(delta(2, "ve")) == ""  # what the old one still said
    assert text.add(delta(1, "four", attempt=2)) == "four"
    assert not text.begin(2)
    assert not text.begin(1)
    assert text.rest("four") == ""


def test_an_attempt_that_another_worker_goes_on_with_begins_its_answer_again() -> None:
    text = told(delta(1, "fo"))
    assert text.begin(1, is_again=True)
    assert text.add(delta(1, "four")) == "four"
    assert not text.begin(0, is_again=True)
    assert text.rest("four") == ""


def test_nothing_is_void_where_nothing_was_shown() -> None:
    assert not told().begin(2)


def test_after_a_hole_the_whole_answer_is_shown() -> None:
    """Also where what came begins like the answer."""
    assert told(delta(1, "four"), delta(3, " of")).rest("four of four of") is None
    assert told(delta(2, "four")).rest("four") is None
    hole = told(delta(2, "x"))
    hole.begin(2)
    hole.add(delta(1, "four", attempt=2))
    assert hole.rest("four") == ""


def test_another_answer_is_shown_whole() -> None:
    assert told(delta(1, "five")).rest("four") is None


def test_what_was_said_before_a_tool_call_may_be_no_part_of_the_answer() -> None:
    text = told(delta(1, "let me see. "))
    text.call_tool()
    text.add(delta(2, "four"))
    assert text.rest("four") == ""
    assert text.rest("let me see. four!") == "!"
    text.call_tool()
    assert text.rest("done") == "done"
