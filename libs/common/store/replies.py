"""Replies: what the callers of one process are told of the jobs and probes that they wait for.

Owns:     three loops, however many callers wait.
Promises: a waiter is told of the terminal record, of its machine's lapse, or that this process leaves, whichever is
          first. A lost reply costs seconds, not the answer: the records of all waiters are read again and again. Where
          Redis was away all are registered anew at once: a replica that took over may never have heard of them.
Used by:  the gateway (callers of jobs, probes; its `fanout` reads the replies and hands them over by `take`), the
          worker (tool calls of turns; its `replies` reads them). Both call `renew` when that read breaks.

Register first, read the record second (rule 15). A waiter's future ends with a value of `Told`; whoever waited then
reads the record once more before it says that there is no outcome yet.
"""

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec
import structlog

from common.errors import StoreUnavailable
from common.ids import GatewayId, JobId, UserId
from common.store import keys
from common.store.control import Note
from common.store.jobs import Jobs, Seen
from common.store.presence import state_of
from common.store.records import Record
from common.store.redis import Redis
from common.store.requests import Requests

logger = structlog.get_logger(__name__)

# A reply that was lost with Redis is made good within this time; each pass is one statement.
REREAD_EVERY_S = 5.0
# While Redis is away it is asked this often whether waiters can be registered again.
RENEW_EVERY_S = 0.25
# Records in one statement: each may bring an outcome along.
REREAD_RECORDS_MAX = 200
# Most waits are shorter; only longer ones pay for the task that sees whether their caller has hung up.
UNWATCHED_WAIT_S = 1.0


class Cut(enum.Enum):
    """Why a wait ended without an outcome."""

    TIMEOUT = "timeout"  # the caller's own
    OFFLINE = "offline"  # the machine's presence lapsed
    LEAVING = "leaving"  # this process is about to stop
    GONE = "gone"  # the caller hung up


class Ended(msgspec.Struct, frozen=True):
    """A terminal record as `common.store.jobs.terminal_text` publishes it."""

    state: str
    attempts: int
    ended_ms: int
    outcome: msgspec.Raw

    def applied_to(self, record: Record) -> Record:
        """The record as it stands in Postgres by now."""
        return msgspec.structs.replace(
            record,
            state=self.state,
            attempts=self.attempts,
            ended_ms=self.ended_ms,
            outcome=bytes(self.outcome).decode(),
        )


Told = Ended | Record | Cut
_ended_decoder = msgspec.json.Decoder(Ended)


class Waiter:
    """One caller. `online`: the machine was connected when last looked at, so its lapse is news."""

    __slots__ = ("future", "job", "online", "user")

    def __init__(self, job: JobId, user: UserId, *, online: bool) -> None:
        self.job = job
        self.user = user
        self.online = online
        self.future: asyncio.Future[Told] = asyncio.get_running_loop().create_future()

    def tell(self, told: Told) -> None:
        """End the wait; the first call counts."""
        if not self.future.done():
            self.future.set_result(told)

    async def wait(self, timeout_s: float, hung_up: Callable[[], Awaitable[None]] | None = None) -> Told:
        """Wait for whatever comes first. `hung_up` returns when the caller has gone; None: it cannot."""
        loop = asyncio.get_running_loop()
        hang_ups: list[asyncio.Task[None]] = []

        async def watch(hung_up: Callable[[], Awaitable[None]]) -> None:
            await hung_up()
            self.tell(Cut.GONE)

        def start_watch(hung_up: Callable[[], Awaitable[None]]) -> None:
            hang_ups.append(loop.create_task(watch(hung_up), name="hang-up"))

        timers = [loop.call_later(timeout_s, self.tell, Cut.TIMEOUT)]
        if hung_up is not None:
            timers.append(loop.call_later(UNWATCHED_WAIT_S, start_watch, hung_up))
        try:
            return await self.future
        finally:
            for timer in timers:
                timer.cancel()
            for hang_up in hang_ups:
                hang_up.cancel()


