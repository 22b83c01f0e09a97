"""Frames: whatever comes in is a frame, an unknown type, or a `FrameError` that says why; nothing else."""

import contextlib
import json as stdlib_json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.wire import frames

JSON_TEXTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(st.characters()), children, max_size=3),
    max_leaves=8,
)
TYPES = sorted({frame.__struct_config__.tag for frame in frames.Frame.__subclasses__()})
MEMBERS = sorted({name for frame in frames.Frame.__subclasses__() for name in frame.__struct_fields__})


def result_text(result: str, **members: Any) -> str:
    """A result frame around raw JSON."""
    head = stdlib_json.dumps({"type": "job_result", "id": "f", "outcome": "completed", **members})
    return f'{head[:-1]},"result":{result}}}'


def decode_result(text: str) -> frames.JobResult:
    """Decode what must be a result."""
    frame = frames.decode_from_sidecar(text)
    assert isinstance(frame, frames.JobResult)
    return frame


@given(st.text(st.characters()))
@example("\ud800")
@example('{"type":"ping","n":\ud800}')
def test_any_text_is_a_frame_or_a_frame_error(text: str) -> None:
    """A hostile peer's text raises nothing else, on either side."""
    for decode in (frames.decode_from_sidecar, frames.decode_from_worker):
        with contextlib.suppress(frames.FrameError):
            frame = decode(text)
            assert frame is None or isinstance(frame, frames.Frame)


@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(MEMBERS), JSON_TEXTS, max_size=8))
def test_any_members_are_a_frame_or_a_frame_error(kind: str, members: dict[str, Any]) -> None:
    """Known types with arbitrary members: what is accepted can be encoded again, and says the same."""
    text = stdlib_json.dumps({"type": kind, **members})
    try:
        frame = frames.decode_from_sidecar(text)
    except frames.FrameError:
        return
    if frame is not None:
        again = frames.encode(frame)
        assert frames.encode(frames.decode_from_sidecar(again) or frames.Draining()) == again


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `type`"),
        ('{"type":1}', "Expected `str`"),
        ('{"type":"job_result"}', "outcome"),
        ('{"type":"job_result","outcome":"fine"}', "$.outcome"),
        ('{"type":"ping","n":"1"}', "$.n"),
        ('{"type":"ping","n":NaN}', "NaN"),
        ('{"type":"ping","n":1e999}', "$.n"),
        ('{"type":"hello","machine":"m"}', "journal"),
        ('{"type":"hello","machine":"m","journal":"j","tools":[{"name":7}]}', "$.tools[0].name"),
        (
            '{"type":"hello","machine":"m","journal":"j","tools":[{"name":"t","input_schema":{"a":' + "[" * 100_000,
            "nested",
        ),
        ('{"type":"status_result","id":"x","busy":0,"queue":0,"uptime_s":1}', "$.busy"),
    ],
)
def test_a_frame_error_says_which_field_and_why(text: str, reason: str) -> None:
    """The reason travels in the close frame."""
    with pytest.raises(frames.FrameError) as caught:
        frames.decode_from_sidecar(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize("kind", ["job_progress", "", "Hello", "job"])
def test_an_unknown_type_is_no_error(kind: str) -> None:
    """Newer peers can talk to older ones; a frame of the other direction is as good as unknown."""
    assert frames.decode_from_sidecar(stdlib_json.dumps({"type": kind, "id": "x", "n": [1]})) is None
    assert (
        frames.decode_from_worker(stdlib_json.dumps({"type": kind or "hello", "id": "x"}).replace("job", "x")) is None
    )


def test_text_in_a_frame_is_mended() -> None:
    """A lone surrogate or U+0000 in a member of ours becomes U+FFFD instead of ending the session."""
    frame = frames.decode_from_sidecar('{"type":"status_result","id":"\\ud800","busy":true,"queue":0,"uptime_s":1}')
    assert frame == frames.StatusResult(id="\ufffd", busy=True, queue=0, uptime_s=1)


def test_a_result_stays_the_bytes_that_came() -> None:
    """Raw JSON is carried, white space and all."""
    assert bytes(decode_result(result_text('{"b": 1.0,  "a": 1e2}')).result) == b'{"b": 1.0,  "a": 1e2}'


def test_a_result_with_a_lone_surrogate_in_the_text_is_mended_and_says_so() -> None:
    """Not an escape, but a code point that no UTF-8 holds, as lenient peers produce."""
    frame = decode_result(result_text('{"a": "\ud800"}'))
    assert (bytes(frame.result), frame.mended, frame.outcome) == ('{"a":"\ufffd"}'.encode(), True, "completed")


@pytest.mark.parametrize(
    "result", ["NaN", '{"a": [1, -Infinity]}', '{"a": "\ud800", "b": 1e999}', f"[NaN, {'9' * 5000}]"]
)
def test_a_result_that_cannot_be_carried_fails_its_job_and_not_the_socket(result: str) -> None:
    """It becomes a named failure of the same frame or job."""
    frame = decode_result(result_text(result, job="j", lane_busy=True))
    assert (frame.outcome, frame.id, frame.job, frame.lane_busy) == ("failed", "f", "j", True)
    assert frame.error is not None
    assert frame.error.code == "result-unusable"
    assert not frame.error.retryable


def test_a_nested_result_is_carried_to_the_check_and_not_refused_as_a_frame() -> None:
    """Depth beyond the limit is a matter of the one job; `json.check_raw` names it."""
    frame = decode_result(result_text("[" * 90 + "]" * 90))
    assert frame.outcome == "completed" or (frame.error is not None and frame.error.code == "result-unusable")


def test_a_tool_is_repeatable_by_either_hint() -> None:
    """Read-only or idempotent; destructive alone is a warning for people."""
    assert frames.Hints(read_only=True).repeatable
    assert frames.Hints(idempotent=True).repeatable
    assert not frames.Hints(destructive=True).repeatable
    assert not frames.Hints().repeatable
