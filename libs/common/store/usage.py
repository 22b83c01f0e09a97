"""Usage: what turns have cost.

Owns:     the table `usage_events`.
Promises: one row per (turn, seam), written in the transaction that ends the turn; it outlives its thread.
Used by:  the store of turns (as a turn ends), the gateway (list), the worker (prune).
"""

from collections.abc import Sequence
from datetime import date
from typing import Any, NamedTuple

import msgspec

from common.ids import AgentId, ThreadId, TurnId, UserId
from common.store.postgres import Postgres


class Used(NamedTuple):
    """What one seam of a turn has used, all its attempts together.

    Attributes:
        seam: where it was used; `reply` is the agent's answering.
        model: which model answered; None where there is none.
        seconds: of the agent's work, waiting for tools included.
    """

    seam: str
    model: str | None
    input_tokens: int
    output_tokens: int
    model_calls: int
    tool_calls: int
    seconds: float


class UsageRow(msgspec.Struct, frozen=True):
    """A row; see `Used`. `at_ms`: milliseconds of Postgres's clock, when the turn ended."""

    turn: TurnId
    seam: str
    thread: ThreadId
    agent: AgentId
    user: UserId | None
    model: str | None
    input_tokens: int
    output_tokens: int
    model_calls: int
    tool_calls: int
    seconds: float
    at_ms: int


class Usage:
    """The table."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def list_page(
        self,
        *,
        users: Sequence[UserId] | None,
        thread: ThreadId | None,
        agent: AgentId | None,
        day: date | None,
        before: tuple[int, TurnId, str] | None,
        limit: int,
    ) -> list[UsageRow]:
        """Rows, newest first, before another one; those that fit all that is given.

        Args:
            users: of these users; None: of everyone and no one.
            day: of one day, UTC.
            before: `at_ms`, `turn` and `seam` of the last row of the page before.

        Raises: StoreUnavailable.
        """
        before_ms, before_turn, before_seam = before or (None, None, None)
        params = {
            "users": None if users is None else list(users),
            "thread": thread,
            "agent": agent,
            "day": day,
            "before_ms": before_ms,
            "before_turn": before_turn,
            "before_seam": before_seam,
            "limit": limit,
        }
        return [_row(row) for row in await self._postgres.fetch("list_usage", params)]

    async def prune(self, *, retention_s: float, limit: int = 1000) -> int:
        """Forget rows older than this; returns how many. Several callers at once take others.

        Raises: StoreUnavailable.
        """
        return len(await self._postgres.fetch("prune_usage", {"retention_s": retention_s, "limit": limit}))


def _row(row: Any) -> UsageRow:
    return UsageRow(
        turn=TurnId(str(row.turn)),
        seam=row.seam,
        thread=ThreadId(str(row.thread)),
        agent=row.agent,
        user=row.user_id,
        model=row.model,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        model_calls=row.model_calls,
        tool_calls=row.tool_calls,
        seconds=row.seconds,
        at_ms=row.at_ms,
    )
