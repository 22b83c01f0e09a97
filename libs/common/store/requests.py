"""Requests: the durable, idempotent record of every job, and the only place where a job ends.

Owns:     the table `requests`.
Promises: one record per (scope, key); one terminal per record, never replaced; begin marks are durable before they
          are answered; every call is safe to repeat.
Used by:  the gateway (accept, read, cancel), the worker (begin, finish, give up), the sweeper (expire, open, ends,
          prune).
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from common.ids import JobId, UserId
from common.store.batch import Batcher
from common.store.postgres import Postgres
from towline.wire import json

# A job that was marked this often and still has no outcome kills whoever takes it (rule 18).
ATTEMPTS_MAX = 5
TERMINAL_STATES = frozenset({"completed", "failed", "unknown", "expired", "cancelled"})


class NewJob(NamedTuple):
    """A job as the door hands it in. `args`: JSON text; times in seconds."""

    job: JobId
    user: UserId
    scope: str
    key: str
    name: str
    args: str
    fingerprint: bytes
    timeout_s: float
    deadline_s: float
    hinted: bool
    on_machine_change: str
    traceparent: str


class Record(msgspec.Struct, frozen=True):
    """A job's record. Times are milliseconds of Postgres's clock; `outcome` is JSON text once the state is terminal."""

    job: JobId
    scope: str
    key: str
    fingerprint: bytes
    user: UserId
    name: str
    args: str
    timeout_s: float
    hinted: bool
    on_machine_change: str
    traceparent: str
    state: str
    attempts: int
    machine: str | None
    journal: str | None
    outcome: str | None
    accepted_ms: int
    deadline_ms: int
    ended_ms: int | None

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.ended_ms is not None


class Ended(msgspec.Struct, frozen=True):
    """The part of a terminal record that is published. `ended_ms`: milliseconds of Postgres's clock."""

    job: JobId
    user: UserId
    state: str
    attempts: int
    outcome: str
    ended_ms: int


class End(NamedTuple):
    """That a job has ended; what the sweeper needs to ask whether it was settled."""

    job: JobId
    user: UserId
    ended_at: datetime


class Accepted(NamedTuple):
    """What became of a submission: its record, and whether this call made it."""

    record: Record
    inserted: bool


class Begin(NamedTuple):
    """A job to be marked begun on a machine and its journal."""

    job: JobId
    machine: str
    journal: str


class Finish(NamedTuple):
    """How a job ended, as its machine says. `outcome`: JSON text with `result` or `error`."""

    job: JobId
    user: UserId
    state: str
    outcome: str


class Finished(NamedTuple):
    """What the record says after a finish, and whether that is this finish."""

    record: Ended
    won: bool


def scope_of_user(user: UserId) -> str:
    """Where callers' keys are unique. Turns have scopes of their own that callers cannot write to."""
    return f"user:{user}"


def fingerprint(name: str, canonical_args: bytes) -> bytes:
    """What defines the work of a job."""
    return hashlib.sha256(json.dumps(name) + b"\n" + canonical_args).digest()


def error_outcome(code: str, message: str, *, retryable: bool = False) -> str:
    """The outcome text of an ending that is ours and not the machine's."""
    return json.dumps({"error": {"code": code, "message": message, "retryable": retryable}}).decode()


EXPIRED = error_outcome("expired", "the deadline passed before the job was started; it did not run", retryable=True)
LATE = error_outcome("deadline", "the deadline passed after the job was begun; it may or may not have run")
ELSEWHERE = error_outcome("machine-changed", "the job was begun on another machine; it may or may not have run there")
POISON = error_outcome("undeliverable", "the job was begun five times without an answer; it may or may not have run")
UNDELIVERABLE = error_outcome("undeliverable", "the job was delivered five times without an answer")
CANCELLED = error_outcome("cancelled", "the job was cancelled before it was started; it did not run")


