"""Queues as an operator looks at them: how many jobs are open, how old they are, and where one user's stand in Redis.

Owns:     nothing; it only reads, and asks for nothing by scanning.
Used by:  `towline queues`.
"""

from typing import Any, NamedTuple

from common.errors import StoreUnavailable
from common.ids import UserId
from common.store import keys
from common.store.postgres import Postgres
from common.store.redis import Redis


class Depth(NamedTuple):
    """Open jobs in one state; the age of the oldest in seconds."""

    state: str
    jobs: int
    oldest_s: float


class Consumer(NamedTuple):
    """A session in the group of a user's stream. `pending`: entries it holds; `idle_ms`: since its last read."""

    session: str
    pending: int
    idle_ms: int


class UserStream(NamedTuple):
    """A user's stream of outstanding jobs.

    Attributes:
        entries: outstanding jobs, at most `keys.QUEUE_ENTRIES_MAX` and those that were accepted at the same time.
        bytes: their size.
        pending: how many of them a session holds; the rest is untaken.
        consumers: current session, and older ones that still hold something.
    """

    entries: int
    bytes: int
    pending: int
    consumers: list[Consumer]


async def read_depths(postgres: Postgres, user: UserId | None) -> list[Depth]:
    """Count the open jobs of one user, or of all. Raises: StoreUnavailable."""
    if user is None:
        rows = await postgres.fetch("queue_depths")
    else:
        rows = await postgres.fetch("open_jobs_of_user", {"user": user})
    return sorted(Depth(row.state, row.depth, row.oldest_s) for row in rows)


async def read_stream(redis: Redis, user: UserId) -> UserStream:
    """Look at a user's stream; all zeros if there is none. Raises: StoreUnavailable."""
    stream = keys.jobs(user)
    entries, size, groups, consumers = await redis.send_many(
        [
            ("XLEN", stream),
            ("HGET", keys.jobs_index(user), "bytes"),
            ("XINFO", "GROUPS", stream),
            ("XINFO", "CONSUMERS", stream, keys.GROUP),
        ]
    )
    for answer in (entries, size, groups, consumers):
        if isinstance(answer, StoreUnavailable):
            raise answer
    return UserStream(
        entries=entries,
        bytes=int(size or 0),
        pending=sum(group[b"pending"] for group in _rows(groups)),
        consumers=[Consumer(row[b"name"].decode(), row[b"pending"], row[b"idle"]) for row in _rows(consumers)],
    )


def _rows(answer: Any) -> list[dict[bytes, Any]]:
    if isinstance(answer, Exception):
        if "no such key" in str(answer) or str(answer).startswith("NOGROUP"):
            return []  # nothing was ever queued, or it went with its user
        raise answer
    # Maps under RESP3, flat lists under RESP2.
    return [row if isinstance(row, dict) else dict(zip(row[::2], row[1::2], strict=True)) for row in answer]
