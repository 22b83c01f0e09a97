"""One run under one lease: its sources in, one append after the other out, and its end.

Promises: one append in flight, which takes everything gathered meanwhile; after an unknown outcome nothing new gets a
          number before the old batch's fate is known; the last event is appended once, with the end, and Postgres is
          told after it; whoever leaves appends what was read first.
Used by:  relay.scan, which takes the lease, refreshes it (`beat`) and says when to leave or to stop.

    follow:  sources -> (all ended | stop | expiry) -> last event -> Postgres -> "ended"
                     -> leave -> last batch -> "left"
                     -> refused by the log -> "lost" (another has the run), "behind" (take it again)
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import httpx
import msgspec
import structlog

from common.errors import StoreUnavailable
from common.process.backoff import Backoff
from common.store.eventlog import Appends, Fenced, NewEvent, TailLost, Writer
from common.store.leases import Held, Look, Point, SourceStatus, Taken
from common.store.runs import End, Run, Runs, SavedPoint, Source
from relay.former import former_end, former_pulse, former_verdict
from relay.gathering import Budget, Gathering
from relay.health import Detector, Pulse, Verdict
from relay.metrics import RelayMetrics
from relay.records import Records
from relay.resume import Resume
from relay.tailer import SourceEnd, Tailer
from towline.wire import events, json

logger = structlog.get_logger(__name__)

Fate = Literal["ended", "left", "lost", "behind"]

_HEALTH_EVENTS: dict[Verdict, str] = {
    "active": events.RUN_RECOVERED,
    "stalled": events.RUN_STALLED,
    "orphaned": events.RUN_ORPHANED,
}


def is_over(run: Run) -> bool:
    """Whether all that is left to do with a run is to end it: none of its sources is asked any more."""
    return run.state == "stopping" or run.age_ms >= run.max_duration_s * 1000


@dataclass(frozen=True, slots=True)
class Means:
    """What all runs of a relay share."""

    http: httpx.AsyncClient
    appends: Appends
    runs: Runs
    budget: Budget
    metrics: RelayMetrics
    read_headers: Callable[[Source], Mapping[str, str]]


class Owner:
    """Follows one run from a take on."""

    def __init__(self, run: Run, taken: Taken, seen: Look, means: Means) -> None:
        """Continue where `taken` says. `seen`: the heartbeats that a former owner has left."""
        now = time.monotonic()
        self.run = run.run
        self.epoch = taken.epoch
        self._record = run
        self._taken = taken
        self._means = means
        self._writer = Writer(means.appends, run.run, taken)
        self._gathering = Gathering(means.budget)
        self._detector = Detector(run.stall_after_s, former_verdict(run))
        self._expires_at = now + run.max_duration_s - run.age_ms / 1000
        self._decided = asyncio.Event()
        self._leave_asked = asyncio.Event()
        self._end: tuple[End, str] | None = None
        self._is_recording_end = False
        self._beaten_at = now
        self._ends_recorded: set[str] = set()  # or about to be
        self._ended: dict[str, SourceEnd] = {s.source: e for s in run.sources if (e := former_end(s, taken))}
        self._points: Mapping[str, Point] = {}
        self._points_saved: Mapping[str, Point] = {}
        self._records = Records(run.run)
        self._pulse = former_pulse(now, self._detector.verdict, run.stall_after_s, seen)
        self._began = Pulse(self._pulse.live_at, self._pulse.progress_at)
        self._seen = seen
        self._tailers = [
            self._tailer(s, taken.points.get(s.source, s.point))
            for s in run.sources
            if s.source not in self._ended and not is_over(run)
        ]
        if run.state == "stopping":
            self.stop()
        elif is_over(run):
            self._look_at_ends()  # a former owner may have seen all of them end in time
            self._decide("expired", "max-duration")

    def _tailer(self, source: Source, point: Point) -> Tailer:
        return Tailer(
            self.run,
            source,
            self._means.read_headers(source),
            resume=Resume(
                source.resume,
                frozenset(self._record.terminal_types),
                uid=point.uid,
                count=point.count,
                is_first=self._record.first_seq is None,
            ),
            pulse=Pulse(self._pulse.live_at, self._pulse.progress_at),
            progress_types=frozenset(self._record.progress_types),
            gathering=self._gathering,
            http=self._means.http,
            metrics=self._means.metrics,
        )

    # ---- what the scan says

    def renew(self, run: Run) -> None:
        """The record may have changed: the caller has asked for the end, or given newer headers."""
        if run.state == "stopping":
            self.stop()
            return
        was = {s.source: s.secrets for s in self._record.sources}
        now = {s.source: s for s in run.sources}
        for tailer in self._tailers:
            source = now[tailer.source.source]
            if source.secrets != was[source.source]:
                tailer.headers = self._means.read_headers(source)
        self._record = run

    def stop(self) -> None:
        """The caller has asked for the end of the run."""
        self._decide("stopped", "stop-requested")

    def leave(self) -> None:
        """Stop reading; `follow` returns once everything read is in the log, however long that takes."""
        self._leave_asked.set()
        self._decided.set()

    def beat(self, now: float) -> Held:
        """Do what is due by time; returns what the next refresh is to say of this run."""
        if not self._decided.is_set():
            if now >= self._expires_at:
                self._decide("expired", "max-duration")
            for tailer in self._tailers:
                tailer.beat(now)
            self._look_at_health(now)
        was_beaten_at, self._beaten_at = self._beaten_at, now
        return Held(self.run, self.epoch, self._writer.tail, self._pulse.live_at > was_beaten_at, self._status(now))

    @property
    def is_leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leave_asked.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the end was told, and only Postgres is to hear of it: from then on nothing may change it."""
        return self._is_recording_end

    @property
    def is_stalled(self) -> bool:
        """Whether the run makes no progress."""
        return self._detector.verdict != "active"

    def unsaved_points(self) -> list[SavedPoint]:
        """Resume points that the log has and Postgres has not; call `points_saved` when it has."""
        return [
            SavedPoint(self.run, self.epoch, source, point)
            for source, point in self._points.items()
            if self._points_saved.get(source) != point
        ]

    def points_saved(self, points: list[SavedPoint]) -> None:
        """Postgres has these."""
        self._points_saved = {**self._points_saved, **{p.source: p.point for p in points}}

    # ---- the run

    async def follow(self) -> Fate:
        """Follow the run until it ends, is given up or is lost; once."""
        async with asyncio.TaskGroup() as group:
            recording = group.create_task(self._records.run(), name=f"records:{self.run}")
            fate = await self._follow_sources()
            if fate == "ended":
                fate = await self._record_end()
            recording.cancel()
        return fate

    async def _follow_sources(self) -> Fate:
        if self._taken.end:  # a former owner died between the last event and Postgres
            last = msgspec.json.decode(self._taken.end_data or b"{}")
            self._end = (self._taken.end, str(last.get("reason", "")))  # type: ignore[assignment]  # one of ours
            for name, told in (last.get("sources") or {}).items():
                self._ended.setdefault(name, SourceEnd(told["state"], told["reason"], ""))
            return "ended"
        fate: Fate = "left"
        try:
            async with asyncio.TaskGroup() as group:
                appending = group.create_task(self._run_appends(), name=f"appends:{self.run}")
                tailing = [group.create_task(self._tail(t), name=f"tail:{self.run}") for t in self._tailers]
                self._look_at_ends()
                await self._decided.wait()
                for task in tailing:
                    task.cancel()
                if tailing:
                    await asyncio.wait(tailing)
                if not self.is_leaving and self._end is not None:
                    self._say(events.RUN_ENDED, self._last_words())
                    fate = "ended"
                await self._gathering.wait_empty()
                appending.cancel()
        except* Fenced:
            fate = "lost"
        except* TailLost:
            fate = "behind"
        finally:
            self._gathering.close()
        return fate

    def _decide(self, state: End, reason: str) -> None:
        if not self._decided.is_set():
            self._end = (state, reason)
            self._decided.set()

    async def _tail(self, tailer: Tailer) -> None:
        await tailer.run()
        if (end := tailer.end) is not None:
            source = tailer.source.source
            self._ended[source] = end
            logger.info("source_ended", run=self.run, source=source, state=end.state, reason=end.reason)
            self._look_at_ends()

    def _look_at_ends(self) -> None:
        if len(self._ended) == len(self._record.sources):
            if all(end.state == "completed" for end in self._ended.values()):
                self._decide("completed", "sources-completed")
            else:
                self._decide("failed", "sources-failed")

    def _last_words(self) -> dict[str, Any]:
        assert self._end is not None
        state, reason = self._end
        told = {
            s.source: {"state": end.state, "reason": end.reason}
            if (end := self._ended.get(s.source))
            else {"state": state, "reason": reason}
            for s in self._record.sources
        }
        return {"state": state, "reason": reason, "sources": told}

    def _say(self, kind: str, data: Mapping[str, Any]) -> None:
        event = NewEvent("", "", kind, json.dumps(data), time.time_ns() // 1_000_000)
        self._gathering.add([event], len(event.data))

    # ---- out: the log, Postgres

    async def _run_appends(self) -> None:
        backoff = Backoff(first_s=0.05, cap_s=1.0)
        while True:
            batch = await self._gathering.take()
            points = {t.source.source: t.point for t in self._tailers}
            ended = {t.source.source: t.end for t in self._tailers if t.end is not None}
            end = self._end[0] if self._end and batch.events[-1].type == events.RUN_ENDED else ""
            try:
                await self._writer.append(batch.events, progressed=batch.progressed, end=end)
            except StoreUnavailable as error:
                logger.warning("append_failed", run=self.run, events=len(batch.events), error=str(error))
                while self._writer.is_pending:
                    await asyncio.sleep(backoff.next_s())
                    with contextlib.suppress(StoreUnavailable):
                        await self._writer.retry()
                backoff.reset()
            self._gathering.appended()
            self._points = points
            # Not before: a next owner asks no source for what is missing once its record says that it has ended.
            for source in ended.keys() - self._ends_recorded:
                self._records.put(partial(self._means.runs.end_source, self.run, source, *ended[source]))
                self._ends_recorded.add(source)
            self._means.metrics.events_total.inc(len(batch.events))
            self._means.metrics.lag_seconds.observe(time.monotonic() - batch.oldest_at)

    async def _record_end(self) -> Fate:
        """Tell Postgres what the log says, with the lease kept meanwhile; a later owner would do the same."""
        assert self._end is not None
        self._is_recording_end = True
        state, reason = self._end
        runs = self._means.runs
        for source in self._record.sources:
            if source.source not in self._ends_recorded:
                end = self._ended.get(source.source) or SourceEnd(state, reason, "the run has ended")
                self._records.put(partial(runs.end_source, self.run, source.source, *end))
        self._records.put(partial(runs.end, self.run, state, reason, self._writer.tail.seq))
        writing = asyncio.create_task(self._records.wait_written(), name=f"end:{self.run}")
        leaving = asyncio.create_task(self._leave_asked.wait(), name=f"leave:{self.run}")
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                return "left"
        finally:
            leaving.cancel()
            writing.cancel()
        self._means.metrics.runs_ended_total[state].inc()
        logger.info("run_ended", run=self.run, state=state, reason=reason)
        return "ended"

    # ---- health

    def _look_at_health(self, now: float) -> None:
        for tailer in self._tailers:
            self._pulse.live_at = max(self._pulse.live_at, tailer.pulse.live_at)
            self._pulse.progress_at = max(self._pulse.progress_at, tailer.pulse.progress_at)
        change = self._detector.look(self._pulse, now)
        if change is None:
            return
        logger.warning("run_health", run=self.run, verdict=change.verdict, stale_s=round(change.stale_s, 1))
        told = {} if change.verdict == "active" else {"stale_s": round(change.stale_s, 3)}
        self._say(_HEALTH_EVENTS[change.verdict], told)
        self._records.put(partial(self._means.runs.set_health, self.run, self.epoch, change.verdict))

    def _status(self, now: float) -> bytes:
        wall_ms = time.time() * 1000
        stall_after_s = self._record.stall_after_s

        def time_ms(at: float, began_at: float, age_s: float | None) -> int | None:
            # Nobody's sign of life is told as one: the moment from which we count, where nothing was remembered.
            return None if at == began_at and age_s is None else int(wall_ms - (now - at) * 1000)

        return json.dumps(
            {
                t.source.source: SourceStatus(
                    t.is_connected,
                    time_ms(t.pulse.live_at, self._began.live_at, self._seen.live_age_s),
                    time_ms(t.pulse.progress_at, self._began.progress_at, self._seen.progress_age_s),
                    "ended" if t.end else t.pulse.verdict(now, stall_after_s),
                    t.failure,
                )
                for t in self._tailers
            }
        )
