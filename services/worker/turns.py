"""Turns: which of them this worker runs. One loop claims, one keeps what is claimed, one hears of work.

Promises: what is posted is claimed as soon as there is a free slot; whoever hears of nothing looks every two seconds. A
          worker that dies loses its claims within `turn_times.CLAIM_S`; one that leaves gives them back, and they go on
          elsewhere at once. A turn whose claim is lost, or that is cancelled, is interrupted here within a heartbeat.
"""

import asyncio
import time

import structlog

from common import turn_times
from common.errors import StoreUnavailable
from common.ids import TurnId, WorkerId
from common.process.backoff import Backoff
from common.store.claims import Claims
from common.store.turns import Claim
from worker.handling import Drop, Handling, Held

logger = structlog.get_logger(__name__)


class TurnLoop:
    """See the module. `slots`: how many turns run at once."""

    def __init__(self, worker: WorkerId, claims: Claims, handling: Handling, *, slots: int) -> None:
        self._worker = worker
        self._claims = claims
        self._handling = handling
        self._slots = slots
        self._held: dict[str, Held] = {}  # by run
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_owed = True  # there may be turns to claim
        self._wake = asyncio.Event()
        self._is_leaving = False
        self._claims_no_more = asyncio.Event()

    async def run(self) -> None:
        """Run turns until cancelled; `drain` first, or what runs is cut off and lapses."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claims.run_listener(self._heard), name="turns-listener")
                group.create_task(self._run_claims(), name="turns-claims")
                group.create_task(self._run_keeps(), name="turns-keeps")
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def drain(self) -> None:
        """Claim nothing more, and give back what runs."""
        self._is_leaving = True
        self._wake.set()
        for held in self._held.values():
            held.drop(Drop.LEAVING)
        await self._claims_no_more.wait()  # what a call that is under way brings is given back, too
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _heard(self, turn: TurnId | None) -> None:
        if turn is None:
            self._owe()
            return
        for held in self._held.values():
            if held.claim.turn == turn:
                held.cancel()

    def _owe(self) -> None:
        self._is_owed = True
        self._wake.set()

    # ---- claiming

    async def _run_claims(self) -> None:
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        while not self._is_leaving:
            try:
                await self._claim_owed()
            except StoreUnavailable as error:
                logger.warning("turns_unclaimed", error=str(error))
                self._is_owed = True
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            try:
                async with asyncio.timeout(turn_times.NET_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                self._is_owed = True
            self._wake.clear()
        self._claims_no_more.set()

    async def _claim_owed(self) -> None:
        """Claim until there is nothing more, or no free slot. Raises: StoreUnavailable."""
        while self._is_owed and not self._is_leaving and (places := self._slots - len(self._held)) > 0:
            self._is_owed = False  # what is heard meanwhile is a new debt
            claimed = await self._claims.claim(self._worker, places, [h.claim for h in self._held.values()])
            self._is_owed = self._is_owed or len(claimed) >= places
            for claim in claimed:
                self._start(claim)

    def _start(self, claim: Claim) -> None:
        held = self._held[claim.run] = Held(claim)
        if self._is_leaving:
            held.drop(Drop.LEAVING)
        task = asyncio.get_running_loop().create_task(self._run_turn(held), name=f"turn:{claim.turn}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_turn(self, held: Held) -> None:
        try:
            retry_after_s = await self._handling.run(held)
            if retry_after_s is not None:
                # Nobody is told when a pause is over; without this it would end at the next look.
                asyncio.get_running_loop().call_later(retry_after_s, self._owe)
        finally:
            del self._held[held.claim.run]
            if self._is_owed:
                self._wake.set()

    # ---- keeping

    async def _run_keeps(self) -> None:
        """Each heartbeat: keep all claims in one statement, and heed what it says."""
        while True:
            began = time.monotonic()
            if kept := list(self._held.values()):
                try:
                    await self._keep(kept)
                except StoreUnavailable as error:
                    # They may lapse: whoever takes them is fenced off from what is written here, and this from that.
                    logger.warning("claims_not_kept", turns=len(kept), error=str(error))
            await asyncio.sleep(max(0.0, began + turn_times.HEARTBEAT_S - time.monotonic()))

    async def _keep(self, kept: list[Held]) -> None:
        answers = await self._claims.keep([held.claim for held in kept])
        for held in kept:
            if held.claim.run not in answers:
                held.drop(Drop.LOST)
            elif answers[held.claim.run]:
                held.cancel()
