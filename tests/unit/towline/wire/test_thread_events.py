"""What a thread's events say, as they are written and read."""

import msgspec
import pytest

from towline.wire import events, thread_events
from towline.wire.thread_events import Attempt, Delta, Ended, Message, ThreadEventData, ToolCall, ToolResult
from towline.wire.threads import TurnError

SAID = [
    (events.TURN_STARTED, Attempt("t", 1)),
    (events.TURN_RESTARTED, Attempt("t", 2)),
    (events.MESSAGE_DELTA, Delta("t", 1, 7, "é\n")),
    (events.TOOL_CALL, ToolCall("t", "model-1.0", "search", {"query": [1]})),
    (events.TOOL_RESULT, ToolResult("t", "model-1.0", "completed", {"result": None})),
    (events.MESSAGE, Message("e", "t", "user", "hello")),
    (events.TURN_COMPLETED, Ended("t", entry="e")),
    (events.TURN_FAILED, Ended("t", error=TurnError("model-unknown", "no such model"))),
    (events.TURN_CANCELLED, Ended("t", error=TurnError("cancelled"))),
]


@pytest.mark.parametrize(("event_type", "data"), SAID, ids=[event_type for event_type, _ in SAID])
def test_what_is_written_is_read(event_type: str, data: ThreadEventData) -> None:
    text = msgspec.json.encode(data)
    assert thread_events.read(event_type, text) == data
    assert thread_events.read(event_type, text.decode()) == data
    with_more = msgspec.json.encode({**msgspec.json.decode(text), "of_tomorrow": True})
    assert thread_events.read(event_type, with_more) == data


def test_an_end_says_only_what_it_has() -> None:
    assert msgspec.json.encode(Ended("t", entry="e")) == b'{"turn":"t","entry":"e"}'


def test_types_of_tomorrow_have_no_data() -> None:
    assert thread_events.read("signal.dispatch.paused", b"not even JSON") is None


@pytest.mark.parametrize("data", [b"", b"{}", b'{"turn":"t","attempt":"1"}'])
def test_what_is_no_data_of_its_type_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        thread_events.read(events.TURN_STARTED, data)


def test_every_type_has_its_data_and_none_is_reserved_for_frames() -> None:
    types = {value for name, value in vars(events).items() if name.startswith(("TURN_", "MESSAGE", "TOOL_"))}
    types -= {events.TURN_ENDS}
    assert types == {event_type for event_type, _ in SAID}
    assert types > events.TURN_ENDS
    assert not any(map(events.is_own, types))
