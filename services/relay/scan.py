"""The scan: what should be followed (Postgres) against what is (Redis); takes what is missing, sheds what is too much.

Promises: a run that is new, free or given back is looked at as soon as somebody tells, and within LOOK_EVERY_S if
          nobody does; what every relay sees decides who takes it (`ownership`), and the lease who has it; a run whose
          headers cannot be read is passed over, until it is to be stopped or its time is up: then it is ended.
Used by:  relay.app: three loops.

    open runs:  PUT, DELETE and gifts come by NOTIFY; READ_EVERY_S is the net
    owners:     one MGET a look, for the open runs of others: a lease that lapsed shows there
    taking:     record -> epoch (Postgres) -> lease, mark, points (one script) -> first seq into the record -> follow
"""

import asyncio
import contextlib
import time

import structlog

from common.errors import StoreUnavailable
from common.ids import RunId
from common.process.backoff import Backoff
from common.process.secrets import SecretsUnreadable
from common.store.leases import Leases, Look, Refused, Taken, look
from common.store.redis import Redis
from common.store.runs import Run
from relay.holdings import Holdings
from relay.owner import Means, is_over
from relay.ownership import plan_shares

logger = structlog.get_logger(__name__)

# How often leases of others are looked at: with a lease's time to live it bounds how long a dead relay's runs wait.
LOOK_EVERY_S = 0.25
# How often the open runs are read whole: NOTIFY tells of changes, this is for what it lost.
READ_EVERY_S = 10.0
# Taken in one look: a relay that comes to thousands of runs shares round trips, and beats in between.
TAKES_MAX = 200
# A run whose headers cannot be read is tried, and warned of, this often; its record is read with the open runs, in case
# there are newer ones. Tried in every look, a few hundred such runs would leave no place in it for others.
UNREADABLE_EVERY_S = 60.0
# Relays that start together see each other before they take anything.
START_AFTER_S = 0.5


