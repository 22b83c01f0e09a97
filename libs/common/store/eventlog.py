"""The event log of a run: one stream with an owner that appends and any number of readers.

Owns:     `events:{run}`, `events_resume:{run}`, `forward_progress_heartbeat:{run}` (names in `keys`).
Promises: an entry's id is (epoch, seq); a batch is appended once however often it is tried, or refused to whoever no
          longer owns the run; no reader misses an event without being given a `Gap` in its place.
Used by:  the relay's tailers (Writer), the gateway (EventLog for history, `follow` for what its blocking read brings).

Readers know no lease and no epoch's meaning: a gap is plain arithmetic on seq (rule 26). After a gap events may repeat;
nobody drops any by comparing seq (rule 27).
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from common.errors import NotOwner
from common.ids import RunId
from common.store import keys
from common.store.batch import Batcher
from common.store.redis import Call, Redis, script

if TYPE_CHECKING:
    from common.store.leases import Taken

Id = TypeVar("Id", bound=Hashable)

# Events of a page of history, and about how many bytes: it is in memory a few times over until it is sent, until a
# reader that stalls is cut off, and the longest event is 256 KiB. How large they are is known once some were read: the
# first read of a page asks for few.
PAGE_EVENTS_MAX = 400
PAGE_BYTES = 256 * 1024
PAGE_FIRST_ENTRIES = 5
# What follows may be larger than all that was read: no read of a page asks for more.
PAGE_NEXT_ENTRIES = 100

# Appended in one round trip, one run's batch at least: after an outage all runs append at once, and that must be packed
# without a pause that leases notice, and reach Redis within a command's time.
APPEND_BYTES_MAX = 4 * 1024 * 1024

_ID = re.compile(r"(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})")


class Fenced(NotOwner):
    """A newer epoch has written: another relay follows the run. Stop; nothing of the batch is there."""


class TailLost(NotOwner):
    """The tail that this writer left is gone (Redis flushed, or an older replica took over).

    Nothing of the batch is there. Take the run again with a new epoch, and resume from the points that this returns.
    """


class EventId(NamedTuple):
    """Place of an entry in its run's stream; `str()` is what clients resume by."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str) -> "EventId | None":
        """Read what `str()` wrote; None when it cannot be an id of ours."""
        found = _ID.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else None


ZERO = EventId(0, 0)


class NewEvent(NamedTuple):
    """An event to append.

    Attributes:
        source: the source that sent it, or that it is about; empty when it is about the run.
        uid: the upstream's id of it, empty without one. The last one that is not empty is where the source resumes.
        type: as stored. `towline.*` other than `towline.event.too_large` moves no resume point.
        data: UTF-8 text.
        ts: milliseconds since the Unix epoch, when the relay had it.
        mended: the data was no UTF-8, and what was wrong in it has been replaced.
    """

    source: str
    uid: str
    type: str
    data: str | bytes
    ts: int
    mended: bool = False


class LogEvent(NamedTuple):
    """An event as readers get it; markers of takeovers are none."""

    id: EventId
    source: str
    uid: str
    type: str
    data: bytes
    ts: int
    mended: bool = False


class Gap(NamedTuple):
    """Here something is missing, or cannot be vouched for.

    Attributes:
        after: the last event given before, None when none was.
        first_available: id of the next entry, None when there is none yet.
    """

    after: EventId | None
    first_available: EventId | None


class Position(NamedTuple):
    """Where a reader stands.

    Attributes:
        at: read on after this id (the last entry passed, marker or event).
        seq: the next event must be numbered one more than this; None: whatever comes first is right.
        last: the last event given.
    """

    at: EventId
    seq: int | None
    last: EventId | None

    @classmethod
    def after(cls, cursor: EventId) -> "Position":
        """Just after an event that the client has seen."""
        return cls(cursor, cursor.seq, cursor)

    @classmethod
    def start(cls, first_seq: int | None) -> "Position":
        """Before the first event of a run.

        Args:
            first_seq: `Run.first_seq`. None: nobody had taken the run when its record was read, so its stream was
                empty. An owner writes it into the record before its first append: when events come, start again with
                it, or a stream that was trimmed meanwhile would look complete.
        """
        return cls(ZERO, first_seq, None)

    @classmethod
    def live(cls, tail: EventId) -> "Position":
        """After all that is there now (`EventLog.tail`); nothing before it is missed."""
        return cls(tail, tail.seq, None)


