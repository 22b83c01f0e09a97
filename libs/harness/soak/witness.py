"""The witness of a run: what requests do not show.

Owns:     the place up to which every machine's notes are in the history.
Used by:  the run: notes all the while; logs, records and what Redis holds at the end.
"""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from common.ids import UserId
from common.store import keys
from common.store.redis import Redis
from harness.drills.evidence import Evidence
from harness.drills.laptops import Laptop
from harness.drills.local import LocalTarget
from harness.drills.target import log_events
from harness.soak.history import (
    AnyEvent,
    Delivered,
    History,
    KeysLeft,
    Left,
    Noted,
    Recorded,
    Said,
    SessionBegan,
    Started,
    now_ms,
)
from harness.soak.nemesis import notes_of

NOTES_EVERY_S = 0.05
# Words of a sidecar's log that say what its socket does.
SAYINGS = ("connected", "disconnected", "connection_lost", "draining", "slept", "stopped")

_RECORDS = """
select id::text as job, user_id as user, key, name as tool, args, timeout_s, hinted, state, attempts, outcome,
       late_outcome, (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
       (extract(epoch from deadline_at) * 1000)::bigint as deadline_ms,
       (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests order by id
"""


class Witness:
    """See the module.

    Attributes:
        machines: whom it watches.
        evidence: reads the stores.
    """

    def __init__(self, target: LocalTarget, machines: Sequence[Laptop], redis: Redis, history: History) -> None:
        self._target = target
        self.machines = machines
        self._redis = redis
        self.evidence = Evidence(target.postgres_url, redis)
        self._history = history
        self._read_bytes: dict[Path, int] = {}

    async def run(self) -> None:
        """Follow the notes until cancelled."""
        while True:
            self.read_notes()
            await asyncio.sleep(NOTES_EVERY_S)

    def read_notes(self) -> None:
        """Take over what was noted since the last look."""
        for machine in self.machines:
            path = notes_of(machine)
            if not path.exists():
                continue
            with path.open("rb") as notes:
                notes.seek(self._read_bytes.get(path, 0))
                whole, newline, _ = notes.read().rpartition(b"\n")
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + len(newline)
            for line in whole.decode().splitlines():
                what, _, mark = line.partition(" ")
                self._history.add(Noted(at_ms=now_ms(), user=machine.user, what=what, mark=mark))  # type: ignore[arg-type]  # the tools' and the nemesis' own words

    async def count_open(self) -> int:
        """How many jobs have not ended. Raises: psycopg.OperationalError."""
        async with await psycopg.AsyncConnection.connect(self._target.postgres_url, autocommit=True) as connection:
            cursor = await connection.execute("select count(*) from requests where ended_at is null")
            row = await cursor.fetchone()
            return 0 if row is None else int(row[0])

    async def users_away(self) -> list[str]:
        """Whose machine is not online in Redis now. Raises: StoreUnavailable."""
        users = [machine.user for machine in self.machines]
        return [user for user in users if (await self.evidence.presence(user)).get("state") != "online"]

    async def records(self) -> list[Recorded]:
        """The records of all jobs now, oldest first. Raises: psycopg.OperationalError."""
        async with (
            await psycopg.AsyncConnection.connect(self._target.postgres_url, autocommit=True) as connection,
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            await cursor.execute(_RECORDS)
            return [Recorded(at_ms=now_ms(), **row) for row in await cursor.fetchall()]

    async def queue(self, user: str) -> Left:
        """What Redis holds of a user's jobs now. Raises: StoreUnavailable."""
        left = await self.evidence.left(user)
        (groups,) = await self._redis.send_many([("XINFO", "GROUPS", keys.jobs(UserId(user)))])
        return Left(
            at_ms=now_ms(),
            user=user,
            entries=left.entries,
            pending=left.pending,
            indexed=left.indexed,
            groups=0 if isinstance(groups, Exception) else len(groups),  # no stream, no group
            consumers=left.consumers,
        )

    async def keys(self, user: str) -> KeysLeft:
        """Which keys Redis holds of a user now. Raises: StoreUnavailable."""
        return KeysLeft(at_ms=now_ms(), user=user, names=await self.evidence.keys_left(user))

    async def read_logs(self) -> None:
        """What sidecars and workers logged over the whole run, into the history."""
        for machine in self.machines:
            for event in _read_sidecar(machine.user, await machine.logs()):
                self._history.add(event)
        for worker in self._target.workers:
            for line in log_events(worker.service.log.read_text()):
                if line.get("event") == "session_began":
                    self._history.add(
                        SessionBegan(
                            at_ms=_ms(line["ts"]), worker=worker.name, user=line["user"], session=line["session"]
                        )
                    )


def _read_sidecar(user: str, text: str) -> Iterator[AnyEvent]:
    for line in log_events(text):
        name = line.get("event")
        if name in SAYINGS:
            yield Said(at_ms=_ms(line["timestamp"]), user=user, what=name, session=line.get("session", ""))
        elif name == "job_started":
            yield Started(at_ms=_ms(line["timestamp"]), user=user, job=line["job"])
        elif name == "job_delivered":
            yield _delivered(user, line)


def _delivered(user: str, line: dict[str, Any]) -> Delivered:
    return Delivered(
        at_ms=_ms(line["timestamp"]),
        user=user,
        job=line["job"],
        frame=line["frame"],
        attempt=line["attempt"],
        decision=line["decision"],
    )


def _ms(timestamp: str) -> int:
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
