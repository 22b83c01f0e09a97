"""Readers of event streams and what they wait for: bounded queues, and the shared position of each topic (no I/O).

A `Client` is one open response; a `Feed` is one topic that this process serves now, with the position up to which the
one reader has read it. Whoever has read the history up to there joins; from then on both read as one.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from common.store.control import Entry
from common.store.eventlog import EventId, Page, Position
from gateway.frames import Batch
from gateway.topics import Topic


class Encoder(Protocol):
    """How batches become the bytes of one connection (`frames.Alone`, `frames.Together`)."""

    open_topics: set[Topic]

    def encode(self, batch: Batch) -> bytes:
        """The frames."""

    def stand(self, topic: Topic, at: EventId) -> bytes:
        """A frame that moves the reader's cursor and is no event."""


class Reader(Protocol):
    """Who reads on from a feed; neither call may wait."""

    def take(self, batch: Batch) -> None:
        """What was read."""

    def cut(self, reason: str) -> None:
        """What was read cannot be given."""


class Client:
    """One open response: what it has yet to be sent.

    Attributes:
        ending: why it ends, once that is decided; one of `metrics.SSE_CLOSES`.
        was_cut: it ends without what was queued for it.
        sent_at: monotonic seconds of the last bytes that went out.
    """

    __slots__ = (
        "_buffer_bytes",
        "_chunks",
        "_cut",
        "_encoder",
        "_queued_bytes",
        "_waiter",
        "ending",
        "sent_at",
        "was_cut",
    )

    def __init__(self, encoder: Encoder, cut: asyncio.Timeout, *, buffer_bytes: int) -> None:
        """Begin with nothing queued.

        Args:
            cut: in which the response is written; it is made to expire when writing must stop at once.
            buffer_bytes: with more than this queued, the client is too slow when the next chunk comes.
        """
        self.ending = ""
        self.was_cut = False
        self._encoder = encoder
        self.sent_at = 0.0
        self._cut = cut
        self._buffer_bytes = buffer_bytes
        self._chunks: deque[bytes] = deque()
        self._queued_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._chunks

    def take(self, batch: Batch) -> None:
        """Queue a batch; after the end of the last topic, end. Ids say what was queued before: keep to this order."""
        self.put(self._encoder.encode(batch))
        if not self._encoder.open_topics:
            self.end("ended")

    def stand(self, topic: Topic, at: EventId) -> None:
        """Say from where it reads on, so that it misses nothing if it breaks before the first event."""
        self.put(self._encoder.stand(topic, at))

    def put(self, chunk: bytes) -> None:
        """Queue some bytes, unless there are too many already: then it is too slow."""
        if self.ending:
            return
        if self._queued_bytes > self._buffer_bytes:
            self.cut("slow")
            return
        self._chunks.append(chunk)
        self._queued_bytes += len(chunk)
        if self._waiter is not None and not self._waiter.done():  # as `_wake`, without a call for each delivery
            self._waiter.set_result(None)

    def end(self, reason: str) -> None:
        """Let what is queued go out, then end; only the first reason counts."""
        if not self.ending:
            self.ending = reason
            self._wake()

    def cut(self, reason: str) -> None:
        """End without what is queued, even in the middle of a write that gets nowhere."""
        self.end(reason)
        self.was_cut = True
        self._chunks.clear()
        self._queued_bytes = 0
        if not self._cut.expired():  # told a second time before it took effect
            self._cut.reschedule(asyncio.get_running_loop().time())

    async def next_chunk(self) -> bytes:
        """All that is queued, in one piece; waits for it. Empty: it has ended."""
        while not self._chunks:
            if self.ending:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._queued_bytes = 0
        return chunk

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Feed:
    """One topic that is served: its position, and who reads on from there.

    Attributes:
        position: up to where its stream has been read for everyone.
        held: entries of a run that had none when its record was read. Its first number must be looked up before they
            are given to anyone; None: no such thing is due.
        has_ended: the last event was given.
    """

    def __init__(self, topic: Topic, position: Position) -> None:
        self.topic = topic
        self.position = position
        self.held: Sequence[Entry] | None = None
        self.has_ended = False
        # In the order of their coming, and so in that of their memory: going through a thousand in any other is slower.
        self.readers: dict[Reader, None] = {}
        # Those whose history reached further than `position` when they joined.
        self._ahead: dict[Reader, EventId] = {}

    def join(self, reader: Reader, position: Position) -> bool:
        """Let someone read on from `position`; False: they stand before this feed, and have more history to read."""
        if position.at < self.position.at:
            return False
        if position.at > self.position.at:
            self._ahead[reader] = position.at
        self.readers[reader] = None
        return True

    def leave(self, reader: Reader) -> None:
        """Forget a reader."""
        self.readers.pop(reader, None)
        self._ahead.pop(reader, None)

    def advance(self, page: Page) -> Batch:
        """Give everyone what was read after `position`, and stand where the page ends; returns what was given."""
        if page.position.at < self.position.at:
            # The stream is another one, whose ids begin anew: nobody has passed any of them.
            self._ahead.clear()
        self.position = page.position
        batch = Batch(self.topic, page.items)
        for reader in list(self.readers):
            own = batch
            if self._ahead and (at := self._ahead.get(reader)) is not None:
                own = batch.after(at)
                if page.position.at >= at:
                    del self._ahead[reader]
            if own.items:
                reader.take(own)
        self.has_ended = self.has_ended or bool(batch.end)
        return batch

    def finish(self, batch: Batch) -> None:
        """Give everyone the last batch of all."""
        self.has_ended = True
        for reader in list(self.readers):
            reader.take(batch)
