"""Server-sent events, both ways: bytes of any cut to events, and events to bytes (WHATWG HTML, section 9.2).

Owns:     the incremental `Parser`, `encode` and the small frames beside it (comments, `retry`).
Promises: what the parser makes of a stream does not depend on where the chunks were cut; it never raises, whatever the
          bytes, and holds a few times `max_event_bytes` at most. What `encode` wrote is one event to any reader.
Used by:  the relay (upstreams), the gateway (streams out), `towline.client` (streams in).

Values are what is cheapest to hand on: `data` stays bytes, always valid UTF-8, for Redis takes it as it is; `type` and
`id` are short and compared, so they are text. Broken UTF-8 is replaced by U+FFFD here, as the standard says, and
such an event says `mended`; all-ASCII data costs one scan. U+0000 passes unchanged in data and types.

A comment is no item. It shows in two ways that cost nothing: `feed` was called, so the peer lives; and `Parser.comment`
holds the last one.
"""

import msgspec

BOM = b"\xef\xbb\xbf"

# What one event may hold unless its reader says otherwise.
EVENT_BYTES_MAX = 256 * 1024
# A `retry` with more digits than this is as good as for ever, and must not become a number of any size.
RETRY_DIGITS_MAX = 15
RETRY_MS_MAX = 10**RETRY_DIGITS_MAX

# Looked for as numbers: the search for a `bytes` in another takes five times as long.
_LF, _CR = 0x0A, 0x0D

