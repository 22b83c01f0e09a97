"""What a watcher saw of a run, held against what its sources said (PURE).

    lost         an event that a source said and the watcher never saw, without a word about it
    doubled      an event that came again
    disordered   an event that came for the first time after a later one of its source
    repeated     an event that came again after an announced gap, which is allowed
    stray        an event of no source of the run
    excused      an event that is missing where a gap was announced

Sources number what they say from 1 (`harness.agent`), so a hole is plain arithmetic, whatever ids the product gives.
Used by:  drills and the soak's checker.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from towline.wire import events


class Seen(NamedTuple):
    """One event or frame of a stream out.

    Attributes:
        type: as the gateway named it.
        source: whose it is, or whom it is about; empty: about the run.
        number: the source's own number of it; 0 for what the product says itself.
        id: of the event; empty for frames.
        at: when it was seen, monotonic seconds.
        state: how the run or the source has ended, where this says so.
    """

    type: str
    source: str
    number: int
    id: str = ""
    at: float = 0.0
    state: str = ""


@dataclass(slots=True)
class Tally:
    """Counts over everything that one watcher saw. `gaps`: announced, by the gateway or about a source."""

    events: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    strays: int = 0
    repeated: int = 0
    excused: int = 0
    gaps: int = 0
    terminals: int = 0
    after_terminal: int = 0
    ends: int = 0


@dataclass(slots=True)
class _Place:
    """Where a watcher stands with one source: its last event, what it has, and what it has passed over."""

    last: int = 0
    has: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    may_jump: bool = False

    def pass_over(self, until: int) -> None:
        """Note what is missing between the last event and this number."""
        missing = set(range(self.last + 1, until)) - self.has
        if self.may_jump:
            self.excused |= missing
        else:
            self.lost |= missing


def tally(seen: Iterable[Seen], said: Mapping[str, int], *, live: Collection[str] = ()) -> Tally:
    """Count what a watcher saw.

    Args:
        said: by source, the number of its last event.
        live: sources that say nothing again: what they said before they were followed is excused.
    """
    found = Tally()
    places = {source: _Place(may_jump=source in live) for source in said}
    for item in seen:
        if found.terminals and item.type != events.END:
            found.after_terminal += 1
        match item.type:
            case events.GAP:
                found.gaps += 1
                for place in places.values():
                    place.may_jump = True
            case events.DISCONTINUITY | events.SOURCE_GAP:
                found.gaps += 1
                places[item.source].may_jump = True
            case events.SOURCE_ENDED if item.state != "completed":
                # It did not come to its own end; what it may have said beyond this nobody knows.
                places[item.source].may_jump = True
            case events.RUN_ENDED:
                found.terminals += 1
            case events.END:
                found.ends += 1
            case _ if item.number and item.source not in places:
                found.strays += 1
            case _ if item.number:
                found.events += 1
                _count(found, places[item.source], item.number)
    for source, place in places.items():
        place.pass_over(said[source] + 1)
        found.lost += len(place.lost)
        found.excused += len(place.excused)
    return found


def total(tallies: Sequence[Tally]) -> Tally:
    """Add up what several watchers saw."""
    names = Tally.__dataclass_fields__
    return Tally(**{name: sum(getattr(each, name) for each in tallies) for name in names})


def _count(found: Tally, place: _Place, number: int) -> None:
    is_behind = number <= place.last
    place.pass_over(number)
    if number in place.has:
        # After a gap the stream may begin anew anywhere in what was seen.
        if is_behind and not place.may_jump:
            found.doubled += 1
        else:
            found.repeated += 1
    elif is_behind and not place.may_jump:
        found.disordered += 1
    if place.may_jump or not is_behind:
        place.last = number
    place.has.add(number)
    place.lost.discard(number)
    place.excused.discard(number)
    place.may_jump = False
