"""Runs: what is to be followed, and how it ended; the truth that streams and leases are made from.

Owns:     the tables `runs` and `run_sources`, the channel `towline_runs`.
Promises: one definition per run id, for ever; one end, never replaced; an owner that was overtaken writes nothing over
          its successor. Every call is safe to repeat.
Used by:  the gateway (follow, read, list, stop), the relay (all else).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from common.ids import RunId
from common.store.leases import Point
from common.store.listener import run_listener
from common.store.postgres import Postgres
from towline.wire.runs import Resume, RunState

CHANNEL = "towline_runs"

Health = Literal["active", "stalled", "orphaned"]
End = Literal["completed", "failed", "stopped", "expired"]


class NewSource(NamedTuple):
    """A source as the caller gives it. `secrets`: its headers, encrypted; None when none were given."""

    source: str
    url: str
    secrets: bytes | None
    resume: Resume
    idle_timeout_s: float


class NewRun(NamedTuple):
    """A run as the caller gives it, its sources in his order. Times in seconds."""

    run: RunId
    sources: Sequence[NewSource]
    progress_types: Sequence[str]
    terminal_types: Sequence[str]
    stall_after_s: float
    max_duration_s: float


class Source(msgspec.Struct, frozen=True):
    """A source's record.

    Attributes:
        secrets: encrypted headers, see `process.secrets`; None without any.
        point: where it resumes, as last saved; the one beside the stream is newer.
        state: how it ended, with a slug and a readable text; None before.
    """

    source: str
    url: str
    secrets: bytes | None
    resume: Resume
    idle_timeout_s: float
    point: Point
    state: End | None
    reason: str | None
    detail: str | None


class Run(msgspec.Struct, frozen=True):
    """A run's record. Times `_ms` are milliseconds of Postgres's clock.

    Attributes:
        age_ms: how long ago it was first followed, when this was read.
        first_seq: number just before its first event; None until an owner has begun.
        last_seq: number of its last event; None before the end.
        epoch: the newest minted for it.
    """

    run: RunId
    sources: Sequence[Source]
    progress_types: Sequence[str]
    terminal_types: Sequence[str]
    stall_after_s: float
    max_duration_s: float
    state: RunState
    reason: str | None
    created_ms: int
    ended_ms: int | None
    age_ms: int
    first_seq: int | None
    last_seq: int | None
    epoch: int

    @property
    def terminal(self) -> bool:
        """Whether the run has ended."""
        return self.ended_ms is not None


class OpenRun(NamedTuple):
    """A run that should be followed."""

    run: RunId
    state: RunState
    created_ms: int


class SavedPoint(NamedTuple):
    """A resume point to be saved by the owner of an epoch."""

    run: RunId
    epoch: int
    source: str
    point: Point


class Runs:
    """The tables."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    # ---- the door

    async def follow(self, new: NewRun) -> tuple[Run, Literal["created", "same", "other", "ended"]]:
        """Have a run followed, or find what its id stands for already.

        Returns:
            The record, and `created`; `same`: it is followed already, as given (but for the headers: the newest
            count); `other`: as something else; `ended`: its id is used up.

        Raises:
            StoreUnavailable: it may be followed; repeat it.
        """
        params = {
            "run": new.run,
            "progress_types": list(new.progress_types),
            "terminal_types": list(new.terminal_types),
            "stall_after_s": new.stall_after_s,
            "max_duration_s": new.max_duration_s,
            "sources": [s.source for s in new.sources],
            "urls": [s.url for s in new.sources],
            "secrets": [s.secrets for s in new.sources],
            "resumes": [s.resume for s in new.sources],
            "idles": [s.idle_timeout_s for s in new.sources],
        }
        while True:
            created = bool(await self._postgres.fetch("follow_run", params))
            run = await self.read(new.run)
            if run is not None:
                break  # None: forgotten a moment ago, and now it is new
        if created:
            return run, "created"
        if run.terminal:
            return run, "ended"
        if not _is_same(run, new):
            return run, "other"
        if any(s.secrets for s in new.sources):
            await self._postgres.fetch("replace_secrets", params)
        return run, "same"

    async def read(self, run: RunId) -> Run | None:
        """A run's record. Raises: StoreUnavailable."""
        return (await self.read_many([run])).get(run)

    async def read_many(self, runs: Sequence[RunId]) -> dict[RunId, Run]:
        """The records of some runs; unknown ones are left out. Raises: StoreUnavailable."""
        if not runs:
            return {}
        by_run: dict[RunId, list[Any]] = {}
        for row in await self._postgres.fetch("read_runs", {"runs": list(runs)}):
            by_run.setdefault(row.run, []).append(row)
        return {run: _run(rows) for run, rows in by_run.items()}

    async def list_page(self, *, state: str | None, before: tuple[int, RunId] | None, limit: int) -> list[Run]:
        """Runs, newest first, before another one (its `created_ms` and id). Raises: StoreUnavailable."""
        before_ms, before_run = before or (None, None)
        params = {"state": state, "before_ms": before_ms, "before_run": before_run, "limit": limit}
        ids = [row.run for row in await self._postgres.fetch("list_runs", params)]
        found = await self.read_many(ids)
        return [found[run] for run in ids if run in found]

    async def request_stop(self, run: RunId) -> Run | None:
        """Have a run stopped by its owner, unless it has ended; returns its record, None when there is none.

        Raises: StoreUnavailable (repeat it).
        """
        await self._postgres.fetch("stop_run", {"run": run})
        return await self.read(run)

    # ---- relays

    async def open_runs(self) -> list[OpenRun]:
        """What should be followed. Raises: StoreUnavailable."""
        return [OpenRun(RunId(r.run), r.state, r.created_ms) for r in await self._postgres.fetch("open_runs")]

    async def mint_epochs(self, runs: Sequence[RunId]) -> dict[RunId, int]:
        """A new epoch for each run, greater than any before; ended and unknown runs are left out: do not take them.

        Raises: StoreUnavailable (some may have been minted; mint again).
        """
        if not runs:
            return {}
        rows = await self._postgres.fetch("mint_epochs", {"runs": sorted(set(runs))})
        return {RunId(row.run): row.epoch for row in rows}

    async def set_first_seq(self, run: RunId, seq: int) -> None:
        """Keep `Taken.first_seq`; only the first one counts. Raises: StoreUnavailable."""
        await self._postgres.fetch("begin_run", {"run": run, "seq": seq})

    async def save_points(self, points: Sequence[SavedPoint]) -> None:
        """Save what has been appended, for when Redis is lost. Points of overtaken owners are dropped.

        Raises: StoreUnavailable.
        """
        if not points:
            return
        params = {
            "runs": [p.run for p in points],
            "epochs": [p.epoch for p in points],
            "sources": [p.source for p in points],
            "uids": [p.point.uid for p in points],
            "counts": [p.point.count for p in points],
        }
        await self._postgres.fetch("save_points", params)

    async def set_health(self, run: RunId, epoch: int, state: Health) -> bool:
        """Write what the owner found; False when it is overtaken, or the run is stopping or has ended.

        Raises: StoreUnavailable.
        """
        return bool(await self._postgres.fetch("set_run_health", {"run": run, "epoch": epoch, "state": state}))

    async def end_source(self, run: RunId, source: str, state: End, reason: str, detail: str) -> None:
        """Write how a source ended, after the log says so; the first answer stays. Raises: StoreUnavailable."""
        params = {"run": run, "source": source, "state": state, "reason": reason, "detail": detail}
        await self._postgres.fetch("end_source", params)

    async def end(self, run: RunId, state: End, reason: str, last_seq: int) -> bool:
        """Write how a run ended, after the log says so; False when its end was written already.

        Raises: StoreUnavailable (repeat it).
        """
        params = {"run": run, "state": state, "reason": reason, "last_seq": last_seq}
        return bool(await self._postgres.fetch("end_run", params))

    async def tell(self, runs: Sequence[RunId]) -> None:
        """Wake all relays for some runs: they were given back, and another one should take them.

        Raises: StoreUnavailable.
        """
        if runs:
            await self._postgres.fetch("tell_runs", {"runs": list(runs)})

    async def prune(self, *, retention_s: float, limit: int = 500) -> int:
        """Forget runs that ended longer ago than this; returns how many. Several callers at once take others.

        Raises: StoreUnavailable.
        """
        return len(await self._postgres.fetch("prune_runs", {"retention_s": retention_s, "limit": limit}))

    async def run_listener(self, heard: Callable[[RunId | None], None]) -> None:
        """Hear of runs that were put, deleted or given back, until cancelled.

        Args:
            heard: called with the id of each; with None whenever listening has begun (again): look at all of them.
        """
        await run_listener(self._postgres.url, CHANNEL, cast("Callable[[str | None], None]", heard))


