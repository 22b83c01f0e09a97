"""What the stores hold, read around everything that a drill cuts: records in Postgres, what is left in Redis.

Used by:  the scene, which holds it against what callers were told and what tools and machines noted.
"""

from typing import Any, NamedTuple

import psycopg
from psycopg.rows import class_row

from common.errors import StoreUnavailable
from common.ids import UserId
from common.store import keys
from common.store.queues import read_stream
from common.store.redis import Redis

_RECORDS = """
select id::text as job, key, state, attempts, outcome, late_outcome,
       (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests where user_id = %s
"""


class Row(NamedTuple):
    """A job's record. `late_outcome`: what a machine said after the end."""

    job: str
    key: str
    state: str
    attempts: int
    outcome: str | None
    late_outcome: str | None
    ended_ms: int | None


class Left(NamedTuple):
    """What Redis holds of a user's jobs."""

    entries: int
    pending: int
    indexed: int
    consumers: int

    def __str__(self) -> str:
        return f"entries {self.entries}, pending {self.pending}, indexed {self.indexed}, consumers {self.consumers}"


class Evidence:
    """Reads both stores. Every method raises StoreUnavailable when one is away."""

    def __init__(self, postgres_url: str, redis: Redis) -> None:
        self._postgres_url = postgres_url
        self._redis = redis

    async def records(self, user: str) -> list[Row]:
        """All of a user's jobs."""
        # A connection for each look: a drill may have restarted the server since the last one.
        try:
            async with (
                await psycopg.AsyncConnection.connect(self._postgres_url, autocommit=True) as connection,
                connection.cursor(row_factory=class_row(Row)) as cursor,
            ):
                await cursor.execute(_RECORDS, [user])
                return await cursor.fetchall()
        except psycopg.OperationalError as error:
            raise StoreUnavailable("Postgres does not answer") from error

    async def presence(self, user: str) -> dict[str, str]:
        """Presence as it stands in Redis; empty when there is none."""
        found = await self._ask("HGETALL", keys.presence(UserId(user)))
        return {name.decode(): value.decode() for name, value in found.items()}

    async def born(self) -> str:
        """When this Redis was first used; changes when everything in it was lost."""
        found = await self._ask("GET", keys.BORN)
        return "" if found is None else found.decode()

    async def redis_process(self) -> str:
        """Which process of Redis answers; another one after a restart."""
        lines: list[bytes] = (await self._ask("INFO", "server")).splitlines()
        return next(line.decode() for line in lines if line.startswith(b"run_id:"))

    async def left(self, user: str) -> Left:
        """What is left of a user's jobs in Redis."""
        stream = await read_stream(self._redis, UserId(user))
        fields = await self._ask("HKEYS", keys.jobs_index(UserId(user)))
        indexed = sum(name != b"bytes" for name in fields)
        return Left(stream.entries, stream.pending, indexed, len(stream.consumers))

    async def keys_left(self, user: str) -> list[str]:
        """Which of a user's keys exist (but the epoch, which outlives its sessions)."""
        names = [make(UserId(user)) for make in (keys.presence, keys.tools, keys.jobs, keys.jobs_index)]
        return [name for name in names if await self._ask("EXISTS", name)]

    async def _ask(self, *command: str) -> Any:
        (answer,) = await self._redis.send_many([command])
        if isinstance(answer, Exception):
            raise answer
        return answer
