"""When the sidecar dials again: the whole table, and bounds for every sequence."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.sidecar.backoff import CAP_S, SHORT_SESSION_S, TOLD_DELAY_MAX_S, Backoff, Halt, NeedToken, Redial

LONG = 60.0
rolls = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize("code", [1001, 1012, None, 1000, 4001, 4002])
def test_after_a_long_session_the_next_dial_is_within_a_second(code: int | None) -> None:
    delays = [Backoff().after_close(code, "", LONG, roll / 100) for roll in range(100)]
    assert all(isinstance(step, Redial) and 0 <= step.after_s <= 1 for step in delays)
    # Spread evenly: a thousand laptops must not dial in the same instant.
    assert len({step.after_s for step in delays if isinstance(step, Redial)}) == 100


def test_later_is_later() -> None:
    step = Backoff().after_close(1013, "", LONG, 0.0)
    assert isinstance(step, Redial)
    assert step.after_s >= 5


@pytest.mark.parametrize(
    ("reason", "least_s"),
    [
        ("30", 30),
        ("2.5 another machine", 2.5),
        ("another machine is connected; try again in 20 s", 20),
        ("", 5),
        ("soon", 5),
        ("-1", 0),
        ("nan", 5),
        ("1e9", 300),
    ],
)
def test_stand_by_takes_the_delay_from_the_reason(reason: str, least_s: float) -> None:
    step = Backoff().after_close(4003, reason, LONG, 0.0)
    assert step == Redial(least_s)


@pytest.mark.parametrize("code", [4501, 4502, 4503, 4999])
def test_codes_that_forbid_another_dial(code: int) -> None:
    assert isinstance(Backoff().after_close(code, "", LONG, 0.5), Halt)


def test_a_revoked_token_needs_another_one() -> None:
    assert Backoff().after_close(4500, "", LONG, 0.5) == NeedToken()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_tried_three_times(status: int) -> None:
    backoff = Backoff()
    assert isinstance(backoff.after_refusal(status, None, 0.5), Redial)
    assert isinstance(backoff.after_refusal(status, None, 0.5), Redial)
    assert backoff.after_refusal(status, None, 0.5) == NeedToken()
    backoff.after_new_token()
    assert isinstance(backoff.after_refusal(status, None, 0.5), Redial)


def test_other_answers_between_do_not_count_as_refused_tokens() -> None:
    backoff = Backoff()
    for _ in range(5):
        assert isinstance(backoff.after_refusal(401, None, 0.5), Redial)
        assert isinstance(backoff.after_refusal(502, None, 0.5), Redial)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_never_undercut(status: int) -> None:
    for roll in (0.0, 0.5, 0.99):
        step = Backoff().after_refusal(status, "7", roll)
        assert isinstance(step, Redial)
        assert 7 <= step.after_s < 9
    assert Backoff().after_refusal(500, "7", 0.0) == Redial(0.0), "only 429 and 503 carry it"


def test_retry_after_may_be_a_date_by_the_servers_clock() -> None:
    step = Backoff().after_refusal(503, "Wed, 21 Oct 2015 07:28:30 GMT", 0.0, date="Wed, 21 Oct 2015 07:28:00 GMT")
    assert step == Redial(30.0)
    past = Backoff().after_refusal(503, "Wed, 21 Oct 2015 07:28:00 GMT", 0.0, date="Wed, 21 Oct 2015 07:28:30 GMT")
    assert past == Redial(0.0)


@pytest.mark.parametrize("date", [None, "", "now", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_date_that_cannot_be_placed_is_no_delay(date: str | None) -> None:
    """Not by our own clock, which may be years off: then it is a failure like others."""
    step = Backoff().after_refusal(503, "Wed, 21 Oct 2015 07:28:30 -0000", 0.99, date=date)
    assert isinstance(step, Redial)
    assert step.after_s <= 1


def test_three_hundred_machines_come_back_spread_and_soon() -> None:
    """All lose their socket at once; then the server answers 503 for half a minute; then it is well."""
    dice = random.Random(17)
    first_dials, back_at, pauses_late = [], [], []
    for _ in range(300):
        backoff = Backoff()
        step = backoff.after_close(1012, "", LONG, dice.random())
        assert isinstance(step, Redial)
        now = step.after_s
        first_dials.append(now)
        while now < 30:
            step = backoff.after_refusal(503, None, dice.random())
            assert isinstance(step, Redial)
            now += step.after_s
        pauses_late.append(step.after_s)
        back_at.append(now)
    tenths = Counter(int(at * 10) for at in first_dials)
    assert max(tenths.values()) < 300 * 0.25, "no tenth of the first second has a quarter of them"
    assert max(back_at) <= 90
    assert max(Counter(int(at) for at in back_at).values()) < 300 * 0.25, "nor any second afterwards"
    assert max(pauses_late) > 20, "delays have grown"


@given(st.lists(st.tuples(st.sampled_from(["failure", 500, 503, 429, 404, 307, 1012, None, 4001]), rolls), max_size=40))
def test_delays_are_bounded_and_never_end(events: list[tuple[str | int | None, float]]) -> None:
    backoff = Backoff()
    for what, roll in events:
        if what == "failure":
            step = backoff.after_failure(roll)
        elif isinstance(what, int) and what < 1000:
            step = backoff.after_refusal(what, None, roll)
        else:
            assert not isinstance(what, str)
            step = backoff.after_close(what, "", 0.0, roll)
        assert isinstance(step, Redial)
        assert 0 <= step.after_s <= CAP_S


@given(st.text(max_size=20))
def test_whatever_a_server_says_about_delays_is_bounded(text: str) -> None:
    for step in (Backoff().after_refusal(503, text, 0.99), Backoff().after_close(4003, text, LONG, 0.99)):
        assert isinstance(step, Redial)
        assert 0 <= step.after_s <= 1.2 * TOLD_DELAY_MAX_S


@given(st.lists(rolls, min_size=8, max_size=8), st.sampled_from([1001, 1012, None, 1011, 4001]))
def test_a_server_that_accepts_and_closes_is_not_stormed(rolled: list[float], code: int | None) -> None:
    backoff, now, dials = Backoff(), 0.0, 1
    for roll in rolled:
        step = backoff.after_close(code, "", 0.0, roll)
        assert isinstance(step, Redial)
        now += step.after_s
        dials += now <= 10
    assert dials <= 4


def test_failures_grow_and_a_session_forgives_them() -> None:
    backoff = Backoff()
    steps = [backoff.after_failure(0.999) for _ in range(9)]
    delays = [step.after_s for step in steps if isinstance(step, Redial)]
    assert delays == sorted(delays)
    assert delays[0] <= 1
    assert delays[-1] > 29
    backoff.after_close(1012, "", SHORT_SESSION_S, 0.5)
    assert backoff.failures == 0
