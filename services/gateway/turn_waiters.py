"""Turn waiters: callers of this process that wait for the end of a turn.

Owns:     one loop, however many callers wait.
Promises: a caller is woken by the thread's own stream, which the process's one reader reads anyway, and then reads the
          record (rule 2). What the stream lost costs seconds, not the answer: the records of all waiters are read
          again and again.
Used by:  `turns` (wait), `app` (run, leave).
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from common.errors import StoreUnavailable
from common.ids import TurnId
from common.store.eventlog import EventLog, Gap, Position
from common.store.threadlog import START
from common.store.turns import Turn, Turns
from gateway.fanout import Fanout
from gateway.frames import Batch
from gateway.request import ClientGone
from gateway.topics import of_thread
from towline.wire import events

logger = structlog.get_logger(__name__)

# An end that was announced to nobody is made good within this time; each pass is one statement.
REREAD_EVERY_S = 5.0
# Records in one statement: each may bring an answer along.
REREAD_RECORDS_MAX = 200


class _Waiter:
    """One caller; a `feeds.Reader` of the thread."""

    def __init__(self, turn: TurnId) -> None:
        self.turn = turn
        self.woken = asyncio.Event()
        self.is_gone = False

    def take(self, batch: Batch) -> None:
        """Wake up if the turn has ended, or if that may have been lost."""
        for item in batch.items:
            if isinstance(item, Gap) or (item.source == self.turn and item.type in events.TURN_ENDS):
                self.woken.set()

    def cut(self, _reason: str) -> None:
        """Look into the record, where the stream could not be read."""
        self.woken.set()

    async def watch(self, hung_up: Callable[[], Awaitable[None]]) -> None:
        """Wake up when the caller has gone."""
        await hung_up()
        self.is_gone = True
        self.woken.set()


class TurnWaiters:
    """All turn waiters of one process."""

    def __init__(self, turns: Turns, log: EventLog, fanout: Fanout) -> None:
        self._turns = turns
        self._log = log
        self._fanout = fanout
        self._waiters: set[_Waiter] = set()
        self._is_leaving = False

    @property
    def count(self) -> int:
        """How many wait now."""
        return len(self._waiters)

    async def wait(self, turn: Turn, timeout_s: float, hung_up: Callable[[], Awaitable[None]]) -> Turn:
        """Wait until a turn has ended, the time has passed, or this process leaves; returns its record as it is then.

        Without a place to wait it returns at once. While a store is away the record may be older.

        Args:
            hung_up: returns when the caller has gone.

        Raises:
            ClientGone: the caller hung up.
        """
        if turn.terminal:
            return turn
        waiter = _Waiter(turn.turn)
        self._waiters.add(waiter)
        watch = asyncio.create_task(waiter.watch(hung_up), name="hang-up")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    waiter.woken.clear()
                    if self._is_leaving:
                        return turn
                    if waiter.is_gone:
                        raise ClientGone
                    # Joined first, read second: what ends in between is heard of (rule 15).
                    await self._join(waiter, turn)
                    turn = await self._read(turn)
                    if turn.terminal:
                        return turn
                    await waiter.woken.wait()
        except TimeoutError:
            return await self._read(turn)
        finally:
            watch.cancel()
            self._fanout.leave(waiter, [of_thread(turn.thread)])
            self._waiters.discard(waiter)

    def leave(self) -> None:
        """Let everyone go, and whoever comes from now on."""
        self._is_leaving = True
        for waiter in self._waiters:
            waiter.woken.set()

    async def run(self) -> None:
        """Read the records of all waiters every few seconds, until cancelled: the net under lost announcements."""
        while True:
            await asyncio.sleep(REREAD_EVERY_S)
            waiting = list(self._waiters)
            for start in range(0, len(waiting), REREAD_RECORDS_MAX):
                part = waiting[start : start + REREAD_RECORDS_MAX]
                try:
                    ended = {
                        turn.turn
                        for turn in (await self._turns.read_many([waiter.turn for waiter in part])).values()
                        if turn.terminal
                    }
                except StoreUnavailable as error:
                    logger.warning("turn_waiters_unread", waiters=len(waiting), error=str(error))
                    break
                for waiter in part:
                    if waiter.turn in ended:
                        waiter.woken.set()

    async def _join(self, waiter: _Waiter, turn: Turn) -> None:
        """Hear of what is said in the turn's thread from now on."""
        topic = of_thread(turn.thread)
        try:
            while True:
                position = self._fanout.position_of(topic)
                if position is None:
                    tail = await self._log.tail(topic)
                    position = START if tail is None else Position.live(tail)
                if self._fanout.join(waiter, topic, position):
                    return
        except StoreUnavailable as error:
            logger.warning("turn_waiter_deaf", turn=turn.turn, error=str(error))  # the rereads will find it

    async def _read(self, turn: Turn) -> Turn:
        """The record as it is now; as it was when Postgres does not answer."""
        try:
            return await self._turns.read(turn.turn) or turn
        except StoreUnavailable as error:
            logger.warning("turn_unread", turn=turn.turn, error=str(error))
            return turn
