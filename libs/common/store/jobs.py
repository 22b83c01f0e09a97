"""Jobs in Redis: from the door to the session that holds the user's socket, and away again.

Owns:     `bridge:jobs`, `bridge:jobs_index`, `bridge:result`, `bridge:waiters`, `bridge:cancels` (names in `keys`).
Promises: an entry per job; only the newest session takes; what is settled is gone. Redis is disposable: everything here
          is made anew from `requests`.
Used by:  the gateway and the worker's tool calls (ask, enqueue, register_waiter, ask_to_stop), the worker's pump
          (take) and outcomes (settle), the sweeper (missing, enqueue_many, unsettled, settle), `cancels` (settle,
          ask_to_stop).
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import structlog

from common.errors import StoreUnavailable
from common.ids import GatewayId, JobId, SessionId, UserId, is_uuid
from common.store import keys
from common.store.batch import Batcher
from common.store.records import End, Ended, Open, Record
from common.store.redis import Call, Redis, script
from towline.wire import json

logger = structlog.get_logger(__name__)

# Up to the last year that RFC 3339, and so a frame, can write.
TimeMs = Annotated[int, msgspec.Meta(ge=0, lt=253_402_300_800_000)]


class Entry(msgspec.Struct, frozen=True):
    """What a session needs to deliver a job. Times in milliseconds of Postgres's clock."""

    job: JobId
    key: str
    name: str
    args: msgspec.Raw
    accepted_ms: TimeMs
    deadline_ms: TimeMs
    timeout_s: float
    hinted: bool
    traceparent: str = ""


class Taken(NamedTuple):
    """An entry that a session holds from now on. `claimed`: it had been delivered before, or may have been."""

    entry: Entry
    claimed: bool
    size: int


class Seen(msgspec.Struct, frozen=True):
    """Presence as the door saw it. Times in milliseconds; `age_ms`: how old this Redis is."""

    presence: dict[str, str]
    hint: str
    entries: int
    bytes: int
    age_ms: int

    @property
    def has_room(self) -> bool:
        """Whether the user's queue takes another job."""
        return self.entries < keys.QUEUE_ENTRIES_MAX and self.bytes < keys.QUEUE_BYTES_MAX


# Of takes and serves, in the order in which they are made. A session lives in one process, so its numbers grow, and one
# that was given up and runs after a later serve (a connection that broke kept it) is refused.
CALL_NUMBERS = itertools.count(1)

_entry_encoder = msgspec.json.Encoder()
_entry_decoder = msgspec.json.Decoder(Entry)


