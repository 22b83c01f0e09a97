"""The events that the event rows send, each recognisable in whatever frame, chunk or entry carries it (PURE).

An event's data has one `~`, and nothing else in it, in its id or its type has: a reader that only counts bytes counts
deliveries, however the pieces were cut.
"""

import re

MARK = b"~"
_STAMP = re.compile(rb"~\d{9}@(\d{16})")
_STAMP_BYTES = 27
# What an agent sends while it writes: a few words more, in a frame of some 200 bytes.
_TEXT = "the quick brown fox jumps over the lazy dog, and then it rests a little under the old tree"
EVENT_TYPE = "output"

# How an upstream's answer begins; chunks follow.
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def event_data(number: int, sent_us: int = 0) -> str:
    """The data of one event. `sent_us`: when it left, microseconds since 1970."""
    return f'{{"type":"output","text":"{_TEXT}","mark":"~{number:09}@{sent_us:016}"}}'


def event_frame(number: int, sent_us: int = 0) -> bytes:
    """The same event as an upstream sends it."""
    return f"id: {number}\nevent: {EVENT_TYPE}\ndata: {event_data(number, sent_us)}\n\n".encode()


def chunk(data: bytes) -> bytes:
    """Put bytes into an HTTP chunk of their own."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def stamp_of(number: int) -> bytes:
    """What only the event of this number contains."""
    return b"~%09d@" % number


def read_stamps(received: bytes) -> tuple[list[int], bytes]:
    """When the events in some received bytes were sent, and what to put before the next bytes: an event cut in two."""
    times, read_to = [], 0
    for found in _STAMP.finditer(received):
        times.append(int(found[1]))
        read_to = found.end()
    return times, received[max(read_to, len(received) - _STAMP_BYTES + 1) :]
