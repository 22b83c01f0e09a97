"""The event side of a soak: upstreams that speak, callers who have them followed, watchers who come and go.

Owns:     the agent's streams and the watchers of all runs of a plan.
Promises: every run that was accepted and every watcher is in the history when `write_down` has returned, with all that
          was said and seen.
Used by:  the run of a soak; the nemesis, for the faults of upstreams.
"""

import asyncio
import time
from collections.abc import Sequence

from harness.agent import Script
from harness.drills.caller import Caller
from harness.drills.evidence import Evidence
from harness.drills.target import Agent, DrillFailed, Gateway
from harness.drills.watching import Watcher, stream_of
from harness.soak.history import Followed, History, RunRecorded, Spoken, Watched, now_ms
from harness.soak.plan import Plan, RunPlan

POLL_EVERY_S = 0.1
# Two refusals in a row, and what a relay adds of its own.
REFUSALS = 2


class Following:
    """See the module."""

    def __init__(self, plan: Plan, agent: Agent, caller: Caller, gateways: Sequence[Gateway], api_key: str) -> None:
        self._plan = plan
        self._agent = agent
        self._caller = caller
        self._gateways = gateways
        self._api_key = api_key
        self._accepted: dict[str, bool] = {}
        self._watchers: dict[str, list[Watcher]] = {run.run: [] for run in plan.runs}
        self._watching: list[asyncio.Task[None]] = []

    async def run(self, history: History) -> None:
        """Carry out all runs of the plan, each at its time; returns when the last watcher has come."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for run in self._plan.runs:
                await asyncio.sleep(began + run.at_s - time.monotonic())
                group.create_task(self._follow(run, began, history), name=f"run:{run.run}")

    async def _follow(self, run: RunPlan, began: float, history: History) -> None:
        for source, plan in run.sources.items():
            await self._agent.put(
                stream_of(run.run, source), Script(resume=plan.resume, ids=True, rate=plan.rate, total=plan.total)
            )
        urls = {source: self._agent.url(stream_of(run.run, source)) for source in run.sources}
        try:
            await self._caller.follow(run.run, urls, resume={name: plan.resume for name, plan in run.sources.items()})
        except DrillFailed:
            self._accepted[run.run] = False
        else:
            self._accepted[run.run] = True
        history.add(Followed(at_ms=now_ms(), run=run.run, accepted=self._accepted[run.run]))
        if not self._accepted[run.run]:
            return
        for number, watching in enumerate(run.watchers, 1):
            await asyncio.sleep(began + watching.at_s - time.monotonic())
            watcher = Watcher(f"watcher-{number}", run.run, self._api_key, self._gateways, first=watching.gateway)
            self._watchers[run.run].append(watcher)
            self._watching.append(asyncio.create_task(watcher.watch(), name=f"{run.run}/{watcher.name}"))

    async def flap(self, number: int, kind: str) -> None:
        """Let all upstreams of the run of that number fail, as the fault says; nothing if it has not begun."""
        run = self._plan.runs[number]
        if run.run not in self._accepted:
            return
        for source in run.sources:
            stream = stream_of(run.run, source)
            match kind:
                case "upstream-cut" if not (await self._agent.state(stream))["is_ended"]:
                    await self._agent.act(stream, "cut")
                case "upstream-refuse":
                    await self._agent.act(stream, "answer", status=503, times=REFUSALS)
                    await self._agent.act(stream, "close")
                case _:
                    await self._agent.act(stream, "close")

    async def count_watching(self) -> int:
        """How many watchers have not been told the end of their run."""
        return sum(not task.done() for task in self._watching)

    async def leases(self, evidence: Evidence) -> dict[str, str]:
        """Which relay still follows which run. Raises: StoreUnavailable."""
        found = {run.run: await evidence.lease(run.run) for run in self._plan.runs}
        return {run: lease.relay for run, lease in found.items() if lease is not None}

    async def write_down(self, history: History, evidence: Evidence) -> None:
        """What was said and seen, and what the stores hold of the runs, into the history. Raises: StoreUnavailable."""
        # Watchers go by the monotonic clock, histories by the other one.
        clock_s = time.time() - time.monotonic()
        leases = await self.leases(evidence)
        for run in self._plan.runs:
            if not self._accepted.get(run.run):
                continue
            for watcher in self._watchers[run.run]:
                history.add(_watched(run.run, watcher, clock_s))
            for source in run.sources:
                state = await self._agent.state(stream_of(run.run, source))
                history.add(
                    Spoken(
                        at_ms=now_ms(),
                        run=run.run,
                        source=source,
                        last=state["emitted"],
                        requests=len(state["requests"]),
                    )
                )
            record = await self._caller.run(run.run)
            history.add(
                RunRecorded(
                    at_ms=now_ms(),
                    run=run.run,
                    state="" if record is None else record.state,
                    reason="" if record is None else record.reason or "",
                    lease=leases.get(run.run, ""),
                )
            )

    async def close(self) -> None:
        """Let every watcher go. Raises: what a watcher could not read, if one ended by that."""
        for task in self._watching:
            task.cancel()
        for result in await asyncio.gather(*self._watching, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def _watched(run: str, watcher: Watcher, clock_s: float) -> Watched:
    return Watched(
        at_ms=now_ms(),
        run=run,
        watcher=watcher.name,
        opened=watcher.opened,
        broken=watcher.broken,
        refused=watcher.refused,
        ended=watcher.ended,
        seen=[seen._replace(at=round(seen.at + clock_s, 3)) for seen in watcher.seen],
    )