class Requests:
    """The table, with its batched writers."""

    def __init__(self, postgres: Postgres, *, retention_s: float) -> None:
        self._postgres = postgres
        self._retention_s = retention_s
        self._accepts: Batcher[NewJob, Accepted | None] = Batcher(self._accept_batch)
        self._begins: Batcher[Begin, int | None] = Batcher(self._begin_batch)
        self._finishes: Batcher[Finish, Finished | None] = Batcher(self._finish_batch)

    async def accept(self, new: NewJob) -> Accepted:
        """Make the job durable, or find the record that its key already has.

        Raises:
            StoreUnavailable: it may or may not have been accepted; the same key finds out.
        """
        while True:
            accepted = await self._accepts.submit(new)
            if accepted is None:
                continue  # its key stood earlier in this batch, or was forgotten just now: ask again
            record = accepted.record
            if not accepted.inserted and record.terminal and await self._forget(record.scope, record.key):
                continue
            return accepted

    async def _accept_batch(self, items: Sequence[NewJob]) -> Sequence[Accepted | None]:
        first: dict[tuple[str, str], NewJob] = {}
        for new in items:
            first.setdefault((new.scope, new.key), new)
        chosen = list(first.values())
        rows = await self._postgres.fetch(
            "accept",
            {
                "ids": [n.job for n in chosen],
                "scopes": [n.scope for n in chosen],
                "keys": [n.key for n in chosen],
                "fingerprints": [n.fingerprint for n in chosen],
                "users": [n.user for n in chosen],
                "names": [n.name for n in chosen],
                "args": [n.args for n in chosen],
                "timeouts": [n.timeout_s for n in chosen],
                "hinted": [n.hinted for n in chosen],
                "changes": [n.on_machine_change for n in chosen],
                "traceparents": [n.traceparent for n in chosen],
                "deadlines": [n.deadline_s for n in chosen],
            },
        )
        found = {(row.scope, row.key): row for row in rows}
        given = {new.job for new in chosen}
        # A key that was known gives back its job; its record is read then, which is rare.
        known = await self.read([row.job for row in rows if row.job not in given])
        answers: list[Accepted | None] = []
        for new in items:
            row = found[(new.scope, new.key)]
            if first[(new.scope, new.key)] is not new:
                answers.append(None)
            elif row.job == new.job:
                answers.append(Accepted(_new_record(new, row.accepted_ms, row.deadline_ms), True))
            else:
                # None: it was forgotten a moment ago, and is accepted in the next round.
                answers.append(Accepted(known[row.job], False) if row.job in known else None)
        return answers

    async def _forget(self, scope: str, key: str) -> bool:
        """Remove an ended record whose retention has passed; says whether there was such a one."""
        record = await self.find(scope, key)
        if record is not None:
            return False
        await self._postgres.fetch("forget_key", {"scope": scope, "key": key, "retention_s": self._retention_s})
        return True

    async def find(self, scope: str, key: str) -> Record | None:
        """The record of a key, unless its retention has passed. Raises: StoreUnavailable."""
        params = {"scope": scope, "key": key, "retention_s": self._retention_s}
        rows = await self._postgres.fetch("read_by_key", params)
        return _record(rows[0]) if rows else None

    async def read(self, jobs: Sequence[JobId]) -> dict[JobId, Record]:
        """The records of some jobs; unknown ones are left out. Raises: StoreUnavailable."""
        if not jobs:
            return {}
        rows = await self._postgres.fetch("read_jobs", {"ids": list(jobs)})
        return {row.job: _record(row) for row in rows}

    async def list_of_user(
        self,
        user: UserId,
        *,
        state: str | None,
        key: str | None,
        before: JobId | None,
        limit: int,
        scope: str | None = None,
    ) -> list[Record]:
        """A user's jobs in one scope (None: its own), newest first, before a job id. Raises: StoreUnavailable."""
        params = {"user": user, "scope": scope, "state": state, "key": key, "before": before, "limit": limit}
        return [_record(row) for row in await self._postgres.fetch("list_jobs", params)]

    async def begin(self, begin: Begin) -> int | None:
        """Mark a job begun; returns its attempt, or None when it may not be sent (then `give_up`, and settle).

        Raises:
            StoreUnavailable: it may have been marked; marking again is harmless and counts as another attempt.
        """
        return await self._begins.submit(begin)

    async def _begin_batch(self, items: Sequence[Begin]) -> Sequence[int | None]:
        params = {
            "ids": [b.job for b in items],
            "machines": [b.machine for b in items],
            "journals": [b.journal for b in items],
            "attempts_max": ATTEMPTS_MAX,
        }
        attempts = {row.job: row.attempts for row in await self._postgres.fetch("begin", params)}
        return [attempts.get(b.job) for b in items]

    async def finish(self, finish: Finish) -> Finished | None:
        """Make an outcome durable; returns what the record says now, or None if the user has no such job.

        Raises:
            StoreUnavailable: it may have been written; repeat it.
        """
        return await self._finishes.submit(finish)

    async def _finish_batch(self, items: Sequence[Finish]) -> Sequence[Finished | None]:
        # One job twice in a batch (an answer by frame and one by job): the first counts, both get the record.
        first: dict[JobId, Finish] = {}
        for item in items:
            first.setdefault(item.job, item)
        rows = await self._postgres.fetch(
            "finish",
            {
                "ids": [f.job for f in first.values()],
                "users": [f.user for f in first.values()],
                "states": [f.state for f in first.values()],
                "outcomes": [f.outcome for f in first.values()],
            },
        )
        found = {row.job: Finished(_ended(row, first[row.job].outcome), row.won) for row in rows}
        return [
            finished if (finished := found.get(f.job)) is None or first[f.job] is f else finished._replace(won=False)
            for f in items
        ]

    async def give_up(self, jobs: Sequence[JobId], machine: str, journal: str) -> dict[JobId, Record]:
        """End those jobs that may not be started on this machine; returns the records of the ended ones.

        Jobs that wait for their own machine stay open and are left out. Raises: StoreUnavailable.
        """
        params = {
            "ids": list(jobs),
            "attempts_max": ATTEMPTS_MAX,
            "machine": machine,
            "journal": journal,
            "expired": EXPIRED,
            "late": LATE,
            "poison": POISON,
            "undeliverable": UNDELIVERABLE,
            "elsewhere": ELSEWHERE,
        }
        await self._postgres.fetch("give_up", params)
        return {job: record for job, record in (await self.read(jobs)).items() if record.terminal}

    async def expire(self, *, limit: int) -> list[Record]:
        """End up to `limit` jobs whose deadline has passed; returns their records. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("expire", {"limit": limit, "expired": EXPIRED, "unknown": LATE})
        return [_record(row) for row in rows]

    async def cancel(self, job: JobId, user: UserId) -> Record | None:
        """Cancel a queued job; None when it is not queued (any more). Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("cancel", {"job": job, "user": user, "outcome": CANCELLED})
        return _record(rows[0]) if rows else None

    async def open(
        self, *, older_than_s: float, younger_than_s: float, after: JobId | None, limit: int
    ) -> list[Record]:
        """Open jobs accepted in a window of age, in the order of their ids, after one. Raises: StoreUnavailable."""
        params = {"older_than_s": older_than_s, "younger_than_s": younger_than_s, "after": after, "limit": limit}
        return [_record(row) for row in await self._postgres.fetch("open_jobs", params)]

    async def ends(self, *, older_than_s: float, younger_than_s: float, after: End | None, limit: int) -> list[End]:
        """Jobs that ended in a window of age, in the order of their ends, after one. Raises: StoreUnavailable."""
        params = {
            "older_than_s": older_than_s,
            "younger_than_s": younger_than_s,
            "after_job": after and after.job,
            "after_end": after and after.ended_at,
            "limit": limit,
        }
        return [End(*row) for row in await self._postgres.fetch("ended_jobs", params)]

    async def prune(self, *, limit: int) -> int:
        """Forget up to `limit` ended records past their retention; returns how many. Raises: StoreUnavailable."""
        return len(await self._postgres.fetch("prune_requests", {"retention_s": self._retention_s, "limit": limit}))

    async def depths(self) -> dict[str, tuple[int, float]]:
        """Open jobs by state: how many, and the age of the oldest in seconds. Raises: StoreUnavailable."""
        return {row.state: (row.depth, row.oldest_s) for row in await self._postgres.fetch("queue_depths")}


