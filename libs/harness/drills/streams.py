"""The streams of a drill: runs that the product follows at a stand-in agent, and their watchers.

Owns:     the agent's streams, the runs and the watchers of one run of a drill.
Promises: as the stage does. What is expected of a run is counted for every watcher: against what the agent said, and
          never against what the product says of itself.
Used by:  the scenarios of the event path, as `scene.streams`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.agent import Script
from harness.drills.caller import Caller
from harness.drills.evidence import Evidence, Lease
from harness.drills.sequences import Seen, tally, total
from harness.drills.stage import Stage
from harness.drills.target import DrillFailed, Replica, Target, log_events
from harness.drills.watching import Watcher, stream_of
from towline.wire import events
from towline.wire.runs import Resume

# From the last event of the last source to the run's end, told to every watcher.
ENDS_WITHIN_S = 10.0
EVENTS_PER_S = 20.0
# What says in which state a run has ended.
RUN_ENDS = (events.RUN_ENDED, events.END)


@dataclass(frozen=True, slots=True)
class Followed:
    """A run that is being followed.

    Attributes:
        run: its id.
        sources: the agent's stream behind each source, by the source's name.
        live: those of them that are followed live only.
        watchers: whoever watches it.
    """

    run: str
    sources: Mapping[str, str]
    live: frozenset[str]
    watchers: list[Watcher] = field(default_factory=list)


class Streams:
    """See the module.

    Attributes:
        followed: every run so far.
    """

    def __init__(self, stage: Stage, target: Target, caller: Caller, evidence: Evidence) -> None:
        self.followed: list[Followed] = []
        self._stage = stage
        self._target = target
        self._caller = caller
        self._evidence = evidence
        self._watching: dict[str, asyncio.Task[None]] = {}

    # ---- runs and watchers

    async def follow(
        self, sources: int | Mapping[str, Script] = 1, *, rate: float = EVENTS_PER_S, resume: Mapping[str, Resume] = {}
    ) -> Followed:
        """Let the product follow a new run, whose sources speak from now on.

        Args:
            sources: how many sources of the usual kind, or the script of each by its name.
            rate: events per second of a source of the usual kind, without end.
            resume: of those sources that do not resume by id.
        """
        if isinstance(sources, int):
            sources = {f"source-{n}": Script(rate=rate) for n in range(1, sources + 1)}
        run = f"{self._stage.report.drill}-{self._stage.run}-{len(self.followed) + 1}"
        live = frozenset(source for source, way in resume.items() if way == "live")
        followed = Followed(run, {source: stream_of(run, source) for source in sources}, live)
        self.followed.append(followed)
        for source, script in sources.items():
            await self._target.agent.put(followed.sources[source], script)
        await self._caller.follow(
            run,
            {source: self._target.agent.url(stream) for source, stream in followed.sources.items()},
            resume={source: resume.get(source, "ids") for source in sources},
        )
        return followed

    def watch(self, followed: Followed, *, first: int = 0, receives_bytes: int = 0) -> Watcher:
        """Let one more watcher begin, at the gateway of that index; `receives_bytes` as `Watcher` has it."""
        name = f"{followed.run}/{len(followed.watchers) + 1}"
        target = self._target
        watcher = Watcher(
            name, followed.run, target.api_key, target.gateways, first=first, receives_bytes=receives_bytes
        )
        followed.watchers.append(watcher)
        self.come_back(watcher)
        return watcher

    async def leave(self, watcher: Watcher) -> None:
        """Let a watcher go, as one who closes the tab; it keeps what it has seen."""
        task = self._watching.pop(watcher.name)
        task.cancel()
        await asyncio.wait([task])

    def come_back(self, watcher: Watcher) -> None:
        """Let a watcher who left watch on from where it was."""
        self._watching[watcher.name] = asyncio.create_task(watcher.watch(), name=f"watcher:{watcher.name}")

    # ---- waiting

    async def seen_by_all(
        self, followed: Followed, is_it: Callable[[Seen], bool], what: str, *, within_s: float = ENDS_WITHIN_S
    ) -> float:
        """Wait until every watcher of a run has seen such an item; returns when the last one first did (monotonic)."""

        async def when() -> list[float] | None:
            found = []
            for watcher in followed.watchers:
                at = next((seen.at for seen in watcher.seen if is_it(seen)), None)
                if at is None:
                    return None
                found.append(at)
            return found

        return max(await self._stage.eventually(f"{followed.run}: all watchers see {what}", when, within_s=within_s))

    async def flows(self, followed: Followed, *, after: float | None = None, within_s: float = ENDS_WITHIN_S) -> float:
        """Wait until every watcher sees an event that came after that moment (now); returns when the last one did."""
        since = time.monotonic() if after is None else after
        return await self.seen_by_all(
            followed, lambda seen: seen.number > 0 and seen.at > since, "events", within_s=within_s
        )

    async def owner(self, followed: Followed) -> Replica:
        """The relay that follows a run: the one that has the lease's name, by its log."""

        async def find() -> Replica | None:
            lease = await self._evidence.lease(followed.run)
            for relay in self._target.relays:
                names = {event.get("relay") for event in log_events(await relay.logs())}
                if lease is not None and lease.relay in names:
                    return relay
            return None

        return await self._stage.eventually(f"a relay follows {followed.run}", find)

    async def lease(self, followed: Followed) -> Lease:
        """Who follows it now, and under which epoch. Raises: DrillFailed: nobody does."""
        lease = await self._evidence.lease(followed.run)
        if lease is None:
            raise DrillFailed(f"nobody follows {followed.run}")
        return lease

    async def taken_over(self, followed: Followed, *, since_epoch: int, within_s: float) -> float:
        """Wait until every watcher has an event of a newer epoch; returns when the last one got it."""
        return await self.seen_by_all(
            followed,
            lambda seen: seen.number > 0 and epoch_of(seen.id) > since_epoch,
            f"events after epoch {since_epoch}",
            within_s=within_s,
        )

    async def go_on(self, followed: Followed, source: str, *, after: int, within_s: float = ENDS_WITHIN_S) -> float:
        """Wait until every watcher sees an event of a source behind that number; returns when the last one did."""
        return await self.seen_by_all(
            followed,
            lambda seen: seen.source == source and seen.number > after,
            f"events of {source} after {after}",
            within_s=within_s,
        )

    async def said(self, followed: Followed) -> dict[str, int]:
        """The number of the last event of each source so far."""
        states = {source: await self._target.agent.state(stream) for source, stream in followed.sources.items()}
        return {source: state["emitted"] for source, state in states.items()}

    async def open_connections(self, followed: Followed) -> int:
        """How many connections the agent has open for all sources of a run."""
        states = [await self._target.agent.state(stream) for stream in followed.sources.values()]
        return sum(state["open_connections"] for state in states)

    async def requests(self, followed: Followed, source: str) -> list[dict[str, Any]]:
        """What the agent was asked for a source, in order."""
        requests: list[dict[str, Any]] = (await self._target.agent.state(followed.sources[source]))["requests"]
        return requests

    # ---- the end

    async def end(self, *runs: Followed) -> None:
        """Let all sources say their last event; nothing is awaited."""
        for followed in runs:
            for stream in followed.sources.values():
                await self._target.agent.act(stream, "end")

    async def expect(
        self,
        *runs: Followed,
        state: str = "completed",
        gaps: int = 0,
        excused: int | None = 0,
    ) -> None:
        """Wait until every watcher was told the end, and hold everything they saw against what the sources said.

        Args:
            gaps: announced to all watchers together.
            excused: events missing where a gap was announced; None where the cut leaves that open.
        """
        watchers = [watcher for followed in runs for watcher in followed.watchers]

        async def is_over() -> bool:
            return all(watcher.ended for watcher in watchers)

        with contextlib.suppress(DrillFailed):
            await self._stage.eventually("all watchers are told the end", is_over, within_s=ENDS_WITHIN_S)
        said = {followed.run: await self.said(followed) for followed in runs}
        tallies = [
            tally(watcher.seen, said[followed.run], live=followed.live)
            for followed in runs
            for watcher in followed.watchers
        ]
        found = total(tallies)
        check = self._stage.check
        check("events lost", 0, found.lost)
        check("events doubled", 0, found.doubled)
        check("events out of order", 0, found.disordered)
        check("events of others", 0, found.strays)
        check("events after the end", 0, found.after_terminal)
        check("gaps", gaps, found.gaps)
        if excused is not None:
            check("events missing in gaps", excused, found.excused)
        if not gaps:
            check("events repeated", 0, found.repeated)
        check("last events", len(watchers), found.terminals)
        check("clients that were told the end", len(watchers), found.ends)
        states = {seen.state for watcher in watchers for seen in watcher.seen if seen.type in RUN_ENDS}
        check("states that clients were told", {state}, states)
        refusals = sorted({status for watcher in watchers for status in watcher.refused} - {"503"})
        check("answers that were no stream, but 503", [], refusals)
        check("events seen", "> 0", found.events, is_met=found.events > 0)
        await self._expect_ended(runs, state)

    async def _expect_ended(self, runs: Sequence[Followed], state: str) -> None:
        """Records, logs and leases of runs that are over."""

        async def are_free() -> bool:
            return not any([await self._evidence.lease(followed.run) for followed in runs])

        # The lease goes last: once the record has the end.
        with contextlib.suppress(DrillFailed):
            await self._stage.eventually("all leases are gone", are_free, within_s=ENDS_WITHIN_S)
        for followed in runs:
            record = await self._caller.run(followed.run)
            self._stage.check(f"{followed.run}: state", state, "no record" if record is None else record.state)
            self._stage.check(
                f"{followed.run}: last events in the log", 1, await self._evidence.terminals(followed.run)
            )
            self._stage.check(f"{followed.run}: its lease", None, await self._evidence.lease(followed.run))

    async def expect_health(self) -> None:
        """If there was a run at all: one more is followed, watched at every gateway, and ends."""
        if not self.followed:
            return
        health = await self.follow({"health": Script(rate=EVENTS_PER_S, total=5)})
        for gateway in range(len(self._target.gateways)):
            self.watch(health, first=gateway)
        await self.expect(health)

    async def close(self) -> None:
        """Let every watcher go, and end every stream and run: a relay of the next drill must not follow it."""
        for task in self._watching.values():
            task.cancel()
        for result in await asyncio.gather(*self._watching.values(), return_exceptions=True):
            if isinstance(result, Exception):
                self._stage.check("a watcher", "reads what it gets", repr(result), is_met=False)
        for followed in self.followed:
            await self.end(followed)
            await self._caller.stop_run(followed.run)


def epoch_of(event_id: str) -> int:
    """The epoch in an event's id, `epoch-seq`."""
    return int(event_id.partition("-")[0] or 0)
