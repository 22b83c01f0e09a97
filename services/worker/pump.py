"""The pump: one blocking read for all machines of this worker, and one pipeline for all that their sessions owe.

Promises: blocking reads take nothing (they only wake); one assert, claim or take at a time per session, because they
          all leave from one loop; a lost note is made good at the next heartbeat; a call of unknown outcome is followed
          by a claim at once; after a Redis loss every session asserts itself again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from common.errors import StoreUnavailable
from common.ids import GatewayId, JobId, SessionId, UserId
from common.process.backoff import Backoff
from common.store import keys
from common.store.control import Inbox, Note
from common.store.jobs import parse_take, take_call
from common.store.presence import parse_serve, serve_call
from common.store.redis import Call, Redis
from common.store.tokens import Held, Tokens, hash_of
from towline.wire import frames
from worker.metrics import WorkerMetrics
from worker.session import Session

logger = structlog.get_logger(__name__)

# Sessions in one pipeline: enough to share a round trip, few enough that a take never waits long behind a refresh.
PIPELINE_MAX = 200
# A script that failed (Redis is out of memory, a key of the user is broken) fails again at once: ask at leisure.
RETRY_AFTER_S = 1.0


class Owed(NamedTuple):
    """A call of one session in a pipeline. `free`: places that it offered; `serving`: an assert, else a take."""

    session: Session
    serving: bool
    free: int
    call: Call


class Pump:
    """Knows this worker's sessions; see the module.

    Args:
        sweep: called when Redis has lost something, or may have.
    """

    def __init__(
        self,
        redis: Redis,
        inbox: Inbox,
        tokens: Tokens,
        timing: keys.Timing,
        metrics: WorkerMetrics,
        *,
        sweep: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._inbox = inbox
        self._tokens = tokens
        self._timing = timing
        self._metrics = metrics
        self._sweep = sweep
        self._sessions: dict[SessionId, Session] = {}
        self._of_user: dict[UserId, dict[SessionId, Session]] = {}
        self._owing: dict[SessionId, Session] = {}
        self._retrying: set[SessionId] = set()
        self._wake = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()
        self._born: str | None = None

    # ---- sessions

    @property
    def sessions(self) -> list[Session]:
        """Every session of this worker."""
        return list(self._sessions.values())

    def join(self, session: Session) -> None:
        """A session begins."""
        self.empty.clear()
        self._sessions[session.id] = session
        self._of_user.setdefault(session.user, {})[session.id] = session
        self._metrics.sockets.set(len(self._sessions))

    def leave(self, session: Session) -> None:
        """A session has ended."""
        self._sessions.pop(session.id, None)
        self._owing.pop(session.id, None)
        mates = self._of_user.get(session.user, {})
        mates.pop(session.id, None)
        if not mates:
            self._of_user.pop(session.user, None)
        if not self._sessions:
            self.empty.set()
        self._metrics.sockets.set(len(self._sessions))

    def owe_serve(self, session: Session) -> None:
        """Assert, claim and take for this session in the next pipeline."""
        session.owes_serve = True
        self._owe(session)

    def owe_take(self, session: Session) -> None:
        """Take for this session in the next pipeline, or as soon as it has a free place."""
        session.owes_take = True
        if session.window.free_places():
            self._owe(session)

    def _owe(self, session: Session) -> None:
        if session.id in self._sessions:
            self._owing[session.id] = session
            self._wake.set()

    # ---- loops

    async def run_inbox(self) -> None:
        """Read notes until cancelled."""
        backoff = Backoff(first_s=0.1, cap_s=2.0)
        while True:
            try:
                notes = await self._inbox.read()
            except StoreUnavailable as error:
                logger.warning("control_read_failed", error=str(error))
                await asyncio.sleep(backoff.next_s())
                while not await self._look_at_birth():  # noqa: ASYNC110  (no event tells of another machine's state)
                    await asyncio.sleep(backoff.next_s())
                self._sweep()  # it may be a replica that answers now, without what was acknowledged last
                continue
            backoff.reset()
            if not notes:
                await self._look_at_birth()
            for note in notes:
                try:
                    self._heed(note)
                except (KeyError, ValueError):
                    logger.exception("note_unreadable")

    async def _look_at_birth(self) -> bool:
        """After a broken or a quiet read: did Redis lose everything? Then no session waits for its heartbeat.

        False: it does not answer.
        """
        try:
            (born,) = await self._redis.send_many([("GET", keys.BORN)])
        except StoreUnavailable:
            return False
        if self._born is not None and born != self._born.encode():
            self._again(self.sessions)
        return True

    def _heed(self, note: Note) -> None:
        sessions = list(self._of_user.get(UserId(note["user"]), {}).values())
        match note["note"]:
            case "work":
                for session in sessions:
                    self.owe_take(session)
            case "probe":
                for session in sessions:
                    session.probe(note["probe"], GatewayId(note["reply_to"]))
            case "cancel":
                for session in sessions:
                    session.dispatch.cancel(JobId(note["job"]))
            case "close":
                for session in sessions:
                    if session.token_id == note["token_id"]:
                        session.end(frames.Close.TOKEN_REFUSED, "the token was revoked")

    async def run_calls(self) -> None:
        """Send what sessions owe, pipeline after pipeline, until cancelled."""
        backoff = Backoff(first_s=0.05, cap_s=1.0)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._owing:
                batch = self._next_batch()
                if not batch:
                    continue
                began = time.monotonic()
                try:
                    answers = await self._redis.run_many([owed.call for owed in batch])
                except StoreUnavailable as error:
                    logger.warning("calls_failed", calls=len(batch), error=str(error))
                    self._again(owed.session for owed in batch)
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                if any(owed.serving for owed in batch):
                    self._metrics.presence_refresh_seconds.observe(time.monotonic() - began)
                for owed, answer in zip(batch, answers, strict=True):
                    self._answered(owed, answer)

    def _next_batch(self) -> list[Owed]:
        """The next pipeline; takes first, for a job waits behind each of them."""
        batch: list[Owed] = []
        for session in sorted(self._owing.values(), key=lambda s: s.owes_serve)[:PIPELINE_MAX]:
            del self._owing[session.id]
            free = session.window.free_places()
            serving = session.owes_serve
            if serving:
                session.owes_serve = False
                call = serve_call(session.assertion(), self._timing)
            elif session.owes_take and session.asserted and free:
                call = take_call(session.user, session.epoch, session.id, free)
            else:
                continue  # a take stays owed until there is a place for what it brings
            batch.append(Owed(session, serving, free, call))
            # Notes that come while this call is under way are a new debt; without a free place the old one stands.
            session.owes_take = session.owes_take and free == 0
        return batch

    def _again(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            self.owe_serve(session)  # the call may have run: claim what it brought

    def _retry(self, session: Session) -> None:
        self._retrying.discard(session.id)
        self.owe_serve(session)

    def _answered(self, owed: Owed, answer: Any) -> None:
        session = owed.session
        if isinstance(answer, Exception):
            if not isinstance(answer, StoreUnavailable):
                logger.error("call_failed", user=session.user, exc_info=answer)
            if session.id not in self._retrying:
                self._retrying.add(session.id)
                asyncio.get_running_loop().call_later(RETRY_AFTER_S, self._retry, session)
            return
        if owed.serving:
            served = parse_serve(answer)
            if served.status == "ok":
                self._note_birth(served.born)
            session.served(served)
            brought = len(served.taken)
        else:
            taken = parse_take(answer)
            if taken is None:  # outranked, Redis lost our epoch, or an entry is unreadable: the assertion tells
                self.owe_serve(session)
                return
            session.dispatch.taken(taken)
            brought = len(taken)
        if brought >= owed.free:  # there may be more, or there was no place for any
            self.owe_take(session)

    def _note_birth(self, born: str) -> None:
        if self._born is not None and self._born != born:
            logger.warning("redis_lost", born=born)
            self._inbox.rewind()
            self._sweep()
            self._again(self.sessions)
        self._born = born

    async def run_beats(self) -> None:
        """Each heartbeat: have the presence of all refreshed, and end the silent ones; until cancelled.

        Nothing here waits for a store: a slow one must not make machines look silent, or absent.
        """
        while True:
            for session in self.sessions:
                session.beat()
            await asyncio.sleep(self._timing.heartbeat_s)

    async def run_upkeep(self) -> None:
        """Each heartbeat: keep the inbox, renew tokens or end sessions with a bad one; until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self._inbox.keep_alive()
            except StoreUnavailable as error:
                logger.warning("control_keep_alive_failed", error=str(error))
            await self._check_tokens()
            await asyncio.sleep(max(0.0, began + self._timing.heartbeat_s - time.monotonic()))

    async def _check_tokens(self) -> None:
        held = [(session, Held(session.token_id, session.token_hash)) for session in self.sessions]
        try:
            valid = await self._tokens.still_valid([one for _, one in held])
        except StoreUnavailable as error:
            logger.warning("token_check_failed", error=str(error))
            return
        for session, one in held:
            if one not in valid:
                session.end(frames.Close.TOKEN_REFUSED, "the token was revoked or has expired")
            elif valid[one]:
                await self._renew_token(session, one)

    async def _renew_token(self, session: Session, held: Held) -> None:
        try:
            value = await self._tokens.renew_machine_token(held)
        except StoreUnavailable as error:
            logger.warning("token_renewal_failed", user=session.user, error=str(error))
            return
        if value is not None:
            session.send(frames.Token(token=value))
            session.token_hash = hash_of(value)  # it arrives, or this session ends and the next one is offered another
            logger.info("token_renewed", user=session.user, token_id=session.token_id)