class Page(NamedTuple):
    """What was read: events oldest first, with gaps in their places, and where to read on.

    `more`: there may be more at once; without it the reader is at the tail.
    """

    items: Sequence[LogEvent | Gap]
    position: Position
    more: bool = False


Entry = tuple[str, Mapping[bytes, bytes]]


def follow(position: Position, entries: Iterable[Entry]) -> Page:
    """Read entries (id, fields) that follow `position.at` in the stream; PURE, for history and live reading alike."""
    at, seq, last = position
    items: list[LogEvent | Gap] = []
    for text, fields in entries:
        at = _id(text)
        if b"marker" in fields:
            if seq is not None and at.seq != seq:
                items.append(Gap(last, at))
            seq = at.seq
            continue
        if seq is not None and at.seq != seq + 1:
            items.append(Gap(last, at))
        seq, last = at.seq, at
        items.append(_event(at, fields))
    return Page(items, Position(at, seq, last))


def beyond(position: Position, first: Entry, tail: EventId) -> Page | None:
    """Deal with a position beyond the stream, whose first entry and tail are given; None when it is not. PURE.

    A stream that began below what the reader has seen is another one: it is read from its beginning.
    """
    if position.at <= tail:
        return None
    first_id = _id(first[0])
    if b"marker" in first[1] and first_id.epoch < position.at.epoch and tail.epoch < position.at.epoch:
        return Page([Gap(position.last, first_id)], Position(ZERO, None, position.last), more=True)
    return Page([Gap(position.last, None)], Position(tail, tail.seq, position.last))


class EventLog:
    """Reading the streams of runs, or of threads (`keys.thread_events`, see `threadlog`)."""

    def __init__(self, redis: Redis, name: Callable[[Any], str]) -> None:
        self._redis = redis
        self._name = name

    async def read_after(self, run: Hashable, position: Position, *, count: int = PAGE_EVENTS_MAX) -> Page:
        """Read up to `count` events that follow a position, and say so if it lies beyond the stream.

        Fewer do not mean the tail where they are large (`PAGE_BYTES`); `page.more` does.

        A blocking read from `page.position.at` goes on where this stopped; only this call notices a stream that fell
        behind the position, so a live reader makes it now and then too. An empty or missing stream is no gap: who ends
        it, and whether it had more, is in the run's record (rule 29).

        Raises:
            StoreUnavailable: nothing was read.
        """
        name = self._name(run)
        start = "-" if position.at == ZERO else f"({position.at}"
        asked = min(count, PAGE_FIRST_ENTRIES)
        answers = await self._redis.send_many(
            [
                ("XRANGE", name, start, "+", "COUNT", asked),
                ("XRANGE", name, "-", "+", "COUNT", 1),
                ("XREVRANGE", name, "+", "-", "COUNT", 1),
            ]
        )
        found, first, tail = (_entries(answer) for answer in answers)
        if not found:
            page = beyond(position, first[0], _id(tail[0][0])) if first and tail else None
            return page or Page([], position)
        more = len(found) == asked
        while more and (asked := _how_many_more(found, count)):
            (answer,) = await self._redis.send_many([("XRANGE", name, f"({found[-1][0]}", "+", "COUNT", asked)])
            added = _entries(answer)
            found += added
            more = len(added) == asked
        return follow(position, found)._replace(more=more)

    async def tail(self, run: Hashable) -> EventId | None:
        """Id of the last entry; None when the stream is empty. Raises: StoreUnavailable."""
        return (await self.tails([run])).get(run)

    async def tails(self, runs: Sequence[Id]) -> dict[Id, EventId]:
        """Ids of the last entries of some runs, in one round trip, without empty streams. Raises: StoreUnavailable."""
        commands = [("XREVRANGE", self._name(run), "+", "-", "COUNT", 1) for run in runs]
        answers = await self._redis.send_many(commands) if commands else []
        found = ((run, _entries(answer)) for run, answer in zip(runs, answers, strict=True))
        return {run: _id(entries[0][0]) for run, entries in found if entries}


