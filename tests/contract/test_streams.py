"""Golden frames of event streams: what a gateway sends today, browsers and clients of tomorrow must read.

`golden/streams.json` holds each kind of frame as bytes; `towline.wire` must write exactly these, and read them back.
Names, members and the shape of ids are kept once shipped. `UPSTREAMS` are transcripts as agents send them.
"""

import json
from pathlib import Path

import msgspec
import pytest

from towline.wire import events, sse
from towline.wire.runs import End, EventData, Gap
from towline.wire.sse import Event, Parser
from towline.wire.threads import ThreadGap

GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("golden").joinpath("streams.json").read_text())

TS = 1764000000123
EVENT = EventData("planner", "17", TS, "output", '{"text":"héllo"}')
EVENT_OF_SEVERAL = EventData("planner", "", TS, "message", "a\nb", run="r-1")
MENDED_EVENT = EventData("planner", "", TS, "output", "caf\ufffd", mended=True)
GAP = Gap("r-1", after=None, first_available="8-9")
END = End("r-1", "completed")
THREAD_GAP = ThreadGap("01a2", after="7-1", first_available=None)

FRAMES: dict[str, bytes] = {
    "opening": events.opening(15.0, 2350),
    "keep-alive": sse.comment(),
    "event": sse.encode("1764000000000-1764000000000001", "output", msgspec.json.encode(EVENT)),
    "event, several runs": sse.encode("Zm9v", "message", msgspec.json.encode(EVENT_OF_SEVERAL)),
    "event, mended": sse.encode("7", "output", msgspec.json.encode(MENDED_EVENT)),
    "event, lines": sse.encode("7", "note", b"one\ntwo\r\nthree\rfour"),
    "gap": sse.encode(None, events.GAP, msgspec.json.encode(GAP)),
    "gap of a thread": sse.encode(None, events.GAP, msgspec.json.encode(THREAD_GAP)),
    "end": sse.encode(None, events.END, msgspec.json.encode(END)),
}

# What people's own servers send: line ends of all kinds, comments, ids or none, several fields in any order.
UPSTREAMS: dict[str, tuple[bytes, list[Event]]] = {
    "the standard's stock ticker": (
        b"data: YHOO\ndata: +2\ndata: 10\n\n: test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\n"
        b"data:  third event\n\n",
        [
            Event("message", b"YHOO\n+2\n10"),
            Event("message", b"first event", "1"),
            Event("message", b"second event", ""),
            Event("message", b" third event"),
        ],
    ),
    "sse-starlette": (
        b'id: 1\r\nevent: output\r\ndata: {"n":1}\r\nretry: 1500\r\n\r\n: ping - 2026-01-02 03:04:05.678+00:00\r\n\r\n',
        [Event("output", b'{"n":1}', "1")],
    ),
    "a model's API": (
        b'event: message_start\ndata: {"type":"message_start"}\n\nevent: ping\ndata: {"type":"ping"}\n\n'
        b"data: [DONE]\n\n",
        [
            Event("message_start", b'{"type":"message_start"}'),
            Event("ping", b'{"type":"ping"}'),
            Event("message", b"[DONE]"),
        ],
    ),
    "an old Mac": (b"event: result\rdata: done\r\r", [Event("result", b"done")]),
}


def test_every_frame_is_golden() -> None:
    assert FRAMES.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_frames_are_written_as_ever(name: str) -> None:
    assert FRAMES[name].decode() == GOLDEN[name]


def test_a_golden_stream_is_read_as_ever() -> None:
    parser = Parser()
    names = ("opening", "event", "keep-alive", "event, several runs", "gap", "end")
    first, of_several, gap, end = parser.feed("".join(GOLDEN[name] for name in names).encode())
    assert isinstance(first, Event)
    assert isinstance(of_several, Event)
    assert isinstance(gap, Event)
    assert isinstance(end, Event)
    assert (first.type, msgspec.json.decode(first.data, type=EventData)) == ("output", EVENT)
    assert (of_several.id, msgspec.json.decode(of_several.data, type=EventData)) == ("Zm9v", EVENT_OF_SEVERAL)
    assert (gap.type, gap.id, msgspec.json.decode(gap.data, type=Gap)) == (events.GAP, None, GAP)
    assert (end.type, end.id, msgspec.json.decode(end.data, type=End)) == (events.END, None, END)
    # Neither the gap nor the end has moved the cursor.
    assert (parser.last_event_id, parser.retry_ms) == ("Zm9v", 2350)


def test_an_id_without_data_moves_the_cursor_and_is_no_event() -> None:
    """How a gateway says where a reader stands that wants no history."""
    parser = Parser()
    assert parser.feed(b"id: 7-9\n\n") == []
    assert parser.last_event_id == "7-9"


def test_the_opening_states_the_interval() -> None:
    parser = Parser()
    assert parser.feed(GOLDEN["opening"].encode()) == []
    assert events.keepalive_s(parser.comment) == 15.0
    assert events.keepalive_s(b"") is None


@pytest.mark.parametrize("name", sorted(UPSTREAMS))
def test_upstreams_are_understood(name: str) -> None:
    stream, expected = UPSTREAMS[name]
    assert Parser().feed(stream) == expected
