"""Handling: what a worker does with a turn that it has claimed, from its begin to its visible end.

Promises: rules 30 and 31. What an agent says is in the record before it is announced, and what is announced is the
          record. Whatever the agent, the model or a tool does, the turn ends once, with words that say why, at the
          latest at its cap; or it is left, whole, to the next attempt.
Used by:  `turns` (runs one for each claim, and interrupts it).
"""

import asyncio
import contextlib
import enum
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import structlog

from common import turn_times
from common.errors import StoreUnavailable
from common.store.agents import Agents
from common.store.claims import Begun, Claims
from common.store.threadlog import ThreadLog
from common.store.threads import Threads
from common.store.tokens import Tokens
from common.store.turn_events import Said, ended
from common.store.turns import Claim, ClaimLost, End, Turn, Turns, cancelled, completed, failed
from towline.wire.threads import AgentKind
from worker.agents import AgentFailed, AgentUnavailable, Answering, Asked
from worker.insist import insist
from worker.metrics import WorkerMetrics
from worker.steps import ANSWER_CHARACTERS_MAX, Steps
from worker.talk import Talk
from worker.tool_calls import ToolCalls

logger = structlog.get_logger(__name__)

# What an agent is told of a thread: the newest exchanges, and no more than any model reads; all turns of a worker hold
# theirs at the same time.
EXCHANGES_MAX = 200
EXCHANGES_BYTES_MAX = 4 * 1024 * 1024
# Giving a claim back must not hold up a worker that leaves: what is not given back lapses.
RELEASE_TIMEOUT_S = 2.0


class Drop(enum.Enum):
    """Why a handling is broken off without an end."""

    LOST = "lost"  # another attempt runs the turn
    LEAVING = "leaving"  # this worker leaves: another one is to go on at once


class Held:
    """A claim of this worker, and what can interrupt its handling."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.is_cancelled = False
        self.has_ended = False
        self.dropped: Drop | None = None
        self._answering: asyncio.Timeout | None = None
        self._handling: asyncio.Timeout | None = None

    def cancel(self) -> None:
        """Have the turn end as cancelled, unless its agent has answered by now."""
        self.is_cancelled = True
        _expire(self._answering)

    def drop(self, why: Drop) -> None:
        """Break the handling off where it stands; the first reason counts."""
        self.dropped = self.dropped or why
        _expire(self._handling)

    def fence(self) -> None:
        """Heed that somebody else has spoken: a newer attempt, or the next turn when this one has ended."""
        if not self.has_ended:
            self.drop(Drop.LOST)

    @contextlib.asynccontextmanager
    async def handling(self) -> AsyncIterator[None]:
        """All of it. Raises: TimeoutError when it is dropped."""
        async with asyncio.timeout(None) as cut:
            self._handling = cut
            try:
                yield
            finally:
                self._handling = None

    @contextlib.asynccontextmanager
    async def answering(self, time_s: float) -> AsyncIterator[None]:
        """The agent's part. Raises: TimeoutError when it is cancelled, or takes longer than this."""
        async with asyncio.timeout(time_s) as cut:
            self._answering = cut
            try:
                yield
            except TimeoutError as error:
                raise AssertionError("a time limit was not heeded where it was set") from error
            finally:
                self._answering = None


def _expire(cut: asyncio.Timeout | None) -> None:
    if cut is not None and not cut.expired():
        cut.reschedule(asyncio.get_running_loop().time())


