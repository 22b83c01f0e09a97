"""Requests: the durable, idempotent record of every job, and the only place where a job ends.

Owns:     the table `requests`.
Promises: one record per (scope, key); one terminal per record, never replaced; begin marks are durable before they
          are answered; every call is safe to repeat.
Used by:  the gateway (accept, read, cancel), the worker (begin, finish, give up), the sweeper (expire, open_jobs,
          ended_jobs, prune).
"""

from collections.abc import Sequence

from common.ids import JobId, UserId
from common.store.batch import Batcher
from common.store.postgres import Postgres
from common.store.records import (
    CANCELLED,
    ELSEWHERE,
    EXPIRED,
    LATE,
    POISON,
    UNDELIVERABLE,
    Accepted,
    Begin,
    End,
    Finish,
    Finished,
    NewJob,
    Open,
    Record,
    ended_of,
    new_record,
    record_of,
)

# A job that was marked this often and still has no outcome kills whoever takes it (rule 18).
ATTEMPTS_MAX = 5


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
                answers.append(Accepted(new_record(new, row.accepted_ms, row.deadline_ms), True))
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
        return record_of(rows[0]) if rows else None

    async def read(self, jobs: Sequence[JobId]) -> dict[JobId, Record]:
        """The records of some jobs; unknown ones are left out. Raises: StoreUnavailable."""
        if not jobs:
            return {}
        rows = await self._postgres.fetch("read_jobs", {"ids": list(jobs)})
        return {row.job: record_of(row) for row in rows}

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
        return [record_of(row) for row in await self._postgres.fetch("list_jobs", params)]

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
        rows = await self._postgres.fetch("begin", params)
        attempts = {Begin(row.job, row.machine, row.journal): row.attempts for row in rows}
        return [attempts.get(b) for b in items]

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
                "finishes": [f.id for f in first.values()],
            },
        )
        found = {row.job: row for row in rows}
        return [
            Finished(ended_of(row, first[f.job].outcome), row.ended_by == f.id) if (row := found.get(f.job)) else None
            for f in items
        ]

    async def give_up(self, jobs: Sequence[JobId], machine: str, journal: str) -> dict[JobId, Finished]:
        """End those jobs that may not be started on this machine; returns what the records of the ended ones say.

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
        given_up = {row.job for row in await self._postgres.fetch("give_up", params)}
        records = await self.read(jobs)
        return {
            job: Finished(record.published(), job in given_up) for job, record in records.items() if record.terminal
        }

    async def expire(self, *, limit: int) -> list[Record]:
        """End up to `limit` jobs whose deadline has passed; returns their records. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("expire", {"limit": limit, "expired": EXPIRED, "unknown": LATE})
        return [record_of(row) for row in rows]

    async def cancel(self, job: JobId, user: UserId) -> Record | None:
        """Cancel a queued job; None when it is not queued (any more). Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("cancel", {"job": job, "user": user, "outcome": CANCELLED})
        return record_of(rows[0]) if rows else None

    async def open_jobs(
        self, *, older_than_s: float, younger_than_s: float, after: JobId | None, limit: int
    ) -> list[Open]:
        """Open jobs accepted in a window of age, in the order of their ids, after one. Raises: StoreUnavailable."""
        params = {"older_than_s": older_than_s, "younger_than_s": younger_than_s, "after": after, "limit": limit}
        return [Open(*row) for row in await self._postgres.fetch("open_jobs", params)]

    async def read_open(self, jobs: Sequence[JobId]) -> list[tuple[Record, str]]:
        """Those of some jobs that are open, each with its arguments (JSON text). Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("read_open_jobs", {"ids": list(jobs)}) if jobs else []
        return [(record_of(row), row.args) for row in rows]

    async def ended_jobs(
        self, *, older_than_s: float, younger_than_s: float, after: End | None, limit: int
    ) -> list[End]:
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
