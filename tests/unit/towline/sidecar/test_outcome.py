"""What tools return, made fit to be carried; what is kept, as it was."""

import dataclasses
import datetime
import enum
import json as stdlib_json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.sidecar.outcome import MESSAGE_CHARACTERS_MAX, JobOutcome, completed, failed, raised, unknown
from towline.wire import frames, json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: (
        st.lists(children, max_size=5) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), children, max_size=5)
    ),
    max_leaves=20,
)


@dataclasses.dataclass
class Page:
    title: str
    at: datetime.datetime


@given(values)
@example({1: "a", "1": "b"})
def test_whatever_is_returned_the_outcome_can_be_read_strictly(value: Any) -> None:
    """Either by every peer as JSON of our rules, or as a failure with a name."""
    outcome = completed(value)
    if outcome.outcome == "completed":
        read = json.loads(bytes(outcome.result))
        if not outcome.mended:
            assert read == stdlib_json.loads(stdlib_json.dumps(value))  # of which the last of duplicates counts
    else:
        assert outcome.error is not None
        assert outcome.error.code == "result-unusable"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"rows": [1, float("nan")]}, "NaN"),
        ([float("-inf")], "-Infinity"),
        ({"n": 2**64}, "$.n"),
        (-(2**63) - 1, "$"),
        (object(), ""),
        ({(1, 2): 3}, ""),
    ],
)
def test_what_cannot_be_carried_fails_and_says_why(value: Any, named: str) -> None:
    outcome = completed(value)
    assert outcome.error is not None
    assert outcome.error.code == "result-unusable"
    assert named in outcome.error.message


def test_nesting_is_bounded() -> None:
    deep: Any = 1
    for _ in range(json.NESTING_MAX + 1):
        deep = [deep]
    assert completed(deep).outcome == "failed"
    assert completed(deep[0]).outcome == "completed"


def test_structs_and_dataclasses_and_large_integers_are_carried() -> None:
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert json.loads(bytes(completed(Page("t", at)).result)) == {"title": "t", "at": "2026-01-02T00:00:00Z"}
    assert json.loads(bytes(completed([2**64 - 1, -(2**63)]).result)) == [2**64 - 1, -(2**63)]


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "carried"),
    [
        ({1: "a", "1": "b"}, {"1": "b"}),
        ({"1": "a", 1: "b", 1.5: "c"}, {"1": "b", "1.5": "c"}),
        ([{"deep": {Colour.RED: 1, 2: 2, "2": 3}}], [{"deep": {"red": 1, "2": 3}}]),
        ({1: "a\x00", "1": "b"}, {"1": "b"}),
    ],
)
def test_of_keys_that_are_written_alike_the_last_one_counts(value: Any, carried: Any) -> None:
    """Two members of one name would be refused by the next strict reader."""
    outcome = completed(value)
    assert (json.loads(bytes(outcome.result)), outcome.mended) == (carried, False)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", {"\udfff": 1}])
def test_text_is_mended_and_marked(text: Any) -> None:
    outcome = completed(text)
    assert outcome.mended
    assert "\ufffd" in bytes(outcome.result).decode()


def test_the_limit_counts_bytes_and_takes_what_just_fits() -> None:
    assert completed("x" * (frames.RESULT_BYTES_MAX - 2)).outcome == "completed"
    assert (
        completed("x" * (frames.RESULT_BYTES_MAX - 1)).error
        == failed(
            "result-too-large", f"the tool's result has {frames.RESULT_BYTES_MAX + 1} bytes, at most 1048576 fit"
        ).error
    )
    assert completed("ö" * (frames.RESULT_BYTES_MAX // 2)).outcome == "failed"


@given(st.text(st.characters(), max_size=50))
def test_messages_of_exceptions_are_bounded_and_can_be_sent(text: str) -> None:
    outcome = raised(RuntimeError(text * 100))
    assert outcome.error is not None
    assert len(outcome.error.message) <= MESSAGE_CHARACTERS_MAX
    sent = frames.decode_from_sidecar(frames.encode(outcome.frame(id_="f")))
    assert sent == outcome.frame(id_="f")


@pytest.mark.parametrize("outcome", [completed({"a": None}), failed("x", "y", retryable=True), unknown("x", "y")])
def test_what_is_kept_comes_back_equal_and_is_sent_equal(outcome: JobOutcome) -> None:
    kept = msgspec.json.decode(msgspec.json.encode(outcome), type=JobOutcome)
    assert kept == outcome
    assert frames.encode(kept.frame(job="j")) == frames.encode(outcome.frame(job="j"))
    stdlib_json.loads(frames.encode(kept.frame(id_="f", replayed=True)))
