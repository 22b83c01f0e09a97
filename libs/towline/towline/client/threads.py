"""Threads: what was said, posting to it, and the stream of what happens in it."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Literal

import msgspec

from towline.client.calls import Calls, checked_event_id, idempotency, in_path
from towline.stream import Break, read_events
from towline.wire import events, thread_events
from towline.wire.api import Page
from towline.wire.runs import EventData
from towline.wire.sse import Event
from towline.wire.thread_events import ThreadEventData
from towline.wire.threads import Entry, EntryPost, OnBusy, Posted, Thread, ThreadCreate, ThreadGap, ThreadView


class ThreadEvent(msgspec.Struct, frozen=True):
    """One event of a thread.

    Attributes:
        id: opaque; pass it as `last_event_id` to go on after this event.
        turn: the turn that it is about.
        uid: names the event; after a `ThreadGap` events may repeat under a new `id` and their old `uid`.
        ts: when it was written, milliseconds since the Unix epoch.
        type: one of `towline.wire.events`, which says what `data` is; null data where only newer clients know.
    """

    thread: str
    id: str
    turn: str
    uid: str
    ts: int
    type: str
    data: ThreadEventData | None


class ThreadCalls(Calls):
    """The calls about threads and their entries; see `towline.client.Client`."""

    async def create_thread(self, agent: str, *, user: str | None = None, model: str | None = None) -> Thread:
        """Begin a thread that this agent answers. Never repeated by itself: a second call is a second thread.

        Args:
            user: whose machine the agent's tools run on; without one it has no tools.
            model: asked for in place of the agent's own.
        """
        return await self._call(Thread, "POST", "/v1/threads", body=ThreadCreate(agent, user, model))

    async def read_thread(self, thread: str) -> ThreadView:
        """Read a thread with its newest entries and their turns."""
        return await self._call(ThreadView, "GET", f"/v1/threads/{in_path(thread, 'thread')}")

    async def list_threads(
        self, *, agent: str | None = None, user: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Thread]:
        """Go through threads, newest first; at most `limit` of them."""
        async for thread in self._list(Page[Thread], "/v1/threads", {"agent": agent, "user": user}, limit):
            yield thread

    async def post_entry(self, thread: str, text: str, *, idempotency_key: str, on_busy: OnBusy = "queue") -> Posted:
        """Say something in a thread, once per key, and have it answered: the turn in the answer is under way then.

        `follow_turn` brings the answer as it comes, `read_turn` waits for its end.

        Args:
            idempotency_key: 1-255 characters of visible ASCII, for this thread; keep it until the answer is there.
            on_busy: while a turn of the thread is open: wait for it (`queue`), refuse this entry (`reject`:
                `thread-busy`), or cancel that turn first (`interrupt`).
        """
        return await self._call(
            Posted,
            "POST",
            f"/v1/threads/{in_path(thread, 'thread')}/entries",
            body=EntryPost(text, on_busy),
            headers=idempotency(idempotency_key),
        )

    async def list_entries(self, thread: str, *, limit: int | None = None) -> AsyncIterator[Entry]:
        """Go through a thread's entries in their order, from the first; at most `limit` of them."""
        path = f"/v1/threads/{in_path(thread, 'thread')}/entries"
        async for entry in self._list(Page[Entry], path, {}, limit):
            yield entry

    def thread_events(
        self,
        thread: str,
        *,
        last_event_id: str | None = None,
        from_: Literal["start", "live"] = "start",
        on_break: Callable[[Break], None] | None = None,
    ) -> AsyncGenerator[ThreadEvent | ThreadGap, None]:
        """Follow what happens in a thread, over lost connections, until you leave: a thread has no end.

        Arguments and errors are those of `events`; close the iterator (`contextlib.aclosing`) to leave.

        Yields:
            ThreadEvent: in the thread's order, none twice.
            ThreadGap: events are missing here; what has become of a turn is in `read_turn`.
        """
        return read_events(
            self._transport,
            f"/v1/threads/{in_path(thread, 'thread')}/events",
            _ThreadReading(thread),
            params={},
            last_event_id=checked_event_id(last_event_id),
            live=from_ == "live",
            on_break=on_break,
        )


class _ThreadReading:
    """What the frames of a thread's stream say."""

    def __init__(self, thread: str) -> None:
        self._thread = thread

    def read_event(self, event_id: str, frame: Event) -> ThreadEvent:
        head = msgspec.json.decode(frame.data, type=EventData)
        data = thread_events.read(head.type, head.data)
        return ThreadEvent(self._thread, event_id, head.source, head.uid, head.ts, head.type, data)

    def read_frame(self, frame: Event) -> ThreadGap | None:
        return msgspec.json.decode(frame.data, type=ThreadGap) if frame.type == events.GAP else None

    def unknown_start(self) -> Iterable[ThreadGap]:
        return [ThreadGap(self._thread, after=None, first_available=None)]

    def is_over(self) -> bool:
        return False