def _ended(row: Any, given: str) -> Ended:
    outcome = given if row.won else row.outcome
    return Ended(row.job, row.user_id, row.state, row.attempts, outcome, row.ended_ms)


def _new_record(new: NewJob, accepted_ms: int, deadline_ms: int) -> Record:
    return Record(
        job=new.job,
        scope=new.scope,
        key=new.key,
        fingerprint=new.fingerprint,
        user=new.user,
        name=new.name,
        args=new.args,
        timeout_s=new.timeout_s,
        hinted=new.hinted,
        on_machine_change=new.on_machine_change,
        traceparent=new.traceparent,
        state="queued",
        attempts=0,
        machine=None,
        journal=None,
        outcome=None,
        accepted_ms=accepted_ms,
        deadline_ms=deadline_ms,
        ended_ms=None,
    )


def _record(row: Any) -> Record:
    return Record(
        job=row.job,
        scope=row.scope,
        key=row.key,
        fingerprint=bytes(row.fingerprint),
        user=row.user_id,
        name=row.name,
        args=row.args,
        timeout_s=row.timeout_s,
        hinted=row.hinted,
        on_machine_change=row.on_machine_change,
        traceparent=row.traceparent,
        state=row.state,
        attempts=row.attempts,
        machine=row.machine,
        journal=row.journal,
        outcome=row.outcome,
        accepted_ms=row.accepted_ms,
        deadline_ms=row.deadline_ms,
        ended_ms=row.ended_ms,
    )
