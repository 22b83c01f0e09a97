"""What an upstream's answer means, and how long to wait: tables."""

import pytest

from relay.policy import (
    BACKOFF_MAX_S,
    RETRY_AFTER_MAX_S,
    RETRY_MAX_S,
    RETRY_MIN_S,
    Accepted,
    Final,
    Pace,
    Refused,
    judge_answer,
)

WALL_NOW = 1_800_000_000.0  # Fri, 15 Jan 2027 08:00:00 GMT


@pytest.mark.parametrize(
    "content_type", ["text/event-stream", "Text/Event-Stream; charset=utf-8", "text/event-stream;"]
)
def test_an_event_stream_is_read(content_type: str) -> None:
    assert judge_answer(200, content_type, "", WALL_NOW) == Accepted()


@pytest.mark.parametrize(
    ("status", "content_type", "reason"),
    [
        (204, "", "upstream-finished"),
        (204, "text/event-stream", "upstream-finished"),
        (301, "", "upstream-redirected"),
        (302, "text/event-stream", "upstream-redirected"),
        (307, "", "upstream-redirected"),
        (304, "", "upstream-redirected"),
        (400, "", "upstream-refused"),
        (401, "", "upstream-refused"),
        (404, "text/event-stream", "upstream-refused"),
        (410, "", "upstream-refused"),
        (206, "text/event-stream", "upstream-refused"),
        (202, "text/event-stream", "upstream-refused"),
        (200, "text/html", "not-an-event-stream"),
        (200, "application/json", "not-an-event-stream"),
        (200, "", "not-an-event-stream"),
        (200, "text/event-streams", "not-an-event-stream"),
    ],
)
def test_final_answers_end_the_source_with_a_reason(status: int, content_type: str, reason: str) -> None:
    verdict = judge_answer(status, content_type, "5", WALL_NOW)
    assert isinstance(verdict, Final)
    assert verdict.reason == reason
    assert str(status) in verdict.detail or content_type in verdict.detail


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_passing_troubles_are_retried(status: int) -> None:
    assert judge_answer(status, "text/html", "", WALL_NOW) == Refused(None)


@pytest.mark.parametrize(
    ("value", "after_s"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("99999999999999999999", RETRY_AFTER_MAX_S),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Fri, 15 Jan 2027 07:59:30 GMT", 0.0),
        ("Fri, 15 Jan 9999 07:59:30 GMT", pytest.approx(2.5e11, rel=0.1)),
        ("Fri, 99 Jan 2027 99:99:99 GMT", pytest.approx(0, abs=1e9)),
        ("soon", None),
        ("-3", None),
        ("1.5", None),
        ("٧", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_a_date(value: str, after_s: float | None) -> None:
    assert judge_answer(503, "", value, WALL_NOW) == Refused(after_s)


def test_failures_in_a_row_wait_longer_up_to_a_bound_and_success_forgets_them() -> None:
    pace = Pace()
    longest = [pace.after_failure(0.999) for _ in range(20)]
    assert longest == sorted(longest)
    assert longest[0] == pytest.approx(1.0, abs=0.01)
    assert longest[-1] == pytest.approx(BACKOFF_MAX_S, rel=0.01)
    pace.heard(None)
    assert pace.after_failure(0.999) == pytest.approx(1.0, abs=0.01)


def test_those_that_failed_together_come_back_apart() -> None:
    waits = [Pace(failures=3).after_failure(spread / 100) for spread in range(100)]
    assert max(waits) - min(waits) > 3
    told = [Pace().after_failure(spread / 100, 60) for spread in range(100)]
    assert min(told) >= 60
    assert max(told) - min(told) > 5
    closed = [Pace().after_close(spread / 100) for spread in range(100)]
    assert max(closed) - min(closed) > 0.4


def test_retry_after_is_a_minimum_and_bounded() -> None:
    assert Pace().after_failure(0.0, 5.0) >= 5.0
    assert Pace(failures=10).after_failure(0.0, 0.0) > 1.0
    assert Pace().after_failure(0.999, 1e9) <= RETRY_AFTER_MAX_S * 1.1


@pytest.mark.parametrize(
    ("retry_ms", "retry_s"), [(0, RETRY_MIN_S), (500, 0.5), (86_400_000, RETRY_MAX_S), (10**15, RETRY_MAX_S)]
)
def test_the_upstreams_own_retry_is_heeded_within_bounds(retry_ms: int, retry_s: float) -> None:
    pace = Pace()
    pace.heard(retry_ms)
    pace.heard(None)
    assert pace.after_close(0.0) == retry_s / 2
    assert retry_s / 2 <= pace.after_close(0.999) <= retry_s
    assert pace.after_failure(0.999) <= retry_s
