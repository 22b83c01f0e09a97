"""When a client comes back to a stream that broke: as asked, further and further apart, never in step with others."""

import pytest

from towline.stream import FIRST_ATTEMPTS_MAX, PAUSE_FIRST_S, PAUSE_MAX_S, PAUSE_SPREAD, Retries


def pause(retries: Retries, *, asked_s: float | None = None, spread: float = 0.0) -> float:
    return retries.pause_s(asked_s=asked_s, spread=spread)


def bad(retries: Retries, times: int) -> Retries:
    for _ in range(times):
        retries.note(brought=False, lasted_s=0.0)
    return retries


def test_bad_connections_are_further_and_further_apart() -> None:
    pauses = [pause(bad(Retries(was_open=True), times)) for times in range(1, 12)]
    assert pauses[:4] == [PAUSE_FIRST_S, 2 * PAUSE_FIRST_S, 4 * PAUSE_FIRST_S, 8 * PAUSE_FIRST_S]
    assert pauses[-1] == PAUSE_MAX_S
    assert pause(bad(Retries(was_open=True), 100_000)) == PAUSE_MAX_S


@pytest.mark.parametrize(("brought", "lasted_s"), [(True, 0.0), (False, PAUSE_MAX_S)], ids=["brought", "lasted"])
def test_a_good_connection_forgets_the_bad_ones(brought: bool, lasted_s: float) -> None:
    retries = bad(Retries(was_open=True), 9)
    retries.note(brought=brought, lasted_s=lasted_s)
    assert pause(retries) == PAUSE_FIRST_S


def test_the_server_says_how_long() -> None:
    """`retry` is where the doubling starts; `Retry-After` is the least."""
    assert pause(Retries(was_open=True, retry_ms=100)) == 0.1
    assert pause(bad(Retries(was_open=True, retry_ms=100), 3)) == 0.4
    assert pause(bad(Retries(was_open=True, retry_ms=60_000), 3)) == 60.0
    assert pause(Retries(was_open=True, retry_ms=100), asked_s=7.0) == 7.0
    assert pause(bad(Retries(was_open=True), 4), asked_s=2.0) == 8 * PAUSE_FIRST_S


def test_chance_only_adds() -> None:
    assert pause(Retries(), asked_s=10.0, spread=1.0) == 10.0 * (1 + PAUSE_SPREAD)


def test_only_a_stream_that_never_was_is_given_up() -> None:
    assert not bad(Retries(), FIRST_ATTEMPTS_MAX - 1).is_over()
    assert bad(Retries(), FIRST_ATTEMPTS_MAX).is_over()
    assert not bad(Retries(was_open=True), 1000).is_over()
