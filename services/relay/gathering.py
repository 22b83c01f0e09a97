"""What the sources of one run have brought and the log has not taken yet: bounded, in order.

Promises: adding never waits, so reading an upstream never waits for an append; once `is_full`, whoever reads waits for
          room before it reads on, and so does its upstream (TCP's flow control). What is being appended still counts.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from common.store.eventlog import NewEvent

# Per run: what some seconds without Redis bring, and one append can carry.
RUN_EVENTS_MAX = 2000
RUN_BYTES_MAX = 2 * 1024 * 1024
# Per process, whatever the number of runs: Redis may be away while all of them are busy.
RELAY_BYTES_MAX = 256 * 1024 * 1024
# What an event costs beside its data: the tuple, its strings, the entry's fields on their way.
EVENT_OVERHEAD_BYTES = 300


class Budget:
    """What is gathered in all runs of this relay.

    Attributes:
        events: their number.
    """

    def __init__(self, bytes_max: int = RELAY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self.events = 0
        self.room = asyncio.Event()
        self.room.set()

    def change(self, byte_count: int, events: int) -> None:
        """Count events in or out."""
        self._bytes += byte_count
        self.events += events
        if self._bytes > self._bytes_max:
            self.room.clear()
        else:
            self.room.set()


class Batch(NamedTuple):
    """Everything gathered at one moment. `oldest_at`: when its first event was added (monotonic seconds)."""

    events: list[NewEvent]
    progressed: bool
    oldest_at: float


class Gathering:
    """One run's events between its tailers and its appends."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._events: list[NewEvent] = []
        self._progressed = False
        self._oldest_at = 0.0
        self._bytes = 0  # what is being appended included
        self._appending_bytes = 0
        self._appending = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, events: Sequence[NewEvent], data_bytes: int, *, progressed: bool = False) -> None:
        """Add events that belong together: they go out in one append. `data_bytes`: of their data."""
        if not self._events:
            self._oldest_at = time.monotonic()
            self._empty.clear()
            self._work.set()
        self._events += events
        self._progressed = self._progressed or progressed
        size = data_bytes + EVENT_OVERHEAD_BYTES * len(events)
        self._bytes += size
        self._budget.change(size, len(events))
        self._look_at_room()

    @property
    def is_full(self) -> bool:
        """Whether to call `wait_room` before reading on."""
        return not (self._room.is_set() and self._budget.room.is_set())

    async def wait_room(self) -> None:
        """Wait until there is room again."""
        while self.is_full:
            await self._room.wait()
            await self._budget.room.wait()

    async def take(self) -> Batch:
        """Wait for events and take all there are; call `appended` once the log has them."""
        await self._work.wait()
        self._work.clear()
        batch = Batch(self._events, self._progressed, self._oldest_at)
        self._events, self._progressed = [], False
        self._appending, self._appending_bytes = len(batch.events), self._bytes
        return batch

    def appended(self) -> None:
        """The log has what was taken last."""
        self._bytes -= self._appending_bytes
        self._budget.change(-self._appending_bytes, -self._appending)
        self._appending = self._appending_bytes = 0
        self._look_at_room()
        if not self._events:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until the log has everything. Only after the last `add`: else it may never be."""
        await self._empty.wait()

    def _look_at_room(self) -> None:
        if self._bytes > RUN_BYTES_MAX or len(self._events) + self._appending > RUN_EVENTS_MAX:
            self._room.clear()
        else:
            self._room.set()

    def close(self) -> None:
        """Give back what the relay counts for this run."""
        self._budget.change(-self._bytes, -len(self._events) - self._appending)
        self._bytes = 0