# The longest that stands before a value that counts: `event: `. A line longer than the limit and this is over it
# whatever comes, so it need not be kept.
_LINE_HEAD_BYTES_MAX = len(b"event: ")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One dispatched event.

    Attributes:
        type: `message` where the stream named none.
        data: UTF-8; lines joined by LF.
        id: the id that this event itself carried, `""` if it reset the id; None without one (`Parser.last_event_id`
            is the standard's sticky one).
        mended: bytes that were no UTF-8 have been replaced by U+FFFD.
    """

    type: str
    data: bytes
    id: str | None = None
    mended: bool = False


class Oversized(msgspec.Struct, frozen=True, gc=False):
    """In place of an event that is over the limit: all that is known of it, at the moment when it ended.

    Attributes:
        type, id: as in `Event`; `message` and None where they alone are over the limit.
        size_bytes: of data, type and id together; of a type or id no more than the limit is counted.
    """

    type: str
    id: str | None
    size_bytes: int


class Parser:
    """One connection's stream. Make a new one for each connection: what was half there is void then.

    Attributes:
        last_event_id: what to send as `Last-Event-ID` when the connection is lost now; events without data move it too.
        retry_ms: the last valid `retry`, at most `RETRY_MS_MAX`; None until there is one.
        comment: the text of the last comment, without the colon; `b""` until there is one.
    """

    def __init__(self, *, max_event_bytes: int = EVENT_BYTES_MAX, last_event_id: str = "") -> None:
        """Start before the first byte.

        Args:
            max_event_bytes: data, type and id of one event together; what is over it comes as `Oversized`.
            last_event_id: with which the connection was asked for.
        """
        self.last_event_id = last_event_id
        self.retry_ms: int | None = None
        self.comment = b""
        self._max = max_event_bytes
        self._head: bytes | None = b""  # the first bytes while they may be a BOM, None after that
        self._after_cr = False  # the last byte was a CR, which has ended its line: a LF now belongs to it
        self._line = bytearray()  # of the line that has not ended, as much as can matter
        self._dropped_bytes = 0  # of that line, not kept
        self._data: bytes | bytearray | None = None  # what stands here once the event is over the limit is of no use
        self._data_bytes = 0  # all of it, kept or not, and one byte for each line's end
        self._type = b""  # this, the id and the comment are cut one byte over the limit, which is over it all the same
        self._id: bytes | None = None

    def feed(self, chunk: bytes) -> list[Event | Oversized]:
        """Take the next bytes, in any cut; returns the events that they complete, often none."""
        if self._head is not None:
            chunk = self._head + chunk
            if len(chunk) < len(BOM) and BOM.startswith(chunk):
                self._head = chunk
                return []
            self._head = None
            chunk = chunk.removeprefix(BOM)
        if self._after_cr or _CR in chunk:
            chunk = self._with_lf_only(chunk)
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if self._line and lines:
            lines[0] = self._end_line(lines[0])
        items: list[Event | Oversized] = []
        cut = self._max + 1
        for line in lines:
            if not line:
                if self._data is not None:
                    items.append(self._take_event())
                elif self._id is not None:
                    self._move_last_id()
                self._type = b""
                continue
            name, _, value = line.partition(b":")
            if value[:1] == b" ":
                value = value[1:]
            if name == b"data":
                self._data_bytes += len(value) + 1
                if self._data is None:
                    self._data = value[:cut]
                elif self._data_bytes <= cut:
                    if isinstance(self._data, bytes):
                        self._data = bytearray(self._data)
                    self._data += b"\n"
                    self._data += value
            elif name == b"event":
                self._type = value[:cut]
            elif name == b"id":
                if 0 not in value:
                    self._id = value[:cut]
            elif name == b"":
                self.comment = value[:cut]
            elif name == b"retry" and value[:cut].isdigit():
                digits = value[:cut].lstrip(b"0") or b"0"
                self.retry_ms = int(digits) if len(digits) <= RETRY_DIGITS_MAX else RETRY_MS_MAX
        if rest:
            self._hold(rest)
        return items

    def _with_lf_only(self, chunk: bytes) -> bytes:
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            # An empty rest may have been that LF itself, so the CR is done with in any case.
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _hold(self, rest: bytes) -> None:
        room = self._max + _LINE_HEAD_BYTES_MAX + 1 - len(self._line)
        self._line += rest[:room]
        self._dropped_bytes += max(0, len(rest) - room)

    def _end_line(self, rest: bytes) -> bytes:
        """Return the line that `rest` ends; if it is far over the limit, with its end missing."""
        self._hold(rest)
        line = bytes(self._line)
        if line.startswith(b"data:"):
            self._data_bytes += self._dropped_bytes
        self._line.clear()
        self._dropped_bytes = 0
        return line

    def _take_event(self) -> Event | Oversized:
        data, name, own_id = self._data, self._type, None
        size = self._data_bytes - 1 + len(name)
        if self._id is not None:
            size += len(self._id)
            own_id = self._move_last_id()
        self._data = None
        self._data_bytes = 0
        if size > self._max:
            return Oversized(_text(name) if name and len(name) <= self._max else "message", own_id, size)
        if not isinstance(data, bytes):
            data = bytes(data or b"")
        is_mended = False
        if not (data.isascii() and name.isascii()):
            data, is_mended = _mended(data, name)
        return Event(_text(name) if name else "message", data, own_id, is_mended)

    def _move_last_id(self) -> str | None:
        """Take the id of the block that has ended; one that is over the limit alone counts as none."""
        found, self._id = self._id, None
        if found is None or len(found) > self._max:
            return None
        self.last_event_id = _text(found)
        return self.last_event_id


def encode(event_id: str | None, event_type: str, data: bytes) -> bytes:
    """Write one event, to be sent to any number of readers as it is.

    Args:
        event_id: None leaves the readers' last id where it is.
        event_type: `message`, the default of readers, is not written.
        data: UTF-8 of any number of lines; CR and CRLF arrive as LF, the only line end that events have.

    Raises:
        ValueError: id or type would end their line, or readers would ignore the id; nothing of it can be sent.
    """
    if event_id is None:
        head = ""
    elif "\n" in event_id or "\r" in event_id or "\0" in event_id:
        raise ValueError(f"an id cannot hold line ends or U+0000: {event_id[:40]!r}")
    else:
        head = f"id: {event_id}\n"
    if "\n" in event_type or "\r" in event_type:
        raise ValueError(f"a type cannot hold line ends: {event_type[:40]!r}")
    if event_type not in ("message", ""):
        head += f"event: {event_type}\n"
    if _CR in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if _LF in data:
        data = data.replace(b"\n", b"\ndata: ")
    return b"%bdata: %b\n\n" % (head.encode(), data)


def comment(text: str = "") -> bytes:
    """Write a comment: a sign of life that no reader takes for an event. Line ends in the text become spaces."""
    return f": {' '.join(text.splitlines())}\n\n".encode() if text else b":\n\n"


def retry(ms: int) -> bytes:
    """Tell readers how many milliseconds to wait before they connect again."""
    return b"retry: %d\n\n" % ms


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _mended(data: bytes, name: bytes) -> tuple[bytes, bool]:
    try:
        data.decode()
        name.decode()
    except UnicodeDecodeError:
        return data.decode(errors="replace").encode(), True
    return data, False
