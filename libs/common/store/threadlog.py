"""The event log of a thread: one stream, appended to by the worker that runs a turn and by gateways.

Owns:     `thread_events:{thread}`, `thread_state:{thread}`, `thread_writers:{thread}` (names in `keys`).
Promises: events are numbered one after the other, whoever appends them (rule 33); one that is appended again by the
          same writer under the same number is there once; what an attempt says after a newer one has spoken is refused;
          where the stream lost something a reader is given a `Gap`.
Used by:  the worker and the gateway (append), the gateway (reads, by `eventlog.EventLog`).

Readers: a thread's first event is number 1, so without a cursor they begin at `START`. A stream that is born again, or
lost its tail, goes on under a new epoch and a number far above, which `eventlog.follow` takes for the gap it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import NotOwner
from common.ids import ThreadId
from common.store import keys
from common.store.eventlog import Appends, EventId, NewEvent, Position
from common.store.redis import Call, Redis, script

# Where a reader without a cursor begins.
START = Position.start(0)


class AttemptFenced(NotOwner):
    """A newer attempt, or a later turn, has spoken in this thread. Stop; nothing of the batch is there."""


class Fence(NamedTuple):
    """Who speaks: an attempt of a turn. `number`: the turn's place in its thread (`Turn.number`)."""

    number: int
    attempt: int


class ThreadLog:
    """Appending to the streams of threads; batches of this process that are ready together share a round trip."""

    def __init__(self, redis: Redis) -> None:
        self._appends = Appends(redis)

    async def say(self, thread: ThreadId, name: str, events: Sequence[NewEvent], *, is_first: bool = False) -> None:
        """Append what is said once, however often it is said: `events`, not empty, always the same for `name`.

        Args:
            name: what it is about, unique in the thread (`entry:{entry}`, `end:{turn}`).
            is_first: nothing was ever said in this thread: the first entry, just posted. Not when it is said again.

        Raises:
            StoreUnavailable: it may be there; repeat it.
        """
        await self._append(thread, name, 1, events, is_first=is_first)

    def writer(self, thread: ThreadId, name: str, fence: Fence) -> "ThreadWriter":
        """A writer for what one handling of an attempt says; `name` is nobody else's, nor the next handling's."""
        return ThreadWriter(self, thread, name, fence)

    async def _append(
        self,
        thread: ThreadId,
        name: str,
        first: int,
        events: Sequence[NewEvent],
        *,
        fence: Fence | None = None,
        known: EventId | None = None,
        is_first: bool = False,
    ) -> EventId:
        args: list[str | int | float | bytes] = [
            name,
            first,
            "" if fence is None else f"{fence.number}.{fence.attempt}",
            "" if known is None else str(known),
            int(is_first),
            keys.THREAD_EVENTS_TTL_S,
            keys.THREAD_WRITERS_MAX,
            keys.EVENTS_MAX,
            keys.EVENTS_BYTES_STEP,
            keys.EVENTS_BYTES_MAX // keys.EVENTS_BYTES_STEP - 1,
        ]
        for event in events:
            args += (*event[:5], int(event.mended))
        names = [keys.thread_events(thread), keys.thread_state(thread), keys.thread_writers(thread)]
        word = await self._appends.run(Call(script("append_thread"), names, args))
        tail = EventId.parse(word)
        if tail is None:
            raise AttemptFenced(f"a newer attempt has spoken in thread {thread}")
        return tail


class ThreadWriter:
    """What one attempt says before its end, in its order.

    One append at a time. After StoreUnavailable (or a cancellation) the batch is kept, and goes before the next one.
    """

    def __init__(self, log: ThreadLog, thread: ThreadId, name: str, fence: Fence) -> None:
        self._log = log
        self._thread = thread
        self._name = name
        self._fence = fence
        self._first = 1
        self._known: EventId | None = None
        self._kept: list[NewEvent] = []

    async def append(self, events: Sequence[NewEvent]) -> None:
        """Append events, after those that are kept; none at all tries just those again.

        Raises:
            StoreUnavailable: they may be there, and are kept.
            AttemptFenced: they are not there, and nothing of this writer will be any more.
        """
        self._kept += events
        if not self._kept:
            return
        batch = list(self._kept)
        self._known = await self._log._append(
            self._thread, self._name, self._first, batch, fence=self._fence, known=self._known
        )
        self._first += len(batch)
        del self._kept[: len(batch)]
