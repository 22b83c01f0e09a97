"""Following a run's stream, as values: whatever happens to it, no silent hole, no needless gap, nothing left unread.

The stream and its owner are played here by the rules of the log (seq runs on across takeovers, a stream born anew
starts above all others, an owner resumes from its points); the reader is the code under test, which changes gateways
at any time with nothing but the id that it saw last.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.store.eventlog import (
    ZERO,
    Entry,
    EventId,
    Gap,
    LogEvent,
    Page,
    Position,
    beyond,
    follow,
)


def entry(epoch: int, seq: int, number: int | None) -> Entry:
    """An event whose data is its upstream's number, or a marker."""
    if number is None:
        return f"{epoch}-{seq}", {b"marker": b"relay"}
    fields = {b"type": b"output", b"data": b"%d" % number, b"source": b"s", b"uid": b"u%d" % number, b"ts": b"1"}
    return f"{epoch}-{seq}", fields


def id_of(item: Entry) -> EventId:
    found = EventId.parse(item[0])
    assert found is not None
    return found


def number_of(item: Entry) -> int | None:
    data = item[1].get(b"data")
    return None if data is None else int(data)


@dataclass
class Log:
    """One run's stream and whoever owns it; one source, which gives its events again from any number on.

    `saved`: what Postgres knows of the owner's place, at most what is appended. `base`: the upstream's number before
    the first event that is there.
    """

    entries: list[Entry] = field(default_factory=list)
    epoch: int = 0
    seq: int = 0
    appended: int = 0
    saved: int = 0
    base: int = 0
    first_seq: int = 0
    is_lossy: bool = False

    def take(self) -> None:
        """A new owner, or the same one under a new epoch: mark, and go on from where the log is."""
        self.epoch += 1
        if self.entries:
            self.seq = id_of(self.entries[-1]).seq
            numbers = [n for n in map(number_of, self.entries) if n is not None]
            self.appended = numbers[-1] if numbers else self.base
        else:
            self.seq = self.epoch * 1000  # the time, which has gone on further than events were numbered
            self.first_seq = self.first_seq or self.seq
            self.appended = self.base = self.saved
        self.entries.append(entry(self.epoch, self.seq, None))

    def append(self, count: int) -> None:
        for _ in range(count):
            self.seq += 1
            self.appended += 1
            self.entries.append(entry(self.epoch, self.seq, self.appended))

    def save(self) -> None:
        self.saved = self.appended

    def trim(self, count: int) -> None:
        """Never the tail."""
        count = min(count, len(self.entries) - 1)
        if count > 0:
            numbers = [n for n in map(number_of, self.entries[:count]) if n is not None]
            self.base = numbers[-1] if numbers else self.base
            del self.entries[:count]
            self.is_lossy = True

    def flush(self) -> None:
        self.is_lossy = True
        self.entries.clear()
        self.take()

    def fail_over(self, count: int) -> None:
        """The last entries had not been replicated; the owner finds its tail gone, and takes again."""
        self.is_lossy = True
        del self.entries[len(self.entries) - count :]
        self.take()


class Client:
    """A browser and the gateway that serves it now. Checks each thing it is given against the one before."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.position = Position.start(log.first_seq)
        self.seen = 0
        self.is_after_gap = False

    def reconnect(self) -> None:
        last = self.position.last
        self.position = Position.start(self.log.first_seq) if last is None else Position.after(last)
        # A gap that was announced and followed by nothing is not remembered by the client's id: it is told again.

    def read(self, count: int) -> bool:
        """One page, as `EventLog.read_after` does it; says whether anything moved."""
        before = self.position
        entries = self.log.entries
        found = [item for item in entries if id_of(item) > before.at][:count]
        page: Page | None = follow(before, found)
        if not found:
            page = beyond(before, entries[0], id_of(entries[-1])) if entries else None
        if page is None:
            return False
        self.position = page.position
        for item in page.items:
            self.take(item)
        return self.position != before

    def take(self, item: LogEvent | Gap) -> None:
        if isinstance(item, Gap):
            assert self.log.is_lossy, "a gap was announced where nothing was lost"
            self.is_after_gap = True
            return
        number = int(item.data)
        assert self.is_after_gap or number == self.seen + 1, f"{number} after {self.seen} without a gap"
        self.seen = number
        self.is_after_gap = False


STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.just(0)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("read"), st.integers(1, 5)),
    st.tuples(st.just("reconnect"), st.just(0)),
    st.tuples(st.just("trim"), st.integers(1, 6)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("fail_over"), st.integers(1, 6)),
)
QUIET = STEPS.filter(lambda step: step[0] not in ("trim", "flush", "fail_over"))


def play(steps: list[tuple[str, int]]) -> None:
    log = Log()
    log.take()
    client = Client(log)
    for name, size in steps:
        if name == "append":
            log.append(size)
        elif name == "read":
            client.read(size)
        elif name == "reconnect":
            client.reconnect()
        elif name == "trim":
            log.trim(size)
        elif name == "fail_over":
            log.fail_over(min(size, len(log.entries)))
        else:
            getattr(log, name)()
    log.append(1)
    for _ in range(len(log.entries) + 3):
        if not client.read(3):
            break
    assert client.seen == log.appended, "the reader stopped before the tail"
    assert not client.is_after_gap


@given(st.lists(STEPS, max_size=30))
def test_no_silent_hole_whatever_is_lost(steps: list[tuple[str, int]]) -> None:
    """Trims, flushes, fail-overs and takeovers at any time, with reads and changes of gateway in between."""
    play(steps)


@given(st.lists(QUIET, max_size=40))
def test_no_gap_where_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    """However often the run changes its owner and the client its gateway."""
    play(steps)


# ---- by hand: what the play cannot name


def test_a_gap_stands_where_it_is_and_says_between_what() -> None:
    """In the middle of a page, once, and not again for what follows it."""
    page = follow(Position.after(EventId(5, 10)), [entry(5, 11, 1), entry(6, 2000, None), entry(6, 2001, 2)])
    assert [type(item) for item in page.items] == [LogEvent, Gap, LogEvent]
    assert page.items[1] == Gap(EventId(5, 11), EventId(6, 2000))
    assert page.position == Position(EventId(6, 2001), 2001, EventId(6, 2001))


def test_a_marker_that_repeats_the_number_moves_only_the_place() -> None:
    """The client's id stays: it was given no event."""
    page = follow(Position.after(EventId(5, 10)), [entry(6, 10, None)])
    assert page == Page([], Position(EventId(6, 10), 10, EventId(5, 10)))


