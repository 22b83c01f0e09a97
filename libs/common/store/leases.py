"""Leases: one owner per run, for a limited time; and which relays live.

Owns:     `stream_owner:{run}`, `liveness_heartbeat:{run}`, `source_status:{run}`, `relay:members` (names in `keys`).
Promises: a run is taken only while nobody else holds it, and whoever held it is fenced in the same script; a lease is
          refreshed, put back or released only by its owner. Epochs come from Postgres (`runs.mint_epochs`).
Used by:  the relay (take, refresh, release, join, leave), the gateway (look).

All times are Redis's own: no relay's clock plays a part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from common.ids import RelayId, RunId
from common.store import keys
from common.store.batch import Batcher
from common.store.eventlog import EventId
from common.store.redis import Call, Redis, script

Verdict = Literal["kept", "behind", "lost", "unknown"]

_VERDICTS: dict[bytes, Verdict] = {b"kept": "kept", b"behind": "behind", b"lost": "lost"}
_TTL_MS = int(keys.LEASE_TTL_S * 1000)


class Point(msgspec.Struct, frozen=True):
    """Where a source resumes: the last id that its upstream gave, and how many events it has sent so far."""

    uid: str = ""
    count: int = 0


class Taken(NamedTuple):
    """A run that this relay owns from now on, under `epoch`.

    Attributes:
        tail: what `Writer` appends after.
        first_seq: number just before the run's first event, 0 when the beginning of the stream is gone. To be written
            into the run's record (`runs.set_first_seq`, which keeps the first one) before the first append.
        points: where each source resumes; those of Postgres where the stream knew none.
        ended: sources that have ended already -> data of their `towline.source.ended` event.
        end: the state in which the run has ended; then only Postgres has to be told. Empty otherwise.
        end_data: data of its last event.
    """

    epoch: int
    tail: EventId
    first_seq: int
    points: Mapping[str, Point]
    ended: Mapping[str, bytes] = {}
    end: str = ""
    end_data: bytes = b""


class Refused(NamedTuple):
    """The run was not taken. `owner`: who has it; empty when a newer epoch has written (mint another, try again)."""

    owner: str


class SourceStatus(msgspec.Struct, frozen=True):
    """What an owner says of one source. Times: milliseconds since the Unix epoch, by the relay's clock.

    Attributes:
        live_ms, progress_ms: None when there was none that is remembered.
        failure: why the last attempt brought nothing, in words; empty once a connection has brought something.
    """

    connected: bool
    live_ms: int | None
    progress_ms: int | None
    verdict: Literal["active", "stalled", "orphaned", "ended"]
    failure: str = ""


class Held(NamedTuple):
    """A run at a refresh, as its owner knows it.

    Attributes:
        tail: `Writer.tail`; an append that is under way may be ahead of it.
        alive: a frame of any source came since the last refresh.
        status: what `look` gives to gateways: a `SourceStatus` by source, as JSON.
    """

    run: RunId
    epoch: int
    tail: EventId
    alive: bool
    status: bytes = b""


class Look(NamedTuple):
    """What Redis knows of a run that is followed. Ages in seconds, None when longer ago than it remembers."""

    owner: str | None
    live_age_s: float | None
    progress_age_s: float | None
    status: bytes


class Leases:
    """The leases of one relay."""

    def __init__(self, redis: Redis, relay: RelayId) -> None:
        self._redis = redis
        self._relay = relay
        self._takes: Batcher[Call, Any] = Batcher(redis.run_many)

    async def take(self, run: RunId, epoch: int, saved: Mapping[str, Point]) -> Taken | Refused:
        """Take a run: lease, mark, tail and points in one script (rules 21, 22); many share a round trip.

        Also how an owner goes on under a new epoch after `behind`, `TailLost`, or a take of unknown outcome.

        Args:
            epoch: freshly minted. Repeating a take with the same one is harmless.
            saved: points of all sources as Postgres has them.

        Raises:
            StoreUnavailable: it may be taken. Take again, or let it lapse.
        """
        points = [part for source, point in saved.items() for part in (source, f"{point.count} {point.uid}")]
        answer = await self._takes.submit(
            Call(
                script("take_run"),
                [keys.owner(run), keys.events(run), keys.events_resume(run)],
                [self._relay, epoch, _TTL_MS, keys.EVENTS_TTL_S, *points],
            )
        )
        if isinstance(answer, Exception):
            raise answer
        return _taken(epoch, answer)

    async def refresh(self, held: Sequence[Held]) -> list[Verdict]:
        """Refresh the leases of all runs in one round trip; says for each what its owner must do (rule 25).

        Returns:
            `kept`: go on (a lease that was merely gone is put back). `behind`: the stream lost the tail: stop
            appending, mint a new epoch, take again, reopen the sources. `lost`: another has the run: stop.
            `unknown`: Redis refused this one; ask again.

        Raises:
            StoreUnavailable: no answer; some or all may have been refreshed.
        """
        if not held:
            return []
        calls = [
            Call(
                script("refresh_lease"),
                [
                    keys.owner(h.run),
                    keys.events(h.run),
                    keys.events_resume(h.run),
                    keys.liveness(h.run),
                    keys.source_status(h.run),
                ],
                [
                    self._lease(h.epoch),
                    h.epoch,
                    h.tail.seq,
                    _TTL_MS,
                    int(h.alive),
                    h.status,
                    keys.LIVENESS_TTL_S,
                    keys.EVENTS_TTL_S,
                ],
            )
            for h in held
        ]
        answers = await self._redis.run_many(calls)
        return ["unknown" if isinstance(answer, Exception) else _VERDICTS[answer] for answer in answers]

    async def owners(self, runs: Sequence[RunId]) -> dict[RunId, RelayId | None]:
        """Who has each run now; None: it is free. One command for all. Raises: StoreUnavailable."""
        if not runs:
            return {}
        (answer,) = await self._redis.send_many([("MGET", *map(keys.owner, runs))])
        if isinstance(answer, Exception):
            raise answer
        return {
            run: RelayId(lease.decode().rpartition(":")[0]) if lease else None
            for run, lease in zip(runs, answer, strict=True)
        }

    async def release(self, leases: Sequence[tuple[RunId, int]]) -> None:
        """Give back runs held under these epochs, as far as they still are. Call after their last append.

        Raises:
            StoreUnavailable: repeat it, or let them lapse.
        """
        calls = [Call(script("release_lease"), [keys.owner(run)], [self._lease(epoch)]) for run, epoch in leases]
        if calls:
            for answer in await self._redis.run_many(calls):
                if isinstance(answer, Exception):
                    raise answer

    async def join(self) -> list[RelayId]:
        """Say that this relay lives, for `LEASE_TTL_S` from now; returns all living ones. Raises: StoreUnavailable."""
        answer = await self._redis.run(script("join"), [keys.RELAYS], [self._relay, _TTL_MS, keys.RELAYS_TTL_S])
        return sorted(RelayId(member.decode()) for member in answer)

    async def leave(self) -> None:
        """Take this relay off the list. Raises: StoreUnavailable."""
        (answer,) = await self._redis.send_many([("ZREM", keys.RELAYS, self._relay)])
        if isinstance(answer, Exception):
            raise answer

    def _lease(self, epoch: int) -> str:
        return f"{self._relay}:{epoch}"


async def look(redis: Redis, runs: Sequence[RunId]) -> dict[RunId, Look]:
    """What Redis knows of some runs, in one round trip. Raises: StoreUnavailable."""
    commands: list[tuple[Any, ...]] = []
    for run in runs:
        live, progress = keys.liveness(run), keys.progress(run)
        commands += [("GET", keys.owner(run)), ("GET", keys.source_status(run)), ("PTTL", live), ("PTTL", progress)]
    answers = await redis.send_many(commands) if commands else []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    looks = {}
    for i, run in enumerate(runs):
        lease, status, live_ms, progress_ms = answers[4 * i : 4 * i + 4]
        looks[run] = Look(
            owner=lease.decode().rpartition(":")[0] if lease else None,
            live_age_s=_age_s(live_ms, keys.LIVENESS_TTL_S),
            progress_age_s=_age_s(progress_ms, keys.PROGRESS_TTL_S),
            status=status or b"",
        )
    return looks


def _age_s(left_ms: int, ttl_s: int) -> float | None:
    return None if left_ms < 0 else max(ttl_s - left_ms / 1000, 0.0)


def _taken(epoch: int, answer: Any) -> Taken | Refused:
    if answer[0] != b"taken":
        return Refused(answer[1].decode().rpartition(":")[0] if answer[0] == b"held" else "")
    _, tail, first_seq, flat, end_data = answer
    parsed = EventId.parse(tail.decode())
    assert parsed is not None
    fields = dict(flat) if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    points, ended = {}, {}
    for key, value in fields.items():
        name = key.decode()
        if name.startswith(".ended:"):
            ended[name.removeprefix(".ended:")] = value
        elif not name.startswith("."):
            count, _, uid = value.decode().partition(" ")
            points[name] = Point(uid, int(count))
    return Taken(epoch, parsed, int(first_seq), points, ended, fields.get(b".end", b"").decode(), end_data)
