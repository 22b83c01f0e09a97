"""Readers of event streams and what they wait for: bounded queues, and the shared position of each run (no I/O).

A `Client` is one open response; a `Feed` is one run that this process serves now, with the position up to which the
one reader has read it. Whoever has read the history up to there joins; from then on both read as one.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from common.ids import RunId
from common.store.control import Entry
from common.store.eventlog import EventId, Page, Position
from gateway.frames import Batch


class Encoder(Protocol):
    """How batches become the bytes of one connection (`frames.Alone`, `frames.Together`)."""

    open_runs: set[RunId]

    def encode(self, batch: Batch) -> bytes:
        """The frames."""


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
        """Queue a batch; after the end of its last run, end. Ids say what was queued before: all goes in this order."""
        self.put(self._encoder.encode(batch))
        if not self._encoder.open_runs:
            self.end("ended")

    def put(self, chunk: bytes) -> None:
        """Queue some bytes, unless there are too many already: then it is too slow."""
        if self.ending:
            return
        if self._queued_bytes > self._buffer_bytes:
            self.cut("slow")
            return
        self._chunks.append(chunk)
        self._queued_bytes += len(chunk)
        self._wake()

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
    """One run that is served: its position, and who reads on from there.

    Attributes:
        position: up to where the run has been read for everyone.
        held: entries of a run that had none when its record was read. Its first number must be looked up before they
            are given to anyone; None: no such thing is due.
        has_ended: the last event was given.
    """

    def __init__(self, run: RunId, position: Position) -> None:
        self.run = run
        self.position = position
        self.held: Sequence[Entry] | None = None
        self.has_ended = False
        self.clients: set[Client] = set()
        # Those whose history reached further than `position` when they joined.
        self._ahead: dict[Client, EventId] = {}

    def join(self, client: Client, position: Position) -> bool:
        """Let a client read on from `position`; False: it stands before this feed, and has more history to read."""
        if position.at < self.position.at:
            return False
        if position.at > self.position.at:
            self._ahead[client] = position.at
        self.clients.add(client)
        return True

    def leave(self, client: Client) -> None:
        """Forget a client."""
        self.clients.discard(client)
        self._ahead.pop(client, None)

    def advance(self, page: Page) -> Batch:
        """Give everyone what was read after `position`, and stand where the page ends; returns what was given."""
        if page.position.at < self.position.at:
            # The stream is another one, whose ids begin anew: nobody has passed any of them.
            self._ahead.clear()
        self.position = page.position
        batch = Batch(self.run, page.items)
        for client in list(self.clients):
            own = batch
            if self._ahead and (at := self._ahead.get(client)) is not None:
                own = batch.after(at)
                if page.position.at >= at:
                    del self._ahead[client]
            if own.items:
                client.take(own)
        self.has_ended = self.has_ended or bool(batch.end)
        return batch

    def finish(self, batch: Batch) -> None:
        """Give everyone the last batch of all."""
        self.has_ended = True
        for client in list(self.clients):
            client.take(batch)
