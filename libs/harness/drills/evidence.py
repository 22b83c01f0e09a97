"""What the stores hold, read around everything that a drill cuts: records in Postgres, what is in Redis.

Used by:  the scene, which holds it against what callers were told and what tools and machines noted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from common.errors import StoreUnavailable
from common.ids import RunId, UserId
from common.store import keys
from common.store.queues import read_stream
from common.store.redis import Redis
from towline.wire import events

_RECORDS = """
select id::text as job, key, state, attempts, outcome, late_outcome,
       (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests where user_id = %s
"""

_USAGE_ROWS = "select count(*) from usage_events where turn = %s"
_CLAIMED_BY = """
select r.claimed_by from turns t join absurd.r_turns r on r.task_id = t.task
where t.turn = %s and r.state = 'running' order by r.attempt desc limit 1
"""
# Tasks, and attempts of them, that are to be run still.
_OPEN_TASKS = """
select (select count(*) from absurd.t_turns k where k.state in ('pending', 'sleeping', 'running')
          and (k.params->>'turn')::uuid = any (%(turns)s::uuid[]))
     + (select count(*) from absurd.r_turns r join absurd.t_turns k using (task_id)
        where r.state in ('pending', 'sleeping', 'running') and (k.params->>'turn')::uuid = any (%(turns)s::uuid[]))
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


class Lease(NamedTuple):
    """Who follows a run."""

    relay: str
    epoch: int


class Evidence:
    """Reads both stores. Every method raises StoreUnavailable when one is away."""

    def __init__(self, postgres_url: str, redis: Redis) -> None:
        self._postgres_url = postgres_url
        self._redis = redis

    async def records(self, user: str) -> list[Row]:
        """All of a user's jobs."""
        return [Row(*row) for row in await self._select(_RECORDS, [user])]

    async def usage_rows(self, turn: str) -> int:
        """How many usage rows a turn has."""
        ((count,),) = await self._select(_USAGE_ROWS, [turn])
        return int(count)

    async def claimed_by(self, turn: str) -> str:
        """Which worker claims a turn, by the name that it gave itself; empty: none."""
        rows = await self._select(_CLAIMED_BY, [turn])
        return str(rows[0][0]) if rows else ""

    async def open_tasks(self, turns: Sequence[str]) -> int:
        """How many tasks of these turns, and attempts of those, are there still to be run."""
        ((count,),) = await self._select(_OPEN_TASKS, {"turns": list(turns)})
        return int(count)

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

    async def lease(self, run: str) -> Lease | None:
        """Who follows a run now; None when nobody does."""
        found = await self._ask("GET", keys.owner(RunId(run)))
        if found is None:
            return None
        relay, _, epoch = found.decode().rpartition(":")
        return Lease(relay, int(epoch))

    async def oldest_event(self, run: str) -> str:
        """Id of the oldest event that is still in a run's log; empty when there is none."""
        entries = await self._ask("XRANGE", keys.events(RunId(run)), "-", "+", "COUNT", "1")
        return entries[0][0].decode() if entries else ""

    async def terminals(self, run: str) -> int:
        """How many last events a run's log holds."""
        entries = await self._ask("XRANGE", keys.events(RunId(run)), "-", "+")
        return sum(events.RUN_ENDED.encode() in fields for _, fields in entries)

    async def _select(self, query: str, params: Sequence[object] | Mapping[str, object]) -> list[tuple[Any, ...]]:
        # A connection for each look: a drill may have restarted the server since the last one.
        try:
            async with await psycopg.AsyncConnection.connect(self._postgres_url, autocommit=True) as connection:
                return await (await connection.execute(query, params)).fetchall()
        except psycopg.OperationalError as error:
            raise StoreUnavailable("Postgres does not answer") from error

    async def _ask(self, *command: str) -> Any:
        (answer,) = await self._redis.send_many([command])
        if isinstance(answer, Exception):
            raise answer
        return answer