class Appends:
    """The way of all writers of a process to Redis: batches that are ready together share a round trip."""

    def __init__(self, redis: Redis) -> None:
        self._calls: Batcher[Call, Any] = Batcher(redis.run_many, size_of=_size_of, bytes_max=APPEND_BYTES_MAX)

    async def run(self, call: Call) -> str:
        """Run one append; returns the script's word. Raises: StoreUnavailable (it may have been done)."""
        answer = await self._calls.submit(call)
        if isinstance(answer, Exception):
            raise answer
        word: bytes = answer
        return word.decode()


class Writer:
    """Appends for one run under one epoch, from a take until it is refused.

    One append at a time. After StoreUnavailable (or a cancellation) the batch is kept, and `retry` must succeed before
    anything else is appended: nothing new gets a number before that (rule 24).

    Attributes:
        tail: the last entry known to be there, for `leases.Held`.
    """

    def __init__(self, appends: Appends, run: RunId, taken: "Taken") -> None:
        self._appends = appends
        self._keys = [keys.events(run), keys.events_resume(run), keys.progress(run)]
        self._epoch = taken.epoch
        self.tail = taken.tail
        self._pending: tuple[Call, EventId] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a batch waits for `retry`."""
        return self._pending is not None

    async def append(self, events: Sequence[NewEvent], *, progressed: bool, end: str = "") -> EventId:
        """Append a batch, not empty, and return the id of its last event.

        Args:
            progressed: there is real work in it: the progress heartbeat is set.
            end: the state in which the run ends with the last event; nothing can be appended afterwards.

        Raises:
            StoreUnavailable: it may be there. Call `retry` until it says.
            Fenced, TailLost: nothing of it is there, and nothing will be appended under this epoch any more.
        """
        if self._pending is not None:
            raise RuntimeError("an append of unknown outcome has to be retried first")
        if not events:
            raise ValueError("a batch has at least one event")
        first = self.tail.seq + 1
        args: list[str | int | float | bytes] = [
            self._epoch,
            first,
            int(progressed),
            end,
            keys.EVENTS_TTL_S,
            keys.PROGRESS_TTL_S,
            keys.EVENTS_MAX,
            keys.EVENTS_BYTES_STEP,
            keys.EVENTS_BYTES_MAX // keys.EVENTS_BYTES_STEP - 1,
            " ".join(str(first + n) for n, event in enumerate(events) if event.mended),
        ]
        for event in events:
            args += event[:5]
        self._pending = Call(script("append"), self._keys, args), EventId(self._epoch, self.tail.seq + len(events))
        return await self.retry()

    async def retry(self) -> EventId:
        """Try the kept batch again under the same ids; returns as `append` does, at once if none is kept."""
        if self._pending is None:
            return self.tail
        call, tail = self._pending
        word = await self._appends.run(call)
        if word != "ok":
            raise Fenced("a newer epoch has written") if word == "fenced" else TailLost("the stream lost its tail")
        self._pending = None
        self.tail = tail
        return tail


def _size_of(call: Call) -> int:
    return sum(len(arg) for arg in call.args if isinstance(arg, str | bytes))


def _how_many_more(found: Sequence[Entry], count: int) -> int:
    """How many entries to ask for beside these, so that a page has `count` events or `PAGE_BYTES`; 0: it is full."""
    events = sum(b"marker" not in fields for _, fields in found)
    size = sum(sum(map(len, fields.values())) for _, fields in found)
    if events >= count or size >= PAGE_BYTES:
        return 0
    fitting = (PAGE_BYTES - size) * len(found) // max(size, 1)
    return max(1, min(count - events, fitting, PAGE_NEXT_ENTRIES))


def _id(text: str) -> EventId:
    epoch, _, seq = text.partition("-")
    return EventId(int(epoch), int(seq))


def _entries(answer: Any) -> list[Entry]:
    if isinstance(answer, Exception):
        raise answer
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in answer]


def _event(event_id: EventId, fields: Mapping[bytes, bytes]) -> LogEvent:
    return LogEvent(
        event_id,
        fields[b"source"].decode(),
        fields[b"uid"].decode(),
        fields[b"type"].decode(),
        fields[b"data"],
        int(fields[b"ts"]),
        b"mended" in fields,
    )
