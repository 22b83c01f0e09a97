"""Turns over HTTP: read one, wait for it, cancel it.

Promises: a turn ends once, whoever cancels it and how often; nobody is told "not yet" without a last look into the
          record.
"""

from collections.abc import Callable

import structlog

from common.ids import TurnId, is_uuid
from common.store.turns import Turn, Turns
from gateway import problems
from gateway.announcements import Announcements
from gateway.auth import Auth
from gateway.http import Answer
from gateway.metrics import GatewayMetrics
from gateway.request import Header, Request
from gateway.submission import preferred_wait_s
from gateway.threads import view_of_turn
from gateway.turn_waiters import TurnWaiters
from towline.wire import json

logger = structlog.get_logger(__name__)


class TurnRoutes:
    """The handlers of everything about turns. `is_full`: whether no further caller of this process may wait."""

    def __init__(
        self,
        *,
        auth: Auth,
        turns: Turns,
        waiters: TurnWaiters,
        is_full: Callable[[], bool],
        announcements: Announcements,
        metrics: GatewayMetrics,
    ) -> None:
        self._auth = auth
        self._turns = turns
        self._waiters = waiters
        self._is_full = is_full
        self._announcements = announcements
        self._metrics = metrics

    async def read_turn(self, request: Request) -> Answer:
        """`GET /v1/turns/{turn}`."""
        wait_s = preferred_wait_s(request)
        turn = await self._reachable(request)
        if wait_s and self._is_full():
            wait_s = 0  # no place to wait is no reason to refuse what is recorded
        if wait_s:
            turn = await self._waiters.wait(turn, wait_s, request.disconnected)
        return _answer(turn, wait_s=wait_s)

    async def cancel_turn(self, request: Request) -> Answer:
        """`DELETE /v1/turns/{turn}`."""
        turn = await self._reachable(request)
        if not turn.terminal:
            turn = await self._turns.cancel(turn.turn) or turn
            logger.info("turn_cancel_requested", turn=turn.turn, state=turn.state)
            if turn.ended_here:
                self._metrics.turns_total["cancelled"].inc()
                self._announcements.turn_ended(turn)
        return _answer(turn)

    async def _reachable(self, request: Request) -> Turn:
        key = await self._auth.require(request, "threads")
        turn = request.params["turn"]
        record = await self._turns.read(TurnId(turn)) if is_uuid(turn) else None
        if record is None or not key.reaches(record.user):
            raise problems.not_found("turn")
        return record


def _answer(turn: Turn, *, wait_s: int | None = None) -> Answer:
    """200 once terminal, however it ended; else 202 and where to read on. `wait_s`: the wait that was applied."""
    headers: list[Header] = []
    if not turn.terminal:
        headers.append((b"location", f"/v1/turns/{turn.turn}".encode()))
    if wait_s is not None:
        headers.append((b"preference-applied", b"wait=%d" % wait_s))
    return Answer(200 if turn.terminal else 202, json.dumps(view_of_turn(turn)), tuple(headers))