class Waiters:
    """All waiters of one process.

    Attributes:
        gateway: this process's name, under which it registers for replies.
        count: how many wait now, for outcomes and for probes.
    """

    def __init__(
        self, redis: Redis, jobs: Jobs, requests: Requests, *, gateway: GatewayId, timing: keys.Timing
    ) -> None:
        self.gateway = gateway
        self._redis = redis
        self._jobs = jobs
        self._requests = requests
        self._timing = timing
        self._waiting: dict[JobId, list[Waiter]] = {}
        self._probes: dict[str, asyncio.Future[Mapping[str, str]]] = {}
        self.count = 0
        self._leaving = False
        # Jobs whose reply was too large to be inline: their records are to be read now.
        self._unread: set[JobId] = set()
        self._unread_due = asyncio.Event()
        self._renew_due = asyncio.Event()

    def add(self, job: JobId, user: UserId, *, online: bool) -> Waiter:
        """Register a caller; pass the waiter to `remove` in the end."""
        waiter = Waiter(job, user, online=online)
        self._waiting.setdefault(job, []).append(waiter)
        self.count += 1
        if self._leaving:
            waiter.tell(Cut.LEAVING)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Forget a caller."""
        others = self._waiting[waiter.job]
        others.remove(waiter)
        if not others:
            del self._waiting[waiter.job]
        self.count -= 1

    def expect_probe(self, nonce: str) -> asyncio.Future[Mapping[str, str]]:
        """The future answer to a probe, as its fields; pass the nonce to `forget_probe` in the end."""
        future: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self._probes[nonce] = future
        self.count += 1
        return future

    def forget_probe(self, nonce: str) -> None:
        """Stop expecting an answer."""
        del self._probes[nonce]
        self.count -= 1

    def leave(self) -> None:
        """Let everyone go, and whoever comes from now on."""
        self._leaving = True
        for waiter in self._all():
            waiter.tell(Cut.LEAVING)

    def renew(self) -> None:
        """Register everyone again, as soon as Redis answers: it was away, and may not be what it was."""
        self._renew_due.set()

    def take(self, notes: Iterable[Note]) -> None:
        """Tell whoever waits for these replies."""
        for note in notes:
            if nonce := note.get("probe"):
                if (future := self._probes.get(nonce)) and not future.done():
                    future.set_result(note)
                continue
            job = JobId(note.get("job", ""))
            if job not in self._waiting:
                continue
            if text := note.get("record"):
                self._tell(job, _ended_decoder.decode(text))
            else:
                self._unread.add(job)
                self._unread_due.set()

    async def run(self) -> None:
        """Serve the waiters until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_unread(), name="waiters-unread")
            group.create_task(self._run_rereads(), name="waiters-rereads")
            group.create_task(self._run_presence(), name="waiters-presence")

    async def _run_unread(self) -> None:
        """Read the records that replies named."""
        while True:
            await self._unread_due.wait()
            self._unread_due.clear()
            unread, self._unread = self._unread, set()
            await self._reread(list(unread))

    async def _run_rereads(self) -> None:
        """Read the records of all waiters every few seconds, and after a loss: the net under lost replies."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REREAD_EVERY_S):
                    await self._renew_due.wait()
                    await self._register_all()
            await self._reread(list(self._waiting))

    async def _register_all(self) -> None:
        while self._renew_due.is_set():
            self._renew_due.clear()
            try:
                await self._jobs.register_waiter(list(self._waiting), self.gateway)
            except BaseException as error:
                self._renew_due.set()
                if not isinstance(error, StoreUnavailable):
                    raise
                logger.warning("waiters_unregistered", waiters=self.count, error=str(error))
                await asyncio.sleep(RENEW_EVERY_S)

    async def _run_presence(self) -> None:
        """Once per heartbeat look whether the waiters' machines are there."""
        while True:
            await asyncio.sleep(self._timing.heartbeat_s)
            try:
                await self._tell_lapses()
            except StoreUnavailable as error:
                logger.warning("waiters_presence_unread", waiters=self.count, error=str(error))

    async def _reread(self, jobs: list[JobId]) -> None:
        for start in range(0, len(jobs), REREAD_RECORDS_MAX):
            try:
                records = await self._requests.read(jobs[start : start + REREAD_RECORDS_MAX])
            except StoreUnavailable as error:
                # Nobody is told anything wrong; the next pass reads them.
                logger.warning("waiters_records_unread", jobs=len(jobs), error=str(error))
                return
            for job, record in records.items():
                if record.terminal:
                    self._tell(job, record)

    async def _tell_lapses(self) -> None:
        by_user: dict[UserId, list[Waiter]] = {}
        for waiter in self._all():
            by_user.setdefault(waiter.user, []).append(waiter)
        # One pipeline: the looks of one moment share it.
        looks = await asyncio.gather(*(self._look(user) for user in by_user))
        for waiters, seen in zip(by_user.values(), looks, strict=True):
            if seen is None:
                continue
            state = state_of(seen, self._redis.answering_for_s(), self._timing)
            for waiter in waiters:
                if state == "offline" and waiter.online:
                    waiter.tell(Cut.OFFLINE)
                waiter.online = waiter.online or state in ("online", "reconnecting")

    async def _look(self, user: UserId) -> Seen | None:
        """None: this user's keys are broken. That is told to nobody, and must not end the process of all others."""
        try:
            return await self._jobs.ask(user, "")
        except StoreUnavailable:
            raise
        except Exception:
            logger.exception("presence_unreadable", user=user)
            return None

    def _tell(self, job: JobId, told: Told) -> None:
        for waiter in self._waiting.get(job, ()):
            waiter.tell(told)

    def _all(self) -> list[Waiter]:
        return [waiter for waiters in self._waiting.values() for waiter in waiters]
