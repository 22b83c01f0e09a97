"""Threads over HTTP: begin one, read, list; say something in it, and read what was said.

Promises: what was answered 201 is durable, and will be answered in turn; a key that has a turn is answered from it
          whatever else is refused; nothing is recorded of what is refused.
"""

from collections.abc import Sequence

import structlog
from msgspec import UNSET, structs

from common.ids import AgentId, ThreadId, UserId, is_uuid
from common.store.threads import Entry, NewEntry, Thread, Threads, fingerprint
from common.store.tokens import ApiKey
from common.store.turns import Turn, Turns
from gateway import paging, problems
from gateway.announcements import Announcements
from gateway.auth import Auth
from gateway.http import Answer
from gateway.problems import Refusal
from gateway.request import Header, Request
from gateway.submission import idempotency_key, traceparent
from towline.wire import ids, json
from towline.wire import threads as wire
from towline.wire.api import timestamp

logger = structlog.get_logger(__name__)


class ThreadRoutes:
    """The handlers of everything about threads and their entries but the events."""

    def __init__(
        self, *, auth: Auth, threads: Threads, turns: Turns, announcements: Announcements, is_strict: bool
    ) -> None:
        self._auth = auth
        self._threads = threads
        self._turns = turns
        self._announcements = announcements
        self._is_strict = is_strict

    async def create_thread(self, request: Request) -> Answer:
        """`POST /v1/threads`."""
        key = await self._auth.require(request, "threads")
        body = await request.read(wire.ThreadCreate)
        if body.user is None and key.users is not None:
            raise Refusal(
                problems.INVALID_REQUEST, "the body: a key that is bound to users needs `user`", place="$.user"
            )
        if not key.reaches(body.user):
            raise problems.not_found("user")
        user = None if body.user is None else UserId(body.user)
        thread = await self._threads.create(AgentId(body.agent), user=user, model=body.model)
        if thread is None:
            raise Refusal(problems.UNKNOWN_AGENT, f"there is no agent {body.agent!r}", place="$.agent")
        logger.info("thread_begun", thread=thread.thread, agent=thread.agent, user=user)
        location = (b"location", f"/v1/threads/{thread.thread}".encode())
        return Answer(201, json.dumps(_view(thread)), (location,))

    async def list_threads(self, request: Request) -> Answer:
        """`GET /v1/threads`."""
        key = await self._auth.require(request, "threads")
        agent = _id_in_query(request, "agent")
        user = _id_in_query(request, "user")
        if user is not None and not key.reaches(user):
            raise problems.not_found("user")
        size = paging.limit(request)
        before = paging.before(request)
        records = await self._threads.list_page(
            users=reached_users(key) if user is None else [UserId(user)],
            agent=None if agent is None else AgentId(agent),
            before=None if before is None else ThreadId(before),
            limit=size + 1,
        )
        return Answer(200, json.dumps(paging.page(records, size, _view, lambda record: record.thread)))

    async def read_thread(self, request: Request) -> Answer:
        """`GET /v1/threads/{thread}`."""
        thread = await self._reachable(request)
        skipped = max(0, thread.entries - wire.THREAD_ENTRIES_SHOWN)
        # One more may have come since.
        entries = await self._threads.entries_after(thread.thread, skipped, limit=wire.THREAD_ENTRIES_SHOWN)
        turns = await self._turns.read_many(list({entry.turn for entry in entries}))
        view = wire.ThreadView(
            **structs.asdict(_view(thread)),
            entries=[_view_of_entry(entry) for entry in entries],
            turns=[view_of_turn(turn) for turn in sorted(turns.values(), key=lambda turn: turn.number)],
        )
        return Answer(200, json.dumps(view))

    async def post_entry(self, request: Request) -> Answer:
        """`POST /v1/threads/{thread}/entries`."""
        key = await self._auth.require(request, "threads")
        new = await self._new_entry(request)
        if key.users is not None:
            await self._read(new.thread, key)  # a key that reaches everyone saves this round trip
        posted = await self._threads.post(new)
        if posted.verdict == "no-thread":
            raise problems.not_found("thread")
        if posted.verdict == "no-agent":
            raise Refusal(problems.UNKNOWN_AGENT, "the thread's agent was deleted; nothing is answered here any more")
        turn, entry = posted.turn, posted.entry
        assert turn is not None
        if entry is None:
            raise Refusal(problems.THREAD_BUSY, f"turn {turn.turn} of the thread is {turn.state}")
        is_new = posted.verdict == "created"
        matches = turn.fingerprint == new.fingerprint
        if not matches and self._is_strict:
            raise Refusal(problems.KEY_REUSED, f"the key belongs to turn {turn.turn}, whose entry has another `text`")
        if is_new or turn.state == "queued":
            # Said again for a known one: whoever took it may have died before it could. Once begun, its worker said it.
            self._announcements.entry_posted(entry, is_new=is_new)
        headers: list[Header] = [(b"location", f"/v1/turns/{turn.turn}".encode())]
        if is_new:
            logger.info("entry_posted", thread=turn.thread, turn=turn.turn, traceparent=new.traceparent)
        else:
            headers.append((b"idempotent-replayed", b"true"))
        body = wire.Posted(_view_of_entry(entry), view_of_turn(turn, replayed=not is_new, matches=matches))
        return Answer(200 if turn.terminal else 201, json.dumps(body), tuple(headers))

    async def _new_entry(self, request: Request) -> NewEntry:
        key = idempotency_key(request)
        body = await request.read(wire.EntryPost)
        return NewEntry(
            thread=thread_in_path(request),
            text=body.text,
            key=key,
            fingerprint=fingerprint(body.text),
            on_busy=body.on_busy,
            traceparent=traceparent(request),
        )

    async def list_entries(self, request: Request) -> Answer:
        """`GET /v1/threads/{thread}/entries`."""
        size = paging.limit(request)
        after = paging.after_position(request)
        thread = await self._reachable(request)
        entries = await self._threads.entries_after(thread.thread, after, limit=size + 1)
        return Answer(200, json.dumps(paging.page_of_entries(entries, size, _view_of_entry)))

    async def _reachable(self, request: Request) -> Thread:
        key = await self._auth.require(request, "threads")
        return await self._read(thread_in_path(request), key)

    async def _read(self, thread: ThreadId, key: ApiKey) -> Thread:
        record = await self._threads.read(thread)
        if record is None or not key.reaches(record.user):
            raise problems.not_found("thread")
        return record