@pytest.mark.parametrize(("first_seq", "gaps"), [(10, 0), (9, 1), (None, 0)])
def test_the_first_event_must_be_the_runs_first(first_seq: int | None, gaps: int) -> None:
    """Just before it stands the number that the record keeps."""
    page = follow(Position.start(first_seq), [entry(5, 11, 1)])
    assert len(page.items) == 1 + gaps
    if gaps:
        assert page.items[0] == Gap(None, EventId(5, 11))


def test_a_beginning_that_was_seen_is_checked_even_if_the_record_did_not_know_it() -> None:
    """The birth marker says what the first event's number must be."""
    assert [type(i) for i in follow(Position.start(None), [entry(5, 10, None), entry(5, 12, 2)]).items] == [
        Gap,
        LogEvent,
    ]


def test_a_smaller_number_is_a_gap_too_and_the_event_is_given() -> None:
    """Nothing is dropped for having a number that was had (rule 27)."""
    page = follow(Position.after(EventId(5, 10)), [entry(6, 9, None), entry(6, 10, 10)])
    assert [type(item) for item in page.items] == [Gap, LogEvent]


@pytest.mark.parametrize("seq", [13, 14, 16])
def test_any_number_but_the_next_is_a_gap_without_a_marker_too(seq: int) -> None:
    """An older replica took over, its owner marked and went on, and the mark was trimmed before anyone read it."""
    page = follow(Position.after(EventId(5, 14)), [entry(8, seq, 3)])
    assert [type(item) for item in page.items] == [Gap, LogEvent]


def test_a_place_beyond_the_stream_goes_back_to_its_tail() -> None:
    """What was seen beyond it is lost; what comes now is given without another gap."""
    page = beyond(Position.after(EventId(5, 14)), entry(5, 10, None), EventId(5, 12))
    assert page == Page([Gap(EventId(5, 14), None)], Position(EventId(5, 12), 12, EventId(5, 14)))
    assert follow(page.position, [entry(6, 12, None), entry(6, 13, 3)]).items == [
        follow(Position.live(EventId(6, 12)), [entry(6, 13, 3)]).items[0]
    ]


def test_a_stream_born_below_the_place_is_read_from_its_beginning() -> None:
    """It is another one: an owner whose epoch was minted earlier made it after a loss."""
    page = beyond(Position.after(EventId(9, 14)), entry(5, 10, None), EventId(5, 12))
    assert page == Page([Gap(EventId(9, 14), EventId(5, 10))], Position(ZERO, None, EventId(9, 14)), more=True)


@pytest.mark.parametrize("place", [EventId(5, 12), EventId(5, 11), ZERO])
def test_a_place_within_the_stream_is_not_beyond_it(place: EventId) -> None:
    assert beyond(Position.after(place), entry(5, 10, None), EventId(5, 12)) is None


@pytest.mark.parametrize("text", ["0-0", "1790000000000000-1790000000000001", "9-123"])
def test_ids_come_back(text: str) -> None:
    parsed = EventId.parse(text)
    assert parsed is not None
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text", ["", "-", "1", "1-", "-1", "1-2-3", "01-2", "1-02", " 1-2", "1-2\n", "٣-1", "1-99999999999999999999", "a-b"]
)
def test_what_cannot_be_an_id_is_none(text: str) -> None:
    assert EventId.parse(text) is None
