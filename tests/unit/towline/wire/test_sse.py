"""The event stream parser and encoder against a slow reading of the standard, and against what may come over a wire."""

import itertools
import re
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.wire import sse
from towline.wire.sse import Event, Oversized, Parser, encode

LIMIT = 64


@dataclass
class Reference:
    """WHATWG HTML 9.2.6 sentence by sentence, over the whole stream at once; no limit, so sizes come with the events.

    `bytes.decode` with `replace` is the standard's UTF-8 decode.
    """

    last_event_id: str = ""
    retry: int | None = None
    events: list[tuple[str, str, str | None]] = field(default_factory=list)

    def read(self, stream: bytes) -> "Reference":
        text = stream.decode(errors="replace").removeprefix("\ufeff")
        *lines, _unfinished = re.split("\r\n|\n|\r", text)
        data = event_type = ""
        own_id: str | None = None
        for line in lines:
            if line == "":
                if own_id is not None:
                    self.last_event_id = own_id
                if data:
                    self.events.append((event_type or "message", data.removesuffix("\n"), own_id))
                data, event_type, own_id = "", "", None
                continue
            name, colon, value = line.partition(":")
            if colon and not name:
                continue
            value = value.removeprefix(" ")
            if name == "event":
                event_type = value
            elif name == "data":
                data += value + "\n"
            elif name == "id" and "\0" not in value:
                own_id = value
            elif name == "retry" and value and all(c in "0123456789" for c in value):
                self.retry = min(int(value), sse.RETRY_MS_MAX)
        return self


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in itertools.pairwise(at)]


def parsed(parser: Parser, chunks: list[bytes]) -> list[Event | Oversized]:
    return [item for chunk in chunks for item in parser.feed(chunk)]


def plain(items: list[Event | Oversized]) -> list[tuple[str, str, str | None]]:
    return [(item.type, item.data.decode(), item.id) for item in items if isinstance(item, Event)]


# Mostly lines as the grammar has them, ended in every way, so that events come about; and bytes of any kind among them.
NAMES = st.sampled_from([b"data", b"data", b"event", b"id", b"retry", b"", b"other", b"datas", b"\xff"])
COLONS = st.sampled_from([b":", b": ", b":  ", b""])
VALUES = st.sampled_from(
    [b"", b"x", b"12", b"12 ", b"00", b"a\0b", b"a:b", "é\u2028".encode(), b"\xf0\x9f", b"\x0b\xff"]
)
ENDS = st.sampled_from([b"\n", b"\n\n", b"\r", b"\r\n", b"\r\r", b"\r\n\r\n", b"\r\n\n", b"\n\r"])
LINES = st.tuples(NAMES, COLONS, VALUES, ENDS).map(b"".join)
ANY = st.one_of(st.binary(max_size=6), st.just(sse.BOM))
STREAMS = st.tuples(
    st.sampled_from([b"", b"", sse.BOM, sse.BOM + sse.BOM, sse.BOM[:2]]),
    st.lists(st.one_of(LINES, LINES, LINES, ANY), max_size=20).map(b"".join),
).map(b"".join)
LONG = st.integers(min_value=LIMIT - 3, max_value=2 * LIMIT).map(lambda length: b"y" * length)
LONG_STREAMS = st.lists(st.one_of(LINES, st.tuples(NAMES, COLONS, LONG, ENDS).map(b"".join)), max_size=12).map(b"".join)
CUTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)


@given(STREAMS, CUTS)
def test_any_cut_of_any_stream_reads_as_the_standard_says(stream: bytes, cuts: list[int]) -> None:
    expected = Reference().read(stream)
    parser = Parser()
    items = parsed(parser, cut(stream, cuts))
    assert plain(items) == expected.events
    assert (parser.last_event_id, parser.retry_ms) == (expected.last_event_id, expected.retry)


@given(STREAMS)
def test_byte_by_byte_is_the_same(stream: bytes) -> None:
    assert parsed(Parser(), [bytes([byte]) for byte in stream]) == Parser().feed(stream)


