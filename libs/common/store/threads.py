"""Threads and their entries: one order per thread, and the door by which turns begin.

Owns:     the tables `threads` and `entries`.
Promises: an entry, its turn and the turn's task are there together or not at all; one turn per (thread, key), whose
          record is the answer to every later submission; a thread's turns run one after the other, in the order of the
          entries that they answer. Every call is safe to repeat.
Used by:  the gateway (all but the conversation), the worker (conversation, prune).
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from common.ids import AgentId, EntryId, ThreadId, TurnId, UserId, new_id
from common.store.postgres import Postgres
from common.store.turns import TASK_OPTIONS, Turn, turn_of
from towline.wire import json
from towline.wire.threads import OnBusy, Role


class Thread(msgspec.Struct, frozen=True):
    """A thread's record. Times `_ms` are milliseconds of Postgres's clock.

    Attributes:
        agent: who answers; may have been deleted meanwhile.
        user: whose machine its tools run on; None: it has no tools.
        model: instead of the agent's.
        entries: how many it has; they are numbered from 1.
        used_ms: when an entry was last added or a turn ended.
    """

    thread: ThreadId
    agent: AgentId
    user: UserId | None
    model: str | None
    entries: int
    created_ms: int
    used_ms: int


class Entry(msgspec.Struct, frozen=True):
    """One thing that was said. `turn`: the one that answers it (user's) or that wrote it (agent's)."""

    entry: EntryId
    thread: ThreadId
    position: int
    role: Role
    text: str
    turn: TurnId
    created_ms: int


class NewEntry(NamedTuple):
    """An entry as the door hands it in. `fingerprint`: see `fingerprint`."""

    thread: ThreadId
    text: str
    key: str
    fingerprint: bytes
    on_busy: OnBusy
    traceparent: str


class Posted(NamedTuple):
    """What became of an entry.

    Attributes:
        verdict: `created`; `known`: the key's turn comes back, as it stands now; `busy`: rejected, `turn` is the one
            that is open; `no-thread`; `no-agent`: the thread's agent was deleted.
        turn, entry: with `created` and `known`.
    """

    verdict: Literal["created", "known", "busy", "no-thread", "no-agent"]
    turn: Turn | None
    entry: Entry | None


class Exchange(NamedTuple):
    """An entry and what was answered; `reply` is None when that turn failed, was cancelled, or is the one at work."""

    text: str
    reply: str | None


def fingerprint(text: str) -> bytes:
    """What defines the work of an entry."""
    return hashlib.sha256(json.canonical({"text": text})).digest()


class Threads:
    """The tables."""

    def __init__(self, postgres: Postgres, *, key_retention_s: float) -> None:
        self._postgres = postgres
        self._key_retention_s = key_retention_s

    async def create(self, agent: AgentId, *, user: UserId | None, model: str | None) -> Thread | None:
        """Begin a thread; None when there is no such agent.

        Raises:
            StoreUnavailable: there may be an empty thread that nobody knows of.
        """
        params = {"thread": new_id(), "agent": agent, "user": user, "model": model}
        rows = await self._postgres.fetch("add_thread", params)
        return _thread(rows[0]) if rows else None

    async def read(self, thread: ThreadId) -> Thread | None:
        """A thread's record. `thread` is a UUID (`ids.is_uuid`). Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("read_thread", {"thread": thread})
        return _thread(rows[0]) if rows else None

    async def list_page(
        self, *, users: Sequence[UserId] | None, agent: AgentId | None, before: ThreadId | None, limit: int
    ) -> list[Thread]:
        """Threads, newest first, before one; of some users, or of everyone and no one. Raises: StoreUnavailable."""
        params = {
            "users": None if users is None else list(users),
            "agent": agent,
            "before": before,
            "limit": limit,
        }
        return [_thread(row) for row in await self._postgres.fetch("list_threads", params)]

    async def post(self, new: NewEntry) -> Posted:
        """Post an entry: commit it with its turn, or find what its key stands for.

        With `on_busy` `interrupt` the turn under way is asked to stop; those that wait stay ahead of this one.

        Raises:
            StoreUnavailable: it may be there; the same key finds out.
        """
        params = new._asdict() | {
            "entry": new_id(),
            "turn": new_id(),
            "retention_s": self._key_retention_s,
            "task": TASK_OPTIONS,
        }
        (row,) = await self._postgres.fetch("post_entry", params)
        if row.turn is None:
            return Posted(row.verdict, None, None)
        turn = turn_of(row)
        if row.verdict == "busy":
            return Posted(row.verdict, turn, None)
        text = new.text if row.verdict == "created" else row.entry_text
        entry = Entry(turn.entry, turn.thread, turn.number, "user", text, turn.turn, turn.created_ms)
        return Posted(row.verdict, turn, entry)

    async def entries_after(self, thread: ThreadId, position: int, *, limit: int) -> list[Entry]:
        """A thread's entries in their order, after a position (0: from the first). Raises: StoreUnavailable."""
        params = {"thread": thread, "position": position, "limit": limit}
        return [_entry(row) for row in await self._postgres.fetch("entries_after", params)]

    async def conversation(self, turn: Turn, *, limit: int, bytes_max: int) -> list[Exchange]:
        """What was said in the thread up to a turn's own entry, which is the last one; the newest `limit` exchanges.

        In the order of the turns: what was posted while another turn ran comes after that turn's reply. Of exchanges
        with more than `bytes_max` bytes of text only the newest come, the last one in any case.

        Raises: StoreUnavailable.
        """
        params = {"thread": turn.thread, "number": turn.number, "limit": limit, "bytes_max": bytes_max}
        rows = await self._postgres.fetch("conversation", params)
        return [Exchange(row.text, row.reply) for row in reversed(rows)]

    async def prune(self, *, retention_s: float, limit: int = 100) -> int:
        """Forget threads unused for longer than this, with their entries and turns; returns how many.

        A thread with an open turn stays. Several callers at once take others. Raises: StoreUnavailable.
        """
        return len(await self._postgres.fetch("prune_threads", {"retention_s": retention_s, "limit": limit}))


def _thread(row: Any) -> Thread:
    return Thread(
        thread=ThreadId(str(row.thread)),
        agent=row.agent,
        user=row.user_id,
        model=row.model,
        entries=row.entries,
        created_ms=row.created_ms,
        used_ms=row.used_ms,
    )


def _entry(row: Any) -> Entry:
    return Entry(
        entry=EntryId(str(row.entry)),
        thread=ThreadId(str(row.thread)),
        position=row.position,
        role=row.role,
        text=row.text,
        turn=TurnId(str(row.turn)),
        created_ms=row.created_ms,
    )
