"""The numbers of a turn keep the order that turns rely on."""

import json
import math

import pytest

from common import turn_times
from common.store.turns import TASK_OPTIONS, Stranded, cancelled, plan_end
from towline.wire import threads as wire

CAPS_S = [wire.TURN_CAP_S_MIN, wire.TURN_CAP_S_DEFAULT, wire.TURN_CAP_S_MAX]


def test_a_claim_outlives_two_lost_heartbeats() -> None:
    """And a turn of a killed worker is taken again within 15 s: a heartbeat just made, its claim, a missed note."""
    assert 3 * turn_times.HEARTBEAT_S < turn_times.CLAIM_S
    assert turn_times.CLAIM_S + turn_times.NET_POLL_S <= 15


@pytest.mark.parametrize("cap_s", CAPS_S)
def test_whoever_can_say_why_ends_a_turn_first(cap_s: float) -> None:
    """The agent's time, the cap, Absurd's limit; what is left of the last one is enough to write the end."""
    assert 0 < turn_times.agent_time_s(cap_s) <= cap_s - 5
    # A worker at its cap may just have lost its claim: another one must be able to take it and end it.
    assert 2 * (turn_times.CLAIM_S + turn_times.NET_POLL_S) < turn_times.LIMIT_MARGIN_S


def test_retries_grow_are_spread_and_fit_into_the_shortest_turn() -> None:
    """All but the last attempt are followed by a pause."""
    attempts = range(1, turn_times.ATTEMPTS_MAX)
    pauses = [turn_times.retry_after_s(attempt, 1.0) for attempt in attempts]
    assert pauses == sorted(pauses)
    assert pauses[0] == turn_times.RETRY_FIRST_S
    assert turn_times.retry_after_s(100, 1.0) == turn_times.RETRY_CAP_S
    for attempt in attempts:
        assert turn_times.retry_after_s(attempt, 0.0) == turn_times.retry_after_s(attempt, 1.0) / 2
    assert sum(pauses) < wire.TURN_CAP_S_MIN + turn_times.LIMIT_MARGIN_S


def test_absurd_is_told_the_same() -> None:
    """Its own retries are at once: they are for claims that lapsed."""
    options = json.loads(TASK_OPTIONS)
    assert options["max_attempts"] == turn_times.ATTEMPTS_MAX
    assert options["retry_strategy"] == {"kind": "none"}
    assert options["limit_margin_s"] == turn_times.LIMIT_MARGIN_S


def test_the_net_comes_after_a_redelivery_and_before_anyone_forgets() -> None:
    """A worker that died before it announced the end is followed by another; the net is for where none is."""
    assert turn_times.CLAIM_S + turn_times.NET_POLL_S <= turn_times.ANNOUNCE_AFTER_S < turn_times.ANNOUNCE_UNTIL_S
    longest_turn_s = wire.TURN_CAP_S_MAX + turn_times.LIMIT_MARGIN_S
    assert longest_turn_s < turn_times.TASK_RETENTION_S < turn_times.THREAD_RETENTION_S < turn_times.USAGE_RETENTION_S
    assert math.isclose(turn_times.THREAD_RETENTION_S % (24 * 3600), 0)


@pytest.mark.parametrize(
    ("task_state", "code"),
    [
        ("failed", "attempts-exhausted"),
        ("cancelled", "turn-timeout"),
        ("missing", "task-lost"),
        ("completed", "task-lost"),
    ],
)
def test_a_stranded_turn_says_why_unless_it_was_to_be_cancelled(task_state: str, code: str) -> None:
    """Rule 32."""
    stranded = Stranded("turn", task_state, cancel_requested=False)  # type: ignore[arg-type]
    end = plan_end(stranded)
    assert (end.state, end.code, end.text) == ("failed", code, None)
    assert end.message
    assert plan_end(stranded._replace(cancel_requested=True)) == cancelled()