@given(LONG_STREAMS, CUTS)
def test_a_limit_changes_nothing_but_what_is_over_it(stream: bytes, cuts: list[int]) -> None:
    """Each event comes in its place: whole within the limit, by its name beyond; and what is held stays bounded."""
    parser = Parser(max_event_bytes=LIMIT)
    items: list[Event | Oversized] = []
    for chunk in cut(stream, cuts):
        items += parser.feed(chunk)
        assert held_bytes(parser) <= 6 * LIMIT + 20
    assert items == Parser(max_event_bytes=LIMIT).feed(stream)

    unbounded = [item for item in Parser().feed(stream) if isinstance(item, Event)]
    assert len(items) == len(unbounded)
    for item, whole in zip(items, unbounded, strict=True):
        size = len(whole.data) + len(whole.type.encode()) + len((whole.id or "").encode())
        if isinstance(item, Oversized):
            # An own type counts, `message` in place of none does not; mended text has become longer.
            assert size > LIMIT
            assert LIMIT < item.size_bytes <= size
        else:
            assert item == whole
            assert item.mended or item.type == "message" or size <= LIMIT


def held_bytes(parser: Parser) -> int:
    return sum(len(value) for value in vars(parser).values() if isinstance(value, (bytes, bytearray, str)))


@given(st.binary(max_size=400), CUTS)
def test_no_bytes_break_the_parser(stream: bytes, cuts: list[int]) -> None:
    for item in parsed(Parser(max_event_bytes=LIMIT), cut(stream, cuts)):
        if isinstance(item, Event):
            item.data.decode()


IDS = st.one_of(st.none(), st.text(st.characters(exclude_characters="\r\n\0", codec="utf-8"), max_size=20))
TYPES = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(IDS, TYPES, st.text(st.characters(codec="utf-8"), max_size=60)), max_size=8), CUTS)
def test_what_was_encoded_arrives_over_any_cut(events: list[tuple[str | None, str, str]], cuts: list[int]) -> None:
    stream = b"".join(encode(event_id, event_type, data.encode()) for event_id, event_type, data in events)
    read = plain(parsed(Parser(), cut(stream, cuts)))
    assert read == [
        (event_type or "message", re.sub("\r\n|\r", "\n", data), event_id) for event_id, event_type, data in events
    ]
    assert Reference().read(stream).events == read


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_an_event_is_there_with_the_last_byte_of_its_blank_line(end: bytes) -> None:
    """A bare CR ends its line at once, without waiting for the LF that may follow."""
    parser = Parser()
    stream = b"id: 7" + end + b"data: x" + end + end
    last = stream.rstrip(b"\n") if end == b"\r\n" else stream
    assert parser.feed(last) == [Event("message", b"x", "7")]
    assert parser.feed(stream[len(last) :]) == []
    assert parser.feed(b"data: y\n\n") == [Event("message", b"y")]


def test_line_separators_of_unicode_end_no_line() -> None:
    """Only CR and LF do; what `str.splitlines` takes for more stays inside the data, also in single bytes."""
    for separator in ("\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"):
        data = f'{{"text":"a{separator}b"}}'.encode()
        assert parsed(Parser(), [bytes([byte]) for byte in encode("1", "result", data)]) == [Event("result", data, "1")]


def test_the_small_rules() -> None:
    """BOM, comment, missing space and colon, NUL in an id, `retry` that is none, empty type."""
    parser = Parser(last_event_id="before")
    stream = sse.BOM + b"".join(
        [
            b":comment\ndata:x\n\n",
            b"data\ndata\n\n",
            b"data:  two spaces\n\n",
            b"id: a\0b\ndata: z\n\n",
            b"retry: 10x\nretry:\n\n",
            b"event:\ndata: y\n\n",
            b"foo: bar\ndatas: no\nevent: unused\n\n",
            b"data: lost at the end",
        ]
    )
    assert parser.feed(stream) == [
        Event("message", b"x"),
        Event("message", b"\n"),
        Event("message", b" two spaces"),
        Event("message", b"z"),
        Event("message", b"y"),
    ]
    assert (parser.last_event_id, parser.retry_ms, parser.comment) == ("before", None, b"comment")
    # A BOM that is cut, too; a second one is a character of its line.
    assert parsed(Parser(), [bytes([byte]) for byte in sse.BOM + b"data: 1\n\n"]) == [Event("message", b"1")]
    assert parsed(Parser(), [bytes([byte]) for byte in sse.BOM + sse.BOM + b"data: 1\n\n"]) == []


@pytest.mark.parametrize(
    ("value", "retry_ms"),
    [
        (b"86400000", 86_400_000),
        (b"0086400000", 86_400_000),
        (b"0", 0),
        (b"000", 0),
        (b"9" * 6000, sse.RETRY_MS_MAX),
        (b"", None),
        (b"12 ", None),
        (b" 12", None),
        (b"-1", None),
        (b"1.5", None),
        ("\u0663".encode(), None),
    ],
)
def test_retry_is_digits_or_nothing(value: bytes, retry_ms: int | None) -> None:
    parser = Parser()
    parser.feed(b"retry: " + value + b"\n")
    assert parser.retry_ms == retry_ms