class Jobs:
    """The job streams, with their batched callers."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._asks: Batcher[tuple[UserId, str], Seen | Exception] = Batcher(self._ask_batch)
        self._calls: Batcher[Call, Any] = Batcher(redis.run_many)

    async def ask(self, user: UserId, tool: str) -> Seen:
        """Look at presence, tool and room in one round trip (shared by all that ask meanwhile).

        Raises:
            StoreUnavailable: nothing is known.
        """
        seen = await self._asks.submit((user, tool))
        if isinstance(seen, Exception):
            raise seen
        return seen

    async def _ask_batch(self, items: Sequence[tuple[UserId, str]]) -> Sequence[Seen | Exception]:
        calls = [
            Call(
                script("ask"),
                [keys.presence(u), keys.tools(u), keys.jobs(u), keys.jobs_index(u), keys.BORN],
                [tool],
            )
            for u, tool in items
        ]
        return [_seen(answer) for answer in await self._redis.run_many(calls)]

    async def enqueue(self, record: Record, args: str, gateway: GatewayId | None) -> bool:
        """Put an accepted job before its machine, and register the gateway as waiting; safe to repeat.

        Args:
            args: the job's own, as JSON text.

        Returns:
            False when the job has ended already: read its record.

        Raises:
            StoreUnavailable: it may have been enqueued; the sweeper makes sure that it is.
        """
        answer: bytes = await self._call(_enqueue_call(record, args, gateway))
        return answer != b"settled"

    async def enqueue_many(self, jobs: Sequence[tuple[Record, str]]) -> int:
        """Enqueue what is not there (the sweeper's net), each with its arguments; returns how many were missing.

        A user whose keys are broken is logged and passed over: nobody else waits for them to be mended.

        Raises: StoreUnavailable.
        """
        answers = await self._redis.run_many([_enqueue_call(record, args, None) for record, args in jobs])
        _pass_over_faults((record.user for record, _ in jobs), answers)
        return sum(answer == b"added" for answer in answers)

    async def register_waiter(self, jobs: Sequence[JobId], gateway: GatewayId) -> None:
        """Register a gateway that joins running jobs; it reads their records afterwards (rule 15).

        Raises: StoreUnavailable (it may be registered; the rereads find what it is not told).
        """
        names = [keys.waiters(job) for job in jobs]
        commands = [part for name in names for part in (("SADD", name, gateway), ("EXPIRE", name, keys.WAITERS_TTL_S))]
        for answer in await self._redis.send_many(commands) if commands else []:
            if isinstance(answer, Exception):
                raise answer

    async def settle(self, record: Record | Ended) -> None:
        """Publish a terminal record and remove all of the job's entries; idempotent, anyone may.

        Raises:
            StoreUnavailable: repeat it, or leave it to the next claim or sweep.
        """
        if record.ended_ms is None:
            raise ValueError(f"job {record.job} has not ended")
        await self._call(_settle_call(record))

    async def missing(self, open_jobs: Sequence[Open]) -> list[JobId]:
        """Which of these open jobs have no entry; users are passed over as above. Raises: StoreUnavailable."""
        return [job for job, has_entry in await self._look_up(open_jobs) if not has_entry]

    async def ask_to_stop(self, job: JobId, user: UserId) -> None:
        """Have the machine that runs a job asked to stop it, now or when it is connected; it need not heed.

        Raises:
            StoreUnavailable: it may or may not be asked; safe to repeat.
        """
        await self._call(
            Call(
                script("cancel"),
                [keys.cancels(user), keys.presence(user), keys.result(job)],
                [job, user, keys.QUEUE_TTL_S, keys.CONTROL_PREFIX, keys.STREAM_LEN_MAX, keys.STREAM_TTL_S],
            )
        )

    async def unsettled(self, ends: Sequence[End]) -> list[JobId]:
        """Which of these ended jobs still have an entry; users are passed over as above. Raises: StoreUnavailable."""
        return [job for job, has_entry in await self._look_up(ends) if has_entry]

    async def _look_up(self, jobs: Sequence[Open | End]) -> list[tuple[JobId, bool]]:
        """Each job, and whether it has an entry; one question for each user."""
        of_user: dict[UserId, list[JobId]] = {}
        for each in jobs:
            of_user.setdefault(each.user, []).append(each.job)
        answers = await self._redis.send_many([("HMGET", keys.jobs_index(user), *ids) for user, ids in of_user.items()])
        _pass_over_faults(of_user, answers)
        found = []
        for ids, answer in zip(of_user.values(), answers, strict=True):
            if not isinstance(answer, Exception):
                found += [(job, entry is not None) for job, entry in zip(ids, answer, strict=True)]
        return found

    async def _call(self, call: Call) -> Any:
        answer = await self._calls.submit(call)
        if isinstance(answer, Exception):
            raise answer
        return answer


def take_call(user: UserId, epoch: int, session: SessionId, free: int) -> Call:
    """The take of one session; see `parse_take`. Many go out in one pipeline."""
    return Call(
        script("take"),
        [keys.epoch(user), keys.jobs(user), keys.presence(user)],
        [epoch, keys.GROUP, session, free, next(CALL_NUMBERS)],
    )


def parse_take(answer: Any) -> list[Taken] | None:
    """What a take brought, in stream order.

    None: assert, and so claim. Another session has the user now; or an entry cannot be read, which an assert removes.
    """
    if answer[0] == b"refused":
        return None
    flat = answer[1]
    taken = [_taken(flat[i + 1], claimed=False) for i in range(0, len(flat), 2)]
    readable = [one for one in taken if one is not None]
    return readable if len(readable) == len(taken) else None


def parse_served(flat: list[bytes]) -> tuple[list[Taken], list[str]]:
    """The entries that an assert claimed and took, in stream order, and the ids of those that cannot be read.

    `presence.parse_serve` has the rest.
    """
    readable, unreadable = [], []
    for i in range(0, len(flat), 3):
        if taken := _taken(flat[i + 1], claimed=flat[i + 2] == b"1"):
            readable.append(taken)
        else:
            unreadable.append(flat[i].decode())
    return readable, unreadable


def terminal_text(record: Record | Ended) -> str:
    """A terminal record as published: state, attempts, end and the outcome's own bytes."""
    head = json.dumps({"state": record.state, "attempts": record.attempts, "ended_ms": record.ended_ms}).decode()
    return f'{head[:-1]},"outcome":{record.outcome}}}'


def _taken(body: bytes, *, claimed: bool) -> Taken | None:
    """None: nobody can deliver this. It must cost its own user's session nothing, and no other one either."""
    try:
        body.decode()  # arguments are not looked into, and go into a frame, which is text
        entry = _entry_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Postgres refuses any other id, and with it all that is written in the same batch.
    return Taken(entry, claimed, len(body)) if is_uuid(entry.job) else None


def _pass_over_faults(users: Iterable[UserId], answers: Sequence[Any]) -> None:
    """Log each user whose call has failed, once. Raises: StoreUnavailable, which is nobody's own."""
    faults: dict[UserId, Exception] = {}
    for user, answer in zip(users, answers, strict=True):
        if isinstance(answer, StoreUnavailable):
            raise answer
        if isinstance(answer, Exception):
            faults.setdefault(user, answer)
    for user, fault in faults.items():
        logger.error("user_passed_over", user=user, exc_info=fault)


def _enqueue_call(record: Record, args: str, gateway: GatewayId | None) -> Call:
    user, job = record.user, record.job
    body = _entry_encoder.encode(
        Entry(
            job=job,
            key=record.key,
            name=record.name,
            args=msgspec.Raw(args.encode()),
            accepted_ms=record.accepted_ms,
            deadline_ms=record.deadline_ms,
            timeout_s=record.timeout_s,
            hinted=record.hinted,
            traceparent=record.traceparent,
        )
    )
    return Call(
        script("enqueue"),
        [keys.jobs(user), keys.jobs_index(user), keys.waiters(job), keys.presence(user), keys.result(job)],
        [
            job,
            gateway or "",
            keys.WAITERS_TTL_S,
            keys.GROUP,
            user,
            keys.CONTROL_PREFIX,
            keys.STREAM_LEN_MAX,
            keys.STREAM_TTL_S,
            keys.QUEUE_TTL_S,
            body,
        ],
    )


def _settle_call(record: Record | Ended) -> Call:
    user, job = record.user, record.job
    return Call(
        script("settle"),
        [
            keys.jobs(user),
            keys.jobs_index(user),
            keys.result(job),
            keys.waiters(job),
            keys.presence(user),
            keys.cancels(user),
        ],
        [
            job,
            keys.GROUP,
            terminal_text(record),
            keys.RESULT_TTL_S,
            keys.REPLIES_PREFIX,
            keys.REPLY_INLINE_BYTES_MAX,
            keys.STREAM_LEN_MAX,
            keys.STREAM_TTL_S,
        ],
    )


def _seen(answer: Any) -> Seen | Exception:
    if isinstance(answer, Exception):
        return answer
    flat, hint, entries, size, age_ms = answer
    if isinstance(flat, dict):
        presence = {k.decode(): v.decode() for k, v in flat.items()}
    else:
        presence = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
    return Seen(presence, hint.decode(), entries, size, age_ms)
