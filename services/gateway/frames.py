"""What goes out on event streams, as bytes, and the ids by which readers come back (PURE).

Owns:     the frames of events, gaps and ends; the composite id of a connection that carries several runs.
Promises: an event is encoded once however many read it, and they all get the same bytes; an id that was given out here
          is read back as what it was, and nothing else is.
Used by:  `fanout` (one batch per read and topic), `stream` (what a reader sends and gets).
"""

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec import UNSET

from common.store.eventlog import ZERO, EventId, Gap, LogEvent, Position
from common.store.runs import Run
from gateway.topics import Topic, of_run
from towline.wire import events, sse
from towline.wire.runs import End, EventData, StreamEvent
from towline.wire.runs import Gap as RunGap
from towline.wire.threads import ThreadGap

# Of the names of the runs, so that an id is not taken for one of other runs.
_DIGEST_BYTES = 6
_POSITION = struct.Struct(">QQ")
KEEPALIVE = sse.comment()


class Ended(msgspec.Struct):
    """What `towline.run.ended` says, as far as it matters here."""

    state: str


_ended_decoder = msgspec.json.Decoder(Ended)


class Batch:
    """What one read brought of one topic, in the forms in which it is sent.

    Attributes:
        items: events and gaps in their places, oldest first.
        gaps: how many gaps are among them.
        end: the state in which the run ended, if the last event says so; else empty.
    """

    def __init__(self, topic: Topic, items: Sequence[LogEvent | Gap], *, end: str = "") -> None:
        self.topic = topic
        self.items = items
        self.gaps = sum(isinstance(item, Gap) for item in items)
        self.end = end or _end_of(items)

    def after(self, at: EventId) -> "Batch":
        """What of it comes after an entry that a reader has passed by itself."""
        return Batch(self.topic, [item for item in self.items if _stands_after(item, at)])

    @cached_property
    def alone(self) -> bytes:
        """All frames, for connections that carry this topic alone."""
        frames = [_frame(self.topic, item) for item in self.items]
        if self.end:
            frames.append(end_frame(self.topic, self.end))
        return b"".join(frames)

    @cached_property
    def bodies(self) -> list[bytes]:
        """A frame for each item, those of events without their ids, for connections that carry several runs."""
        return [_frame(self.topic, item, together=True) for item in self.items]


def last_batch(record: Run, position: Position) -> Batch:
    """What a reader still gets of a run that has ended, when nothing more is left in its stream (rule 29).

    The last event is made again from the record, with its id: a reader who comes back with it is told to stay away.
    """
    topic = of_run(record.run)
    last = EventId(max(record.epoch, 1), record.last_seq or 0)
    if position.seq is not None and position.seq >= last.seq:
        return Batch(topic, [], end=record.state)
    sources = {source.source: {"state": source.state, "reason": source.reason} for source in record.sources}
    data = msgspec.json.encode({"state": record.state, "reason": record.reason, "sources": sources})
    event = LogEvent(last, "", "", events.RUN_ENDED, data, record.ended_ms or 0)
    is_gap = position.seq is not None and position.seq < last.seq - 1
    return Batch(topic, [Gap(position.last, last), event] if is_gap else [event])


class Alone:
    """The bytes for a connection that carries one topic.

    Attributes:
        open_topics: those that have not ended.
    """

    def __init__(self, topic: Topic) -> None:
        self.open_topics = {topic}

    def encode(self, batch: Batch) -> bytes:
        """The batch's frames, the same object for every such connection."""
        if batch.end:
            self.open_topics.discard(batch.topic)
        return batch.alone

    def stand(self, _topic: Topic, at: EventId) -> bytes:
        """Move the reader's cursor where nothing is sent: an id without data is no event."""
        return b"id: %b\n\n" % str(at).encode()


class Together:
    """The bytes for a connection that carries several runs: every id says where it stands in all of them."""

    def __init__(self, positions: Mapping[Topic, EventId | None]) -> None:
        self.positions = dict(sorted(positions.items()))
        self.open_topics = set(positions)

    def encode(self, batch: Batch) -> bytes:
        """The batch's frames, with this connection's ids."""
        frames: list[bytes] = []
        for item, body in zip(batch.items, batch.bodies, strict=True):
            if isinstance(item, LogEvent):
                self.positions[batch.topic] = item.id
                frames.append(b"id: %b\n" % composite_id(self.positions).encode())
            frames.append(body)
        if batch.end:
            self.open_topics.discard(batch.topic)
            frames.append(end_frame(batch.topic, batch.end))
        return b"".join(frames)

    def stand(self, topic: Topic, at: EventId) -> bytes:
        """As `Alone.stand`, in one of the runs."""
        self.positions[topic] = at
        return b"id: %b\n\n" % composite_id(self.positions).encode()


def composite_id(positions: Mapping[Topic, EventId | None]) -> str:
    """The id that stands for a position in each of these runs, which are in order of their names."""
    packed = _digest(list(positions)) + b"".join(_POSITION.pack(*(at or ZERO)) for at in positions.values())
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_composite_id(text: str, runs: Sequence[Topic]) -> dict[Topic, EventId | None] | None:
    """Read an id that `composite_id` made for these very runs; None: this is none."""
    size = _DIGEST_BYTES + _POSITION.size * len(runs)
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    topics = sorted(runs)
    if len(packed) != size or packed[:_DIGEST_BYTES] != _digest(topics):
        return None
    ids = [EventId(*found) for found in _POSITION.iter_unpack(packed[_DIGEST_BYTES:])]
    return {topic: None if at == ZERO else at for topic, at in zip(topics, ids, strict=True)}


def gap_data(topic: Topic, gap: Gap) -> RunGap | ThreadGap:
    """A gap as readers see it."""
    data = RunGap if topic.noun == "run" else ThreadGap
    return data(
        topic.id, str(gap.after) if gap.after else None, str(gap.first_available) if gap.first_available else None
    )


def end_frame(topic: Topic, state: str) -> bytes:
    """Tell a reader that nothing more will come; without an id, too."""
    return sse.encode(None, events.END, msgspec.json.encode(End(topic.id, state)))


def stream_event(event: LogEvent) -> StreamEvent:
    """An event as it stands in a page."""
    text = event.data.decode(errors="replace")
    return StreamEvent(str(event.id), event.source, event.uid, event.ts, event.type, text, event.mended or UNSET)


def _frame(topic: Topic, item: LogEvent | Gap, *, together: bool = False) -> bytes:
    if isinstance(item, Gap):
        return sse.encode(None, events.GAP, msgspec.json.encode(gap_data(topic, item)))
    text = item.data.decode(errors="replace")
    data = EventData(
        item.source, item.uid, item.ts, item.type, text, topic.id if together else UNSET, item.mended or UNSET
    )
    # No parser lets a line end through; here one would forge a frame for every reader.
    name = item.type.replace("\r", "\ufffd").replace("\n", "\ufffd")
    return sse.encode(None if together else str(item.id), name, msgspec.json.encode(data))


def _stands_after(item: LogEvent | Gap, at: EventId) -> bool:
    if isinstance(item, Gap):
        return item.first_available is None or item.first_available > at
    return item.id > at


def _end_of(items: Sequence[LogEvent | Gap]) -> str:
    last = items[-1] if items else None
    if not isinstance(last, LogEvent) or last.type != events.RUN_ENDED:
        return ""
    try:
        return _ended_decoder.decode(last.data).state
    except msgspec.DecodeError:
        return "ended"


def _digest(runs: Sequence[Topic]) -> bytes:
    return hashlib.sha256("\n".join(run.id for run in runs).encode()).digest()[:_DIGEST_BYTES]