def test_an_id_without_data_moves_the_cursor_and_half_an_event_does_not() -> None:
    parser = Parser()
    assert parser.feed(b"id: 1\n\nid: 2\ndata: half") == []
    assert parser.last_event_id == "1"
    assert parser.feed(b"\n\n") == [Event("message", b"half", "2")]
    assert parser.feed(b"id\n\n") == []
    assert parser.last_event_id == ""


def test_broken_text_is_mended_and_says_so() -> None:
    """A character that is split over chunks is not broken; an invalid byte is one event's matter."""
    stream = "data: é€😀\n\n".encode() + b"data: a\xffb\n\n" + b"event: t\xff\ndata: c\n\n" + b"data: good\n\n"
    assert parsed(Parser(), [bytes([byte]) for byte in stream]) == [
        Event("message", "é€😀".encode()),
        Event("message", "a\ufffdb".encode(), mended=True),
        Event("t\ufffd", b"c", mended=True),
        Event("message", b"good"),
    ]


def test_what_is_too_large_is_named_and_the_next_event_is_whole() -> None:
    """In small chunks and in one, with the id, so that a reconnect goes on after it."""
    stream = b"event: blob\ndata: " + b"x" * 5000 + b"\nid: 8\n\nid: 9\ndata: small\n\n"
    expected = [Oversized("blob", "8", 5000 + len("blob") + len("8")), Event("message", b"small", "9")]
    for step in (1, 100, len(stream)):
        parser = Parser(max_event_bytes=1000)
        assert parsed(parser, [stream[i : i + step] for i in range(0, len(stream), step)]) == expected
        assert parser.last_event_id == "9"


def test_the_limit_counts_data_type_and_id() -> None:
    parser = Parser(max_event_bytes=10)
    assert parser.feed(b"id: 12\nevent: abc\ndata: 45678\n\n") == [Event("abc", b"45678", "12")]
    assert parser.feed(b"id: 12\nevent: abc\ndata: 4567\ndata: 9\n\n") == [Oversized("abc", "12", 11)]
    assert parser.feed(b"event: 0123456789a\ndata\n\n") == [Oversized("message", None, 11)]
    assert parser.feed(b"id: 0123456789a\ndata\n\n") == [Oversized("message", None, 11)]
    assert parser.last_event_id == "12"


@pytest.mark.parametrize(
    "endless", [b"data: ", b": ", b"id: ", b"event: ", b"retry: 1", b"unknown: ", b"", b"data: \n"]
)
def test_a_stream_without_end_is_held_in_bounded_memory(endless: bytes) -> None:
    """Neither a line that never ends nor an event of endless lines grows; many tiny pieces cost no more than large."""
    parser = Parser(max_event_bytes=1000)
    filling = endless * 300 if endless.endswith(b"\n") else b"12"
    parser.feed(endless)
    for _ in range(20_000):
        parser.feed(filling)
    parser.feed(b"\n" + endless + (filling * 5000)[:20_000] + b"\n")
    held = sum(sys.getsizeof(value) for value in vars(parser).values())
    assert held < 8000
    assert parser.feed(b"\n\ndata: next\n\n")[-1] == Event("message", b"next")


def test_a_large_event_in_small_chunks_takes_time_by_its_length() -> None:
    """A parser that goes through its buffer again for each chunk would look at 4 GiB here."""
    size, step = 4 * 1024 * 1024, 512
    stream = encode("1", "blob", b"x" * size)
    parser = Parser(max_event_bytes=size + 100)
    (event,) = parsed(parser, [stream[i : i + step] for i in range(0, len(stream), step)])
    assert isinstance(event, Event)
    assert len(event.data) == size


@pytest.mark.parametrize(
    ("event_id", "event_type"), [("a\nb", "t"), ("a\rb", "t"), ("a\0b", "t"), ("1", "t\ndata: forged"), (None, "t\r")]
)
def test_nothing_can_be_smuggled_into_a_stream(event_id: str | None, event_type: str) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        encode(event_id, event_type, b"{}")


def test_frames_without_events_move_nothing() -> None:
    parser = Parser(last_event_id="5")
    assert parser.feed(sse.comment() + sse.comment("two\nlines\u2028three") + sse.retry(1500)) == []
    assert (parser.comment, parser.retry_ms, parser.last_event_id) == (b"two lines three", 1500, "5")
