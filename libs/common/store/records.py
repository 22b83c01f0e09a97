"""Records of jobs, as values: what the door hands in, what the table says, how a job ends (PURE).

Used by:  `requests` (which owns the table), and whoever speaks of jobs.
"""

import hashlib
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from common.ids import JobId, UserId
from towline.wire import json


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
    """A job's record, without its arguments, which only its machine is given.

    Times are milliseconds of Postgres's clock; `outcome` is JSON text once the state is terminal.
    """

    job: JobId
    scope: str
    key: str
    fingerprint: bytes
    user: UserId
    name: str
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

    def published(self) -> "Ended":
        """The part of a terminal record that is published."""
        assert self.outcome is not None
        assert self.ended_ms is not None
        return Ended(self.job, self.user, self.state, self.attempts, self.outcome, self.ended_ms)


class Ended(msgspec.Struct, frozen=True):
    """The part of a terminal record that is published. `ended_ms`: milliseconds of Postgres's clock."""

    job: JobId
    user: UserId
    state: str
    attempts: int
    outcome: str
    ended_ms: int


class Open(NamedTuple):
    """That a job is open; what the sweeper needs to ask whether it is before its machine."""

    job: JobId
    user: UserId


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
    """How a job ended, as its machine says. `outcome`: JSON text with `result` or `error`; `id`: its own."""

    job: JobId
    user: UserId
    state: str
    outcome: str
    id: str


class Finished(NamedTuple):
    """What the record says after a job was to be ended, and whether that, or the same call before, has ended it."""

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


def ended_of(row: Any, given: str) -> Ended:
    """What a finish that gave this outcome was answered."""
    outcome = given if row.outcome is None else row.outcome
    return Ended(row.job, row.user_id, row.state, row.attempts, outcome, row.ended_ms)


def new_record(new: NewJob, accepted_ms: int, deadline_ms: int) -> Record:
    """The record of a job that was accepted just now."""
    return Record(
        job=new.job,
        scope=new.scope,
        key=new.key,
        fingerprint=new.fingerprint,
        user=new.user,
        name=new.name,
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


def record_of(row: Any) -> Record:
    """A row of the view `job_records`."""
    return Record(
        job=row.job,
        scope=row.scope,
        key=row.key,
        fingerprint=bytes(row.fingerprint),
        user=row.user_id,
        name=row.name,
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