class Handling:
    """See the module. `kinds`: who answers, by the kind of agent."""

    def __init__(
        self,
        *,
        claims: Claims,
        turns: Turns,
        threads: Threads,
        agents: Agents,
        tokens: Tokens,
        log: ThreadLog,
        tool_calls: ToolCalls,
        kinds: Mapping[AgentKind, Answering],
        metrics: WorkerMetrics,
    ) -> None:
        self._claims = claims
        self._turns = turns
        self._threads = threads
        self._agents = agents
        self._tokens = tokens
        self._log = log
        self._tool_calls = tool_calls
        self._kinds = kinds
        self._metrics = metrics

    async def run(self, held: Held) -> float | None:
        """Handle a claim to its end; returns after how many seconds it is to be claimed again, None: not at all."""
        claim = held.claim
        retry_after_s: float | None = None
        try:
            async with held.handling():
                if held.dropped is None:
                    retry_after_s = await self._handle(held)
        except ClaimLost:
            held.drop(Drop.LOST)
        except Exception:
            if held.dropped is None:
                retry_after_s = await self._break_off(claim)
        if held.dropped is not None:
            logger.info("turn_dropped", turn=claim.turn, attempt=claim.attempt, reason=held.dropped.value)
        if held.dropped is Drop.LEAVING:
            with contextlib.suppress(ClaimLost, StoreUnavailable, TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._claims.release(claim)
        return retry_after_s

    async def _break_off(self, claim: Claim) -> float:
        """Have a turn tried again that met a fault of ours; it counts, so that it is not tried for ever."""
        logger.exception("turn_broke_off", turn=claim.turn, attempt=claim.attempt)
        pause_s = turn_times.retry_after_s(claim.attempt, random.random())  # noqa: S311 (spread, not secrecy)
        with contextlib.suppress(ClaimLost, StoreUnavailable):
            await self._claims.fail(claim, "the worker met an unexpected error; its log has it", retry_after_s=pause_s)
        return pause_s

    async def _handle(self, held: Held) -> float | None:
        claim = held.claim
        begun = await insist("begin", lambda: self._claims.begin(claim))
        turn = begun.turn
        if begun.verdict == "lost":
            raise ClaimLost(claim)
        if begun.verdict == "begun":
            assert turn is not None
            turn_or_pause = await self._run_attempt(held, begun, turn)
            if not isinstance(turn_or_pause, Turn):
                return turn_or_pause
            turn = turn_or_pause
        if turn is not None:
            await self._say(ended(turn))
        await insist("complete", lambda: self._claims.complete(claim))
        return None

    async def _run_attempt(self, held: Held, begun: Begun, turn: Turn) -> Turn | float:
        """Run one attempt; returns the record of the turn that has ended, or the pause before the next attempt."""
        claim = held.claim
        began = time.monotonic()
        logger.info(
            "turn_begun",
            turn=turn.turn,
            thread=turn.thread,
            attempt=claim.attempt,
            agent=turn.agent,
            traceparent=turn.traceparent,
        )
        talk = Talk(self._log, claim, turn, begun, fenced=held.fence)
        async with talk.speaking():
            until = began + turn_times.agent_time_s(turn.cap_s) - begun.elapsed_s
            steps = Steps(
                claim,
                turn,
                until=until,
                talk=talk,
                claims=self._claims,
                tokens=self._tokens,
                tool_calls=self._tool_calls,
            )
            end = await self._answer(held, begun, turn, steps, until)
            if isinstance(end, float):
                return end
            used = steps.used(begun.elapsed_s + time.monotonic() - began)
            record = await insist("end", lambda: self._turns.end(claim, end, [used]))
            held.has_ended = True
            await talk.flush()
        self._count(record)
        return record

    async def _answer(self, held: Held, begun: Begun, turn: Turn, steps: Steps, until: float) -> End | float:
        """Have the agent answer; returns how the turn ends, or the pause before the next attempt."""
        claim = held.claim
        if turn.cancel_requested:
            held.cancel()
        try:
            async with held.answering(0 if held.is_cancelled else until - time.monotonic()):
                end = await self._ask_agent(claim, begun, turn, steps, until)
            return cancelled() if held.is_cancelled else end
        except TimeoutError:
            await self._tool_calls.cancel(turn)
            if held.is_cancelled:
                return cancelled()
            return failed("turn-timeout", f"there was no answer within {turn_times.agent_time_s(turn.cap_s):g} s")
        except AgentFailed as error:
            return failed(error.code, str(error))
        except AgentUnavailable as error:
            return await self._put_off(claim, turn, error, until)
        except ClaimLost:
            raise
        except Exception:
            # One turn that meets a fault of ours must not stay silent, nor be tried for ever.
            logger.exception("turn_broke", turn=turn.turn, attempt=claim.attempt)
            return failed("internal-error", "the turn met an unexpected error; the log of the worker has it")

    async def _ask_agent(self, claim: Claim, begun: Begun, turn: Turn, steps: Steps, until: float) -> End:
        agent, exchanges, done = await asyncio.gather(
            insist("agent", lambda: self._agents.read(turn.agent)),
            insist(
                "conversation",
                lambda: self._threads.conversation(turn, limit=EXCHANGES_MAX, bytes_max=EXCHANGES_BYTES_MAX),
            ),
            self._done_before(claim, begun),
        )
        if agent is None:
            return failed("agent-unknown", f"the agent {turn.agent} was deleted")
        steps.resume(done, agent.tools)
        asked = Asked(turn, claim.attempt, agent, exchanges, until - time.monotonic())
        text = await self._kinds[agent.kind].answer(asked, steps)
        if not text.strip():
            return failed("answer-empty", "the agent answered without a word")
        if len(text) > ANSWER_CHARACTERS_MAX:
            limit = ANSWER_CHARACTERS_MAX
            return failed("answer-too-large", f"the answer has {len(text)} characters, at most {limit} are allowed")
        return completed(text)

    async def _done_before(self, claim: Claim, begun: Begun) -> Mapping[str, Any]:
        """Steps that earlier attempts have kept."""
        if begun.is_first:
            return {}
        return await insist("checkpoints", lambda: self._claims.checkpoints(claim))

    async def _put_off(self, claim: Claim, turn: Turn, error: AgentUnavailable, until: float) -> End | float:
        pause_s = turn_times.retry_after_s(claim.attempt, random.random())  # noqa: S311 (spread, not secrecy)
        pause_s = max(pause_s, error.retry_after_s)
        logger.info("attempt_failed", turn=turn.turn, attempt=claim.attempt, error=str(error), retry_after_s=pause_s)
        if claim.attempt >= turn_times.ATTEMPTS_MAX:
            return failed("agent-unavailable", f"{error} (tried {claim.attempt} times)")
        if time.monotonic() + pause_s >= until:
            return failed("agent-unavailable", f"{error} (no time is left to try again)")
        await insist("fail", lambda: self._claims.fail(claim, str(error), retry_after_s=pause_s))
        return pause_s

    async def _say(self, said: Said) -> None:
        await insist("say", lambda: self._log.say(said.thread, said.name, said.events))

    def _count(self, turn: Turn) -> None:
        assert turn.ended_ms is not None
        seconds = (turn.ended_ms - turn.created_ms) / 1000
        if turn.ended_here:  # and not by whoever took it for lost
            self._metrics.turns_total[turn.state].inc()
            self._metrics.turn_seconds.observe(seconds)
        logger.info("turn_ended", turn=turn.turn, state=turn.state, code=turn.error_code, took_s=round(seconds, 3))
