"""Turns: durable units of answering. Their records, and the only place where they end.

Owns:     the table `turns`.
Promises: one terminal per turn, never replaced, with its reply and its usage in one transaction (rules 1, 31), and not
          by an attempt that lost its claim; when a turn ends, the thread's next one can be taken, once. Every call is
          safe to repeat.
Used by:  the gateway (read, cancel; `threads` posts), the worker (end, and the net; `claims` has the rest).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import structlog

from common import turn_times
from common.errors import NotOwner, StoreUnavailable
from common.ids import AgentId, EntryId, ThreadId, TurnId, UserId, new_id
from common.store.postgres import Postgres
from common.store.usage import Used
from towline.wire import json
from towline.wire.threads import TurnState

logger = structlog.get_logger(__name__)

# How Absurd treats the task of a turn. Its strategy is for lapsed claims; `Claims.fail` says when else to try again.
TASK_OPTIONS = json.dumps(
    {
        "max_attempts": turn_times.ATTEMPTS_MAX,
        "retry_strategy": {"kind": "none"},
        "limit_margin_s": turn_times.LIMIT_MARGIN_S,
    }
).decode()


class Turn(msgspec.Struct, frozen=True):
    """A turn's record. Times `_ms` are milliseconds of Postgres's clock.

    Attributes:
        number: position of the entry that it answers; a thread's turns run in this order.
        key: None once its retention has passed.
        cap_s: how long it may take from its first start.
        attempts: how often it was begun.
        replays: how often its key was submitted again.
        reply, reply_text: the agent's entry, when `completed`.
        error_code, error_message: why not, when `failed` or `cancelled`.
        agent, user, model: its thread's.
        ended_here: the very call that has returned this ended the turn: the one to count it.
    """

    turn: TurnId
    thread: ThreadId
    number: int
    entry: EntryId
    key: str | None
    fingerprint: bytes
    traceparent: str
    cap_s: float
    state: TurnState
    attempts: int
    replays: int
    cancel_requested: bool
    reply: EntryId | None
    reply_text: str | None
    error_code: str | None
    error_message: str | None
    agent: AgentId
    user: UserId | None
    model: str | None
    created_ms: int
    started_ms: int | None
    ended_ms: int | None
    ended_here: bool = False

    @property
    def terminal(self) -> bool:
        """Whether the turn has ended."""
        return self.ended_ms is not None


class Claim(NamedTuple):
    """A turn that this worker may run, until `turn_times.CLAIM_S` after the last claim, keep or checkpoint (`claims`).

    Attributes:
        task, run: Absurd's; a run is one attempt there.
        attempt: from 1; a run that was given back (`release`) goes on under the same number.
    """

    turn: TurnId
    task: str
    run: str
    attempt: int


class ClaimLost(NotOwner):
    """Another attempt runs the turn, or it was cancelled: nothing was written. Stop quietly."""

    def __init__(self, claim: Claim) -> None:
        super().__init__(f"attempt {claim.attempt} of turn {claim.turn} is not this worker's any more")


class End(NamedTuple):
    """How a turn ends; made by `completed`, `failed`, `cancelled`."""

    state: Literal["completed", "failed", "cancelled"]
    text: str | None
    code: str | None
    message: str | None


def completed(text: str) -> End:
    """It was answered."""
    return End("completed", text, None, None)


def failed(code: str, message: str) -> End:
    """It was not; `message` says why, for people."""
    return End("failed", None, code, message)


def cancelled() -> End:
    """Someone asked for that."""
    return End("cancelled", None, "cancelled", "the turn was cancelled")


class Stranded(NamedTuple):
    """A turn without a terminal whose task will not bring one (rule 32), or not before its next attempt."""

    turn: TurnId
    task_state: Literal["completed", "failed", "cancelled", "missing", "pending", "sleeping"]
    cancel_requested: bool


def plan_end(stranded: Stranded) -> End:
    """How a stranded turn ends (PURE)."""
    if stranded.cancel_requested:
        return cancelled()
    if stranded.task_state == "failed":
        return failed("attempts-exhausted", f"the turn was begun {turn_times.ATTEMPTS_MAX} times without an end")
    if stranded.task_state == "cancelled":
        return failed("turn-timeout", "the turn took longer than it may")
    return failed("task-lost", "the turn's task ended without an answer")


class Turns:
    """The table."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def read(self, turn: TurnId) -> Turn | None:
        """A turn's record. `turn` is a UUID (`ids.is_uuid`). Raises: StoreUnavailable."""
        return (await self.read_many([turn])).get(turn)

    async def read_many(self, turns: Sequence[TurnId]) -> dict[TurnId, Turn]:
        """The records of some turns; unknown ones are left out. Raises: StoreUnavailable."""
        if not turns:
            return {}
        rows = await self._postgres.fetch("read_turns", {"turns": list(turns)})
        return {turn.turn: turn for turn in map(turn_of, rows)}

    async def cancel(self, turn: TurnId) -> Turn | None:
        """Cancel a turn; returns its record, None when there is none.

        When nobody runs it, it has ended: publish that, then say so (`mark_announced`). Else its worker was told, and
        ends it within moments. One that has ended stays as it is.

        Raises: StoreUnavailable (repeat it).
        """
        end = cancelled()
        params = {"turn": turn, "call": new_id(), "code": end.code, "message": end.message, "task": TASK_OPTIONS}
        rows = await self._postgres.fetch("cancel_turn", params)
        return turn_of(rows[0], ended_here=rows[0].is_own) if rows else None

    async def mark_announced(self, turns: Sequence[TurnId]) -> None:
        """Note that the ends of these turns are in their threads' logs. Raises: StoreUnavailable (the net repeats)."""
        if turns:
            await self._postgres.fetch("mark_announced", {"turns": list(turns)})

    async def end(self, claim: Claim, end: End, used: Sequence[Used]) -> Turn:
        """End a turn; returns its record, which may say otherwise: publish that, then `Claims.complete`.

        What Postgres cannot hold of the text is mended: no end fails because of what a model said. A repeated call has
        `ended_here` as well.

        Raises:
            ClaimLost: the turn is open, and another attempt's. Nothing was written.
            StoreUnavailable: it may be written; repeat it.
        """
        turn = await self._end(claim.turn, claim.run, end, used)
        if turn is None or not turn.terminal:
            raise ClaimLost(claim)
        return turn

    # ---- the net

    async def end_stranded(self, *, limit: int = 100) -> list[Turn]:
        """End turns whose task will not do it (rule 32); returns their records, to be published and marked announced.

        Raises: StoreUnavailable (the next pass finds them).
        """
        rows = await self._postgres.fetch("stranded_turns", {"limit": limit})
        stranded = [Stranded(TurnId(str(row.turn)), row.task_state, row.cancel_requested) for row in rows]
        ended = []
        for one in stranded:
            try:
                turn = await self._end(one.turn, None, plan_end(one), ())
            except StoreUnavailable:
                raise
            except Exception:
                # One that cannot be ended must not keep the others from it, nor end the worker.
                logger.exception("stranded_turn_not_ended", turn=one.turn)
            else:
                ended += [turn] if turn is not None else []
        return ended

    async def unannounced(self, *, limit: int = 100) -> list[Turn]:
        """Turns whose end nobody has announced for a while, to be published and marked. Raises: StoreUnavailable."""
        params = {"after_s": turn_times.ANNOUNCE_AFTER_S, "until_s": turn_times.ANNOUNCE_UNTIL_S, "limit": limit}
        return [turn_of(row) for row in await self._postgres.fetch("unannounced_turns", params)]

    async def depths(self) -> dict[str, tuple[int, float]]:
        """Open turns by state: how many, and the age of the oldest in seconds. Raises: StoreUnavailable."""
        return {row.state: (row.depth, row.oldest_s) for row in await self._postgres.fetch("turn_depths")}

    async def _end(self, turn: TurnId, run: str | None, end: End, used: Sequence[Used]) -> Turn | None:
        params = {
            "turn": turn,
            "run": run,
            "state": end.state,
            "call": new_id(),
            "text": None if end.text is None else json.mend_text(end.text),
            "code": end.code,
            "message": None if end.message is None else json.mend_text(end.message),
            "usage": json.dumps([one._asdict() for one in used]).decode(),
            "task": TASK_OPTIONS,
        }
        rows = await self._postgres.fetch("end_turn", params)
        return turn_of(rows[0], ended_here=rows[0].is_own) if rows else None


def turn_of(row: Any, *, ended_here: bool = False) -> Turn:
    """A row of the view `turn_records`, as `threads` reads it too."""
    return Turn(
        turn=TurnId(str(row.turn)),
        thread=ThreadId(str(row.thread)),
        number=row.number,
        entry=EntryId(str(row.entry)),
        key=row.key,
        fingerprint=row.fingerprint,
        traceparent=row.traceparent,
        cap_s=row.cap_s,
        state=row.state,
        attempts=row.attempts,
        replays=row.replays,
        cancel_requested=row.cancel_requested,
        reply=None if row.reply is None else EntryId(str(row.reply)),
        reply_text=row.reply_text,
        error_code=row.error_code,
        error_message=row.error_message,
        agent=row.agent,
        user=row.user_id,
        model=row.model,
        created_ms=row.created_ms,
        started_ms=row.started_ms,
        ended_ms=row.ended_ms,
        ended_here=ended_here,
    )
