"""Announcements: what this process has to say in threads' logs, after it was committed and beside the answer.

Owns:     one loop.
Promises: the caller's answer never waits for Redis; while Redis is away what was committed is kept, within a bound, and
          said when it is back. What is dropped, or dies with the process, the workers say (a turn's own entry before
          its first word, an end by the net).
Used by:  `threads` (entries), `turns` (ends of turns that waited), `app` (run, flush).
"""

import asyncio
from typing import NamedTuple

import structlog

from common.errors import StoreUnavailable
from common.ids import TurnId
from common.process.backoff import Backoff
from common.store import turn_events
from common.store.threadlog import ThreadLog
from common.store.threads import Entry
from common.store.turn_events import Said
from common.store.turns import Turn, Turns

logger = structlog.get_logger(__name__)

# Of texts that wait for Redis: more is an outage in which people post a lot, and the workers make it good.
WAITING_BYTES_MAX = 16 * 1024 * 1024
# Appended in one pipeline.
BATCH_MAX = 100


class _Announcement(NamedTuple):
    said: Said
    is_first: bool
    ended: TurnId | None
    size_bytes: int


class Announcements:
    """What one process has yet to say."""

    def __init__(self, log: ThreadLog, turns: Turns) -> None:
        self._log = log
        self._turns = turns
        self._waiting: list[_Announcement] = []
        self._waiting_bytes = 0
        self._added = asyncio.Event()
        self._said_all = asyncio.Event()
        self._said_all.set()

    def entry_posted(self, entry: Entry, *, is_new: bool) -> None:
        """Say a user's entry. `is_new`: this very call committed it."""
        self._put(turn_events.posted(entry), is_first=is_new and entry.position == 1)

    def turn_ended(self, turn: Turn) -> None:
        """Say how a turn ended, and note that it was said."""
        self._put(turn_events.ended(turn), ended=turn.turn)

    async def run(self) -> None:
        """Say whatever is put, in its order, until cancelled."""
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                batch = self._waiting[:BATCH_MAX]
                unsaid = await self._say(batch)
                self._waiting[: len(batch)] = unsaid
                self._waiting_bytes -= sum(one.size_bytes for one in batch) - sum(one.size_bytes for one in unsaid)
                if unsaid:
                    await asyncio.sleep(backoff.next_s())
                else:
                    backoff.reset()
            self._said_all.set()

    async def flush(self) -> None:
        """Wait until all is said."""
        await self._said_all.wait()

    def _put(self, said: Said, *, is_first: bool = False, ended: TurnId | None = None) -> None:
        size_bytes = sum(len(event.data) for event in said.events)
        if self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
            logger.warning("announcement_dropped", thread=said.thread, name=said.name)
            return
        self._waiting.append(_Announcement(said, is_first, ended, size_bytes))
        self._waiting_bytes += size_bytes
        self._said_all.clear()
        self._added.set()

    async def _say(self, batch: list[_Announcement]) -> list[_Announcement]:
        """Say some in one round trip; returns those that have to be said again."""
        found = await asyncio.gather(
            *(self._log.say(*one.said, is_first=one.is_first) for one in batch), return_exceptions=True
        )
        unsaid: list[_Announcement] = []
        ended: list[TurnId] = []
        for one, problem in zip(batch, found, strict=True):
            if isinstance(problem, StoreUnavailable):
                logger.warning("announcement_delayed", thread=one.said.thread, error=str(problem))
                # It may be there, or others' words by now: whether it is the first of all is not known any more.
                unsaid.append(one._replace(is_first=False))
            elif problem is not None:
                # One that cannot be said must not keep the others.
                logger.error("announcement_failed", thread=one.said.thread, name=one.said.name, exc_info=problem)
            elif one.ended is not None:
                ended.append(one.ended)
        try:
            await self._turns.mark_announced(ended)
        except StoreUnavailable as error:
            logger.warning("announcements_unmarked", turns=len(ended), error=str(error))  # the net says them again
        return unsaid