class Scan:
    """See the module."""

    def __init__(self, redis: Redis, leases: Leases, holdings: Holdings, means: Means) -> None:
        self._redis = redis
        self._leases = leases
        self._holdings = holdings
        self._means = means
        self._runs = means.runs
        self._open: set[RunId] = set()
        self._told: set[RunId] = set()
        self._is_stale = True  # the open runs must be read whole
        self._read_due = asyncio.Event()
        self._free_since: dict[RunId, float] = {}
        self._unreadable_until: dict[RunId, float] = {}  # runs to pass over, unless their records change

    # ---- what should be followed

    async def run_listener(self) -> None:
        """Hear of runs that were put, deleted or given back, until cancelled."""
        await self._runs.run_listener(self._heard)

    def _heard(self, run: RunId | None) -> None:
        if run is None:
            self._is_stale = True
        else:
            self._told.add(run)
        self._read_due.set()

    async def run_reads(self) -> None:
        """Keep the set of open runs true, until cancelled."""
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        read_at = time.monotonic()
        while True:
            try:
                if self._is_stale or time.monotonic() - read_at >= READ_EVERY_S:
                    self._is_stale = False
                    read_at = time.monotonic()
                    await self._read_all()
                if self._told:
                    await self._read_told()
            except StoreUnavailable as error:
                logger.warning("runs_read_failed", error=str(error))
                self._is_stale = True
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            self._holdings.changed.set()
            await _wait(self._read_due, READ_EVERY_S)

    async def _read_all(self) -> None:
        found = await self._runs.open_runs()
        self._open = {each.run for each in found}
        self._unreadable_until = {run: due for run, due in self._unreadable_until.items() if run in self._open}
        # A stop whose notice was lost; headers that can be read.
        self._told |= {each.run for each in found if each.state == "stopping"} & set(self._holdings.held)
        self._told |= self._unreadable_until.keys()

    async def _read_told(self) -> None:
        told, self._told = self._told, set()
        try:
            records = await self._runs.read_many(list(told))
        except StoreUnavailable:
            self._told |= told
            raise
        for run in told:
            record = records.get(run)
            if record is None or record.terminal:
                self._open.discard(run)
            else:
                self._open.add(run)
                self._holdings.renew(record)
                if run in self._unreadable_until and not self._why_unreadable(record):
                    del self._unreadable_until[run]

    # ---- what is

    async def run_looks(self) -> None:
        """Take and shed, until cancelled."""
        await asyncio.sleep(START_AFTER_S)
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        while True:
            try:
                await self._look_once()
                backoff.reset()
            except StoreUnavailable as error:
                logger.warning("look_failed", error=str(error))
                await asyncio.sleep(backoff.next_s())
            await _wait(self._holdings.changed, LOOK_EVERY_S)

    async def _look_once(self) -> None:
        held = set(self._holdings.held)
        owners = await self._leases.owners([run for run in self._open if run not in held])
        # Leases of our own without anybody who follows: a take of unknown outcome, or a run that fell behind.
        again = [run for run, owner in owners.items() if owner == self._holdings.relay]
        for run in again:
            del owners[run]
        now = time.monotonic()
        free = [run for run, owner in owners.items() if owner is None]
        self._free_since = {run: self._free_since.get(run, now) for run in free}
        if free:
            await self._holdings.refresh_members()  # who has just left must not be waited for
        plan = plan_shares(
            self._holdings.relay,
            self._holdings.members,
            held=held.union(again),
            owners=owners,
            free_for_s={run: now - since for run, since in self._free_since.items()},
            members_same_for_s=now - self._holdings.members_since,
        )
        self._holdings.shed([run for run in plan.shed if run in self._holdings.held])
        if wanted := [run for run in (*again, *plan.take) if now >= self._unreadable_until.get(run, 0.0)]:
            await self._take(wanted[:TAKES_MAX])

    async def _take(self, wanted: list[RunId]) -> None:
        """Take runs and follow them. What cannot be taken stays free, for the next look of ours or another's."""
        try:
            records = await self._runs.read_many(wanted)
            takeable = [run for run, record in records.items() if self._is_takeable(record)]
            epochs = await self._runs.mint_epochs(takeable)
        except StoreUnavailable:
            self._holdings.is_able = False
            raise
        self._holdings.is_able = True
        self._open -= {run for run in wanted if run not in records or records[run].terminal}
        seen = await look(self._redis, list(epochs))
        async with asyncio.TaskGroup() as group:
            for run, epoch in epochs.items():
                group.create_task(self._take_one(records[run], epoch, seen[run]), name=f"take:{run}")

    async def _take_one(self, record: Run, epoch: int, seen: Look) -> None:
        try:
            answer = await self._leases.take(record.run, epoch, {s.source: s.point for s in record.sources})
            if isinstance(answer, Refused):
                logger.info("take_refused", run=record.run, owner=answer.owner)
                return
            await self._keep_first_seq(record, answer)
            self._holdings.begin(record, answer, seen)
        except StoreUnavailable as error:
            logger.warning("take_failed", run=record.run, error=str(error))
        except Exception:  # one run that cannot be taken must not keep this relay from the others
            logger.exception("take_failed", run=record.run)

    async def _keep_first_seq(self, record: Run, taken: Taken) -> None:
        """Write where the run's events begin, before the first of them is appended."""
        if record.first_seq is None:
            await self._runs.set_first_seq(record.run, taken.first_seq)

    def _is_takeable(self, record: Run) -> bool:
        """Whether there is something to do that can be done; if not, the run is passed over for a while."""
        why = self._why_unreadable(record)
        if why:
            logger.warning("headers_unreadable", run=record.run, reason=why)
            left_s = record.max_duration_s - record.age_ms / 1000
            self._unreadable_until[record.run] = time.monotonic() + min(UNREADABLE_EVERY_S, left_s)
        return not why and not record.terminal

    def _why_unreadable(self, record: Run) -> str:
        """Why the sources of a run cannot be asked; empty if they can, or are not going to be."""
        if record.terminal or is_over(record):
            return ""
        try:
            for source in record.sources:
                if source.state is None:
                    self._means.read_headers(source)
        except SecretsUnreadable as error:
            return str(error)
        return ""


async def _wait(due: asyncio.Event, at_most_s: float) -> None:
    """Wait until something is due, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await due.wait()
    due.clear()
