"""How a source goes on after a break: what is asked for, and what of the answer was had before. PURE.

Promises: within one owner nothing that was passed on is passed on again, wherever the upstream starts anew; what
          cannot be known is said (`open` and `Passed.missing_after` tell), never guessed in silence.

`ids`:    Last-Event-ID is sent. An upstream that ignores it and starts anew is recognised by ids that an earlier
          connection brought; they are left out until the first unknown one.
`replay`: the upstream starts anew each time. Everything is held back until the last event had shows up (by its id, or
          without ids by its number), and goes. If it does not show up there is a gap, and what was held is passed on.
`live`:   what comes, comes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from towline.wire.sse import Event, Oversized

Item = Event | Oversized

# A longer id, or one that cannot stand in a header, cannot be asked for.
SENT_ID_BYTES_MAX = 2048
# Ids remembered per source: an upstream that starts anew is recognised as long as it repeats no more than this.
KNOWN_IDS_MAX = 2000
# What may be held back of a replay; beyond it, what was had last will not show up any more.
HELD_ITEMS_MAX = 20_000
HELD_BYTES_MAX = 8 * 1024 * 1024
# A replay comes at once; a stream that has been quiet for this long has told all it knows.
REPLAY_QUIET_S = 3.0


class Passed(NamedTuple):
    """What is new. `missing_after`: after this id (empty without ids) something may be lost; None: nothing is."""

    items: Sequence[Item]
    missing_after: str | None = None


@dataclass(slots=True)
class Resume:
    """One source's place in its upstream.

    Attributes:
        uid, count: the last id had and the number of events had, over all owners.
        is_first: nobody has opened this source before.
    """

    mode: Literal["ids", "replay", "live"]
    terminal_types: frozenset[str]
    uid: str = ""
    count: int = 0
    is_first: bool = True
    _known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _skipping: "_KnownIds | _Replay | None" = None

    @property
    def last_event_id(self) -> str:
        """What to send as `Last-Event-ID`; empty for nothing."""
        return self.uid if self.mode == "ids" and is_sendable(self.uid) else ""

    def open(self) -> bool:
        """The upstream has accepted a connection; whatever the last one had held back is void.

        Returns:
            Whether it must be said that what the upstream sent meanwhile may be lost.
        """
        was_first, self.is_first = self.is_first, False
        self._skipping = None
        if self.mode == "replay":
            if self.count:
                self._skipping = _Replay(self.uid, self.count, self.terminal_types)
            return False
        if self.mode == "live":
            return not was_first
        if self._known or self.uid:
            self._skipping = _KnownIds(frozenset(self._known) | {self.uid})
        # Without an id there was nothing to ask for, and nothing vouches for what came in between.
        return self.count > 0 and not self.last_event_id

    def accept(self, items: Sequence[Item]) -> Passed:
        """Take what a chunk held; returns what of it to pass on, and counts that."""
        if self._skipping is None:
            self._count(items)
            return Passed(items)
        passed = self._skipping.take(items)
        if self._skipping.is_done:
            self._skipping = None
        self._count(passed.items)
        return passed

    @property
    def is_holding(self) -> bool:
        """Whether a replay is being held back: call `settle` once nothing has come for REPLAY_QUIET_S."""
        return isinstance(self._skipping, _Replay) and bool(self._skipping.held)

    def settle(self) -> Passed:
        """The replay is over and what was had last did not show up: pass on what was held."""
        assert isinstance(self._skipping, _Replay)
        passed = Passed(self._skipping.held, missing_after=self.uid)
        self._skipping = None
        self._count(passed.items)
        return passed

    def _count(self, items: Sequence[Item]) -> None:
        self.count += len(items)
        remembers = self.mode == "ids"
        for item in items:
            if item.id:
                self.uid = item.id
                if remembers:
                    self._known[item.id] = None
        while len(self._known) > KNOWN_IDS_MAX:
            self._known.popitem(last=False)


def is_sendable(uid: str) -> bool:
    """Whether an id may stand in `Last-Event-ID`: a header's value has no control characters and no outer spaces."""
    return uid.isprintable() and uid == uid.strip() and len(uid.encode()) <= SENT_ID_BYTES_MAX


class _KnownIds:
    """Leaves out ids of earlier connections, up to the first one that is none of them."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self.is_done = False

    def take(self, items: Sequence[Item]) -> Passed:
        for position, item in enumerate(items):
            if item.id not in self._known:
                self.is_done = True
                return Passed(items[position:])
        return Passed(())


class _Replay:
    """Holds back a replay until the last event had, which is the `count`th one if the replay is whole."""

    def __init__(self, uid: str, count: int, terminal_types: frozenset[str]) -> None:
        self._uid = uid
        self._count = count
        self._terminal_types = terminal_types
        self._held_bytes = 0
        self.held: list[Item] = []
        self.is_done = False

    def take(self, items: Sequence[Item]) -> Passed:
        for position, item in enumerate(items):
            self.held.append(item)
            self._held_bytes += item.size_bytes if isinstance(item, Oversized) else len(item.data)
            if item.id == self._uid if self._uid else len(self.held) == self._count:
                self.is_done = True
                return Passed(items[position + 1 :])
            if self._is_lacking(item):
                self.is_done = True
                return Passed([*self.held, *items[position + 1 :]], missing_after=self._uid)
        return Passed(())

    def _is_lacking(self, item: Item) -> bool:
        return (
            item.type in self._terminal_types  # the last event had was none, or the source would have ended with it
            or len(self.held) >= self._count
            or len(self.held) >= HELD_ITEMS_MAX
            or self._held_bytes > HELD_BYTES_MAX
        )
