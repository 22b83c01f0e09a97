"""Talk: what one handling of a turn says in its thread's log while it works.

Owns:     the order and the numbers of what is said before the turn's end.
Promises: the answering never waits for Redis: while an append is under way, or Redis is away, pieces of the answer are
          gathered into one. What is said after a newer attempt has spoken is refused, and the worker told (rule 33).
Used by:  `handling` (speaking, flush), `steps` (say, tell).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import structlog

from common.errors import StoreUnavailable
from common.ids import new_id
from common.process.backoff import Backoff
from common.store.claims import Begun
from common.store.eventlog import NewEvent
from common.store.threadlog import AttemptFenced, Fence, ThreadLog
from common.store.threads import Entry
from common.store.turn_events import event_of, posted
from common.store.turns import Claim, Turn
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, ThreadEventData

logger = structlog.get_logger(__name__)

# Pieces of an answer leave this far apart at the closest: to a reader it is fluent, and a model that says a hundred
# tokens a second costs a third of the appends.
DELTA_EVERY_S = 0.03
# What was gathered while Redis was away leaves in pieces of this size.
DELTA_CHARACTERS_MAX = 16 * 1024


class Talk:
    """See the module. It begins with the turn's entry, whose gateway may be dead, and with the word that it is at work.

    Args:
        fenced: called when a newer attempt has spoken.
    """

    def __init__(self, log: ThreadLog, claim: Claim, turn: Turn, begun: Begun, *, fenced: Callable[[], None]) -> None:
        self._log = log
        self._turn = turn
        self._attempt = claim.attempt
        self._fenced = fenced
        self._entry = posted(
            Entry(turn.entry, turn.thread, turn.number, "user", begun.text, turn.turn, turn.created_ms)
        )
        self._is_first_entry = begun.is_first and turn.number == 1
        # A run that was given back goes on in another handling, under the same attempt.
        name = f"attempt:{claim.run}:{new_id()}"
        self._writer = log.writer(turn.thread, name, Fence(turn.number, claim.attempt))
        self._pieces = 0
        self._gathered: list[str] = []  # of the answer; comes after all that waits
        self._waiting: list[NewEvent] = []
        self._work = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._is_done = asyncio.Event()
        self._is_over = False
        self.tell(events.TURN_STARTED if begun.is_first else events.TURN_RESTARTED, Attempt(turn.turn, claim.attempt))

    @contextlib.asynccontextmanager
    async def speaking(self) -> AsyncIterator[None]:
        """While this lasts, what is said is appended."""
        speaker = asyncio.get_running_loop().create_task(self._run(), name=f"talk:{self._turn.turn}")
        try:
            yield
        finally:
            speaker.cancel()
            await asyncio.wait({speaker})

    def say(self, text: str) -> None:
        """Say a piece of the answer: text that JSON can carry."""
        if text:
            self._gathered.append(text)
            self._wake()

    def tell(self, kind: str, data: ThreadEventData) -> None:
        """Say anything else, without delay."""
        self._settle_gathered()
        self._add(kind, data)
        self._is_urgent.set()
        self._wake()

    async def flush(self) -> None:
        """Wait until all of it is in the log, or refused there."""
        self._is_urgent.set()
        await self._is_done.wait()

    async def _run(self) -> None:
        is_first = True
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                self._is_urgent.clear()
                self._settle_gathered()
                batch, self._waiting = self._waiting, []
                await self._append(batch, is_first=is_first)
                is_first = False
                if not self._work.is_set():
                    self._is_done.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DELTA_EVERY_S):
                        await self._is_urgent.wait()
        except AttemptFenced:
            self._fenced()
        except Exception:
            # The turn goes on, and its end is told all the same.
            logger.exception("turn_unheard", turn=self._turn.turn)
        finally:
            self._is_over = True
            self._is_done.set()

    async def _append(self, batch: list[NewEvent], *, is_first: bool) -> None:
        backoff = Backoff(first_s=0.05, cap_s=2.0)
        while True:
            appends = [self._writer.append(batch)]
            if is_first:  # both in one round trip, in this order
                entry = self._entry
                appends.insert(0, self._log.say(entry.thread, entry.name, entry.events, is_first=self._is_first_entry))
            failures = [error for error in await asyncio.gather(*appends, return_exceptions=True) if error is not None]
            for error in failures:
                if not isinstance(error, StoreUnavailable):
                    raise error
            if not failures:
                return
            batch = []  # the writer keeps it
            logger.warning("turn_not_heard", turn=self._turn.turn, error=str(failures[0]))
            await asyncio.sleep(backoff.next_s())

    def _wake(self) -> None:
        if not self._is_over:
            self._is_done.clear()
            self._work.set()

    def _settle_gathered(self) -> None:
        text = "".join(self._gathered)
        self._gathered.clear()
        for start in range(0, len(text), DELTA_CHARACTERS_MAX):
            self._pieces += 1
            piece = text[start : start + DELTA_CHARACTERS_MAX]
            self._add(events.MESSAGE_DELTA, Delta(self._turn.turn, self._attempt, self._pieces, piece))

    def _add(self, kind: str, data: ThreadEventData) -> None:
        self._waiting.append(event_of(self._turn.turn, "", kind, data, int(time.time() * 1000)))