def thread_in_path(request: Request) -> ThreadId:
    """The path's thread. Raises: Refusal, if it can be none."""
    if not is_uuid(request.params["thread"]):
        raise problems.not_found("thread")
    return ThreadId(request.params["thread"])


def reached_users(key: ApiKey) -> Sequence[UserId] | None:
    """The users to which a list is kept; None: everyone and no one."""
    return None if key.users is None else [UserId(user) for user in sorted(key.users)]


def view_of_turn(turn: Turn, *, replayed: bool = False, matches: bool = True) -> wire.Turn:
    """A turn as callers see it."""
    outcome: wire.TurnOutcome | None = None
    if turn.error_code is not None:
        outcome = wire.TurnOutcome(error=wire.TurnError(turn.error_code, turn.error_message or ""))
    elif turn.reply is not None:
        outcome = wire.TurnOutcome(entry=turn.reply, text=turn.reply_text or "")
    return wire.Turn(
        turn=turn.turn,
        thread=turn.thread,
        entry=turn.entry,
        agent=turn.agent,
        state=turn.state,
        attempts=turn.attempts,
        replays=turn.replays,
        cancel_requested=turn.cancel_requested and not turn.terminal,
        replayed=replayed,
        accepted_at=timestamp(turn.created_ms),
        started_at=None if turn.started_ms is None else timestamp(turn.started_ms),
        ended_at=None if turn.ended_ms is None else timestamp(turn.ended_ms),
        outcome=UNSET if outcome is None else outcome,
        payload_matches=UNSET if matches else False,
    )


def _view(thread: Thread) -> wire.Thread:
    return wire.Thread(
        thread=thread.thread,
        agent=thread.agent,
        user=thread.user,
        model=thread.model,
        created_at=timestamp(thread.created_ms),
        used_at=timestamp(thread.used_ms),
    )


def _view_of_entry(entry: Entry) -> wire.Entry:
    return wire.Entry(
        entry=entry.entry,
        thread=entry.thread,
        position=entry.position,
        role=entry.role,
        text=entry.text,
        turn=entry.turn,
        created_at=timestamp(entry.created_ms),
    )


def _id_in_query(request: Request, name: str) -> str | None:
    value = request.query(name)
    if value is not None and not ids.is_id(value):
        raise Refusal(problems.INVALID_REQUEST, f"the query parameter {name} is no id")
    return value
