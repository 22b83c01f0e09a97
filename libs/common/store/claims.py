"""Claims: who runs a turn now, on Absurd's queue `turns`.

Owns:     the queue (tasks, attempts, checkpoints), through Absurd's SQL functions; the channel `towline_turns`.
Promises: a turn that is not kept can be taken by another worker after `turn_times.CLAIM_S`; nothing is written by an
          attempt that lost its claim (rule 30). Every call is safe to repeat.
Used by:  the worker.

An attempt: claim -> begin -> (checkpoint)* -> `Turns.end` -> publish what the record says -> complete; or fail (another
attempt after a pause), or release (another worker, at once).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from common import turn_times
from common.ids import TurnId, WorkerId
from common.store.listener import run_listener
from common.store.postgres import Postgres
from common.store.turns import Claim, ClaimLost, Turn, turn_of
from towline.wire import json

CHANNEL = "towline_turns"
_CANCEL = "cancel:"


class Begun(NamedTuple):
    """An attempt begins.

    Attributes:
        verdict: `begun`; `ended`: publish what the record says and complete; `lost`: drop the claim; `gone`: there is
            no such turn any more, complete it.
        turn: its record; None with `gone`.
        text: of the entry that it answers.
        is_first: nobody has begun this turn before; also when the call is repeated.
        elapsed_s: since its first start; what is left of the cap is `turn.cap_s` less this.
    """

    verdict: Literal["begun", "ended", "lost", "gone"]
    turn: Turn | None
    text: str
    is_first: bool
    elapsed_s: float


class Claims:
    """The queue."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def claim(self, worker: WorkerId, places: int, held: Sequence[Claim]) -> list[Claim]:
        """Take up to `places` turns, at least 1; what a lapsed claim held comes at once, as its next attempt.

        Args:
            worker: a name that no other process has, nor the next one of this host.
            held: all claims of this worker; any other of its claims comes back, for its hand-over was lost.

        Raises:
            StoreUnavailable: some may be claimed; the next call brings them.
        """
        params = {"worker": worker, "claim_s": turn_times.CLAIM_S, "places": places, "held": [c.run for c in held]}
        return [
            Claim(TurnId(str(row.turn)), str(row.task), str(row.run), row.attempt)
            for row in await self._postgres.fetch("claim_turns", params)
        ]

    async def begin(self, claim: Claim) -> Begun:
        """Begin an attempt, which counts from now on. Raises: StoreUnavailable (repeat it)."""
        params = {"turn": claim.turn, "run": claim.run, "attempt": claim.attempt}
        (row,) = await self._postgres.fetch("begin_turn", params)
        turn = None if row.turn is None else turn_of(row)
        return Begun(row.verdict, turn, row.entry_text or "", bool(row.is_first), (row.elapsed_ms or 0) / 1000)

    async def keep(self, claims: Sequence[Claim]) -> dict[str, bool]:
        """Keep claims, all in one statement; returns, by `run`, whether the turn is to be cancelled.

        Those that are left out are lost: stop their work.

        Raises: StoreUnavailable (they may lapse; go on and repeat it).
        """
        if not claims:
            return {}
        params = {"runs": [c.run for c in claims], "claim_s": turn_times.CLAIM_S}
        return {str(row.run): row.cancel_requested for row in await self._postgres.fetch("keep_turns", params)}

    async def checkpoint(self, claim: Claim, step: str, state: str) -> None:
        """Make a step's result durable; nothing acts on it before this has returned (rule 30).

        Args:
            step: its name within the turn.
            state: JSON text without U+0000 and lone surrogates (`wire.json.mend`).

        Raises:
            ClaimLost: nothing was written.
            StoreUnavailable: it may be written; repeat it.
        """
        params = {"task": claim.task, "run": claim.run, "step": step, "state": state, "claim_s": turn_times.CLAIM_S}
        (row,) = await self._postgres.fetch("checkpoint", params)
        _owned(row.done, claim)

    async def checkpoints(self, claim: Claim) -> dict[str, Any]:
        """Results of the steps that are done, by name, as plain values. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("checkpoints", {"task": claim.task, "run": claim.run})
        return {row.checkpoint_name: row.state for row in rows}

    async def complete(self, claim: Claim) -> None:
        """Complete the task of a turn whose terminal is published.

        Raises:
            ClaimLost: it is another's to complete.
            StoreUnavailable: repeat it, or let the claim lapse.
        """
        (row,) = await self._postgres.fetch("complete_turn", {"turn": claim.turn, "run": claim.run})
        _owned(row.done, claim)

    async def fail(self, claim: Claim, message: str, *, retry_after_s: float) -> None:
        """Give up this attempt: another one begins after a pause.

        After the last one (`turn_times.ATTEMPTS_MAX`) end the turn instead; where that is not done, the net does it.

        Raises: ClaimLost, StoreUnavailable (repeat it, or let the claim lapse).
        """
        reason = json.dumps({"message": json.mend_text(message)}).decode()
        params = {"run": claim.run, "reason": reason, "after_s": retry_after_s}
        (row,) = await self._postgres.fetch("fail_turn", params)
        _owned(row.done, claim)

    async def release(self, claim: Claim) -> None:
        """Give a turn back, to be gone on with by another worker at once, under the same attempt.

        Raises: ClaimLost, StoreUnavailable (repeat it, or let the claim lapse).
        """
        (row,) = await self._postgres.fetch("release_turn", {"run": claim.run})
        _owned(row.done, claim)

    async def run_listener(self, heard: Callable[[TurnId | None], None]) -> None:
        """Hear of work and of cancellations, until cancelled.

        Args:
            heard: called with None when there may be turns to claim, listening has begun (again) included; with a turn
                when it is to be cancelled, whoever runs it. `keep` says that too, should this be missed.
        """

        def note(payload: str | None) -> None:
            is_cancel = payload is not None and payload.startswith(_CANCEL)
            heard(TurnId(payload.removeprefix(_CANCEL)) if is_cancel and payload else None)

        await run_listener(self._postgres.url, CHANNEL, note)

    async def prune_tasks(self, *, retention_s: int, limit: int = 1000) -> int:
        """Forget tasks that ended longer ago than this, with their checkpoints; returns how many.

        Raises: StoreUnavailable.
        """
        (row,) = await self._postgres.fetch("prune_tasks", {"retention_s": retention_s, "limit": limit})
        pruned: int = row.pruned
        return pruned


def _owned(is_owned: bool, claim: Claim) -> None:
    if not is_owned:
        raise ClaimLost(claim)
