"""The runs that this relay owns: followed, their leases refreshed, their fates acted on, given back.

Promises: all leases are refreshed in one round trip a second, and each verdict is acted on; a run that is given back is
          released after its last append, and told, so that another relay goes on at once; a store that is away ends
          nothing.
Used by:  relay.scan (begin, shed), relay.app (loops, drain).
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from common.errors import StoreUnavailable
from common.ids import RelayId, RunId
from common.process.secrets import SecretsUnreadable
from common.store import keys
from common.store.batch import Batcher
from common.store.leases import Leases, Look, Taken, Verdict
from common.store.runs import Run, SavedPoint
from relay.owner import Fate, Means, Owner

logger = structlog.get_logger(__name__)

# Postgres's copy of the resume points is used when Redis is lost: what came since may then repeat, after a gap.
POINTS_EVERY_S = 5.0
PRUNE_EVERY_S = 600.0


@dataclass(slots=True)
class _Holding:
    owner: Owner
    task: asyncio.Task[None]


class _Release(NamedTuple):
    """A lease to give back. `is_open`: somebody else should follow the run now."""

    run: RunId
    epoch: int
    is_open: bool


class Holdings:
    """See the module.

    Attributes:
        members: the relays alive, as Redis said last; `members_since`: for how long they have been the same ones
            (monotonic seconds of the last change).
        is_able: whether this relay can take runs: while not, it is not listed, so that none waits for it.
    """

    def __init__(self, relay: RelayId, leases: Leases, means: Means, *, retention_s: float) -> None:
        self.relay = relay
        self.members: frozenset[RelayId] = frozenset()
        self.members_since = time.monotonic()
        self.is_able = True
        self.changed = asyncio.Event()  # a run was given up or lost: there may be something to take
        self._leases = leases
        self._means = means
        self._retention_s = retention_s
        self._held: dict[RunId, _Holding] = {}
        self._releasing: set[RunId] = set()
        self._behind: set[RunId] = set()
        # One at a time: a refresh that overtook a release would put the lease back.
        self._leasing = asyncio.Lock()
        self._releases: Batcher[_Release, None] = Batcher(self._release_many)
        self._draining = False

    @property
    def held(self) -> Collection[RunId]:
        """The runs that this relay follows, and those whose leases it is giving back."""
        return self._held.keys() | self._releasing

    # ---- one run

    def begin(self, record: Run, taken: Taken, seen: Look) -> None:
        """Follow a run that was just taken, in a task of this object's."""
        owner = Owner(record, taken, seen, self._means)
        reason = "behind" if record.run in self._behind else "moved" if record.first_seq is not None else "first"
        self._behind.discard(record.run)
        self._means.metrics.takeovers_total[reason].inc()
        logger.info("run_taken", run=record.run, epoch=taken.epoch, tail=str(taken.tail), reason=reason)
        task = asyncio.create_task(self._follow(owner), name=f"run:{record.run}")
        self._held[record.run] = _Holding(owner, task)
        self._means.metrics.runs_owned.set(len(self._held))
        if self._draining:
            owner.leave()

    def renew(self, record: Run) -> None:
        """Its record may have changed: a stop, newer headers. Does nothing if the run is not held."""
        if holding := self._held.get(record.run):
            try:
                holding.owner.renew(record)
            except SecretsUnreadable as error:
                logger.warning("headers_unreadable", run=record.run, error=str(error))

    def shed(self, runs: Sequence[RunId]) -> None:
        """Give runs away, each after its last append."""
        for run in runs:
            holding = self._held.get(run)
            if holding is not None and not holding.owner.is_leaving:
                logger.info("run_shed", run=run)
                holding.owner.leave()

    async def _follow(self, owner: Owner) -> None:
        fate: Fate | None = None
        try:
            fate = await owner.follow()
        except Exception:  # one run must not take the others down; whoever takes it next tries again
            logger.exception("run_failed", run=owner.run)
        finally:
            # Not after a cancellation by `_dismiss`: another run of this name may be here already.
            if (holding := self._held.get(owner.run)) and holding.owner is owner:
                del self._held[owner.run]
                self._means.metrics.runs_owned.set(len(self._held))
        match fate:
            case "lost":
                self._means.metrics.fenced_total.inc()
                logger.info("run_lost", run=owner.run)
            case "behind":
                self._note_behind(owner.run)
            case _:
                logger.info("run_released", run=owner.run, fate=fate)
                self._releasing.add(owner.run)
                try:
                    await self._releases.submit(_Release(owner.run, owner.epoch, is_open=fate != "ended"))
                finally:
                    self._releasing.discard(owner.run)
        self.changed.set()

    def _note_behind(self, run: RunId) -> None:
        # The lease stays ours: the next look finds it without a holder, and takes the run again.
        self._behind.add(run)
        logger.warning("run_behind", run=run)

    async def _release_many(self, releases: Sequence[_Release]) -> list[None]:
        try:
            async with self._leasing:
                await self._leases.release([(each.run, each.epoch) for each in releases])
            await self._means.runs.tell([each.run for each in releases if each.is_open])
        except StoreUnavailable as error:
            # The leases lapse, or the next look of the others finds them free.
            logger.warning("release_failed", runs=len(releases), error=str(error))
        except Exception:  # a refusal or a mistake of ours: the leases lapse as well
            logger.exception("release_failed", runs=len(releases))
        return [None] * len(releases)

    # ---- all runs

    async def run_beats(self) -> None:
        """Each second: say that this relay lives, refresh all leases, act on the verdicts; until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self._beat(began)
            except StoreUnavailable as error:
                logger.warning("refresh_failed", runs=len(self._held), error=str(error))
            await asyncio.sleep(max(0.0, began + keys.LEASE_REFRESH_EVERY_S - time.monotonic()))

    async def _beat(self, now: float) -> None:
        async with self._leasing:
            owners = [holding.owner for holding in self._held.values()]
            beats = [owner.beat(now) for owner in owners]
            self._means.metrics.gathered_events.set(self._means.budget.events)
            self._means.metrics.runs_stalled.set(sum(owner.is_stalled for owner in owners))
            # First, so that a relay that dies is off the list before its leases lapse, and nobody waits for it.
            await self.refresh_members()
            verdicts = await self._leases.refresh(beats)
        for owner, verdict in zip(owners, verdicts, strict=True):
            await self._act(owner, verdict)

    async def refresh_members(self) -> None:
        """List this relay, if others may count on it, and see who else is there. Raises: StoreUnavailable."""
        if self._draining or not self.is_able:
            return
        members = frozenset(await self._leases.join())
        if members != self.members:
            logger.info("members_changed", members=sorted(members))
            self.members, self.members_since = members, time.monotonic()

    async def _act(self, owner: Owner, verdict: Verdict) -> None:
        holding = self._held.get(owner.run)
        if verdict in ("kept", "unknown") or holding is None or holding.owner is not owner:
            return
        if owner.has_ended:
            return  # Redis may have lost the end that readers were told; Postgres hears of that one, and of no other
        del self._held[owner.run]
        holding.task.cancel()
        await asyncio.wait([holding.task])
        self._means.metrics.runs_owned.set(len(self._held))
        if verdict == "lost":
            self._means.metrics.fenced_total.inc()
            logger.info("run_lost", run=owner.run)
        else:
            self._note_behind(owner.run)
        self.changed.set()

    async def run_upkeep(self) -> None:
        """Now and then: save resume points, forget runs that ended long ago; until cancelled."""
        pruned_at = time.monotonic()
        while True:
            await asyncio.sleep(POINTS_EVERY_S)
            try:
                await self._save_points()
                if time.monotonic() - pruned_at >= PRUNE_EVERY_S:
                    pruned_at = time.monotonic()
                    while await self._means.runs.prune(retention_s=self._retention_s):
                        pass
            except StoreUnavailable as error:
                logger.warning("upkeep_failed", error=str(error))

    async def _save_points(self) -> None:
        unsaved: list[tuple[Owner, list[SavedPoint]]] = [
            (holding.owner, points) for holding in self._held.values() if (points := holding.owner.unsaved_points())
        ]
        await self._means.runs.save_points([point for _, points in unsaved for point in points])
        for owner, points in unsaved:
            owner.points_saved(points)

    async def drain(self) -> None:
        """Leave: no relay waits for this one any more, every run is given back after its last batch."""
        self._draining = True
        try:
            await self._leases.leave()
        except StoreUnavailable as error:
            logger.warning("leave_failed", error=str(error))
        tasks = [holding.task for holding in self._held.values()]
        for holding in self._held.values():
            holding.owner.leave()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Cut what is still followed; its leases lapse."""
        tasks = [holding.task for holding in self._held.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