def _is_same(run: Run, new: NewRun) -> bool:
    """Whether a run was defined like this. Headers are left out: a token that was renewed makes no other run."""
    return (
        list(run.progress_types) == list(new.progress_types)
        and list(run.terminal_types) == list(new.terminal_types)
        and (run.stall_after_s, run.max_duration_s) == (new.stall_after_s, new.max_duration_s)
        and [(s.source, s.url, s.resume, s.idle_timeout_s) for s in run.sources]
        == [(s.source, s.url, s.resume, s.idle_timeout_s) for s in new.sources]
    )


def _run(rows: Sequence[Any]) -> Run:
    r = rows[0]
    sources = [
        Source(
            source=row.source,
            url=row.url,
            secrets=row.secrets,
            resume=row.resume,
            idle_timeout_s=row.idle_timeout_s,
            point=Point(row.uid, row.count),
            state=row.source_state,
            reason=row.source_reason,
            detail=row.source_detail,
        )
        for row in rows
    ]
    return Run(
        run=r.run,
        sources=sources,
        progress_types=r.progress_types,
        terminal_types=r.terminal_types,
        stall_after_s=r.stall_after_s,
        max_duration_s=r.max_duration_s,
        state=r.state,
        reason=r.reason,
        created_ms=r.created_ms,
        ended_ms=r.ended_ms,
        age_ms=r.age_ms,
        first_seq=r.first_seq,
        last_seq=r.last_seq,
        epoch=r.epoch,
    )
