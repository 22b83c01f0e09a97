"""Kinds of events: whose words they are, and which of them are work."""

import pytest

from towline.wire import events
from towline.wire.sse import Parser


@pytest.mark.parametrize("text", ["towline.", "towline.run.ended", "towline.gap", "open", "error"])
def test_an_upstream_cannot_speak_for_us(text: str) -> None:
    assert events.upstream_type(text) == "message"


@pytest.mark.parametrize("text", ["output", "message", "towline", "Towline.x", "opened", "errors", "a towline.x", ""])
def test_other_words_are_kept(text: str) -> None:
    assert events.upstream_type(text) == text
    assert not events.is_own(text)


@pytest.mark.parametrize("text", ["output", "result", "assistant", "tool_result"])
def test_work_is_progress(text: str) -> None:
    assert events.is_progress(text)
    assert not events.is_progress(text, {"done"})


@pytest.mark.parametrize("text", ["ping", "message", "keepalive", "Output", "towline.run.stalled"])
def test_signs_of_life_are_none(text: str) -> None:
    assert not events.is_progress(text)


def test_what_we_say_neither_is_work_nor_ends_a_source_whatever_the_run_lists() -> None:
    listed = {events.RUN_STALLED}
    assert not events.is_progress(events.RUN_STALLED, listed)
    assert not events.is_terminal(events.RUN_STALLED, listed)
    assert events.is_terminal("result")
    assert not events.is_terminal("output")


@pytest.mark.parametrize("interval_s", [0.2, 1, 15.0, 59.5, 3600])
def test_the_opening_is_read_back(interval_s: float) -> None:
    parser = Parser(last_event_id="5")
    assert parser.feed(events.opening(interval_s, 1234)) == []
    assert events.keepalive_s(parser.comment) == interval_s
    assert (parser.retry_ms, parser.last_event_id) == (1234, "5")


@pytest.mark.parametrize("comment", [b"", b"ping", b"keepalive_s=", b"keepalive_s=-1", b"keepalive_s=15 ", b"x" * 999])
def test_other_comments_state_no_interval(comment: bytes) -> None:
    assert events.keepalive_s(comment) is None
