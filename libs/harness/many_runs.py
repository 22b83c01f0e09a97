"""Many runs at once over several relays, counted event by event.

    python -m harness.many_runs --runs 200 --sources 3 --rate 5 --minutes 5

Each source is a stream of the stand-in agent, which numbers its events. Watchers follow all runs live, 20 to a
connection, and at the end every run's log is read back in pages: in neither may anything be missing, doubled or out of
order. Each relay must have had its share of the runs, and no source two connections at once.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx
import msgspec

from harness.agent.remote import RemoteAgent, running_agent
from harness.agent.stream import Script
from harness.runner import temporary_directory
from harness.servers import open_servers
from harness.stack import Stack
from towline.client import Client, End, RunEvent, SourceFollow
from towline.wire import events
from towline.wire.runs import EVENTS_PAGE_MAX, STREAM_RUNS_MAX, EventsPage, Run

# How many requests to the gateway, or to the agent, are under way at once.
CALLS_AT_ONCE = 16
CALL_WITHIN_S = 30.0
# What the start and the last events may take beyond the plan, with everything on two busy cores.
END_WITHIN_S = 60.0
# From the end in the log to the end in the record.
RECORDED_WITHIN_S = 10.0
LOOK_EVERY_S = 0.1
# A fair share of the runs, give or take.
SHARE_TOLERANCE = 0.2

T = TypeVar("T")
U = TypeVar("U")


class Load(NamedTuple):
    """What is run. `rate`: events per second of each source."""

    runs: int
    sources: int
    rate: float
    seconds: float
    relays: int = 3

    @property
    def events_per_source(self) -> int:
        """The terminal event included."""
        return round(self.rate * self.seconds) + 1

    @property
    def names(self) -> list[str]:
        """The runs' names."""
        return [f"run-{number}" for number in range(self.runs)]

    def streams_of(self, *runs: str) -> list[str]:
        """The names of these runs' sources, which are their streams' at the agent."""
        return [f"{run}-{number}" for run in runs for number in range(self.sources)]


class Findings(NamedTuple):
    """What came of it; `problems` is empty when everything was as promised.

    Attributes:
        events: how many are in the logs.
        shares: how many runs each relay had when they had most.
        relay_lags_ms, watcher_lags_ms: from when the agent said an event to when the one had it: p50, p99.
    """

    events: int
    shares: list[int]
    relay_lags_ms: tuple[float, float]
    watcher_lags_ms: tuple[float, float]
    problems: list[str]


class Said(msgspec.Struct, frozen=True):
    """The data of one of the agent's events. `at`: Unix milliseconds."""

    n: int
    stream: str
    at: float


@dataclass(slots=True)
class Account:
    """What somebody has read of some runs, in the order in which it came.

    Attributes:
        since_ms: the lag counts for what was said since then (Unix): before it, nobody was there to read.
    """

    since_ms: float = 0.0
    numbers: dict[str, list[int]] = field(default_factory=dict)
    lags_ms: list[float] = field(default_factory=list)
    gaps: int = 0
    ends: int = 0

    def take(self, event_type: str, data: str, at_ms: float) -> None:
        """Note an event that was there at `at_ms` (Unix)."""
        if events.is_own(event_type):
            self.ends += event_type == events.RUN_ENDED
            return
        said = msgspec.json.decode(data, type=Said)
        self.numbers.setdefault(said.stream, []).append(said.n)
        if said.at >= self.since_ms:
            self.lags_ms.append(at_ms - said.at)

    @property
    def events(self) -> int:
        """How many of the agent's events there were."""
        return sum(map(len, self.numbers.values()))

    def problems(self, streams: Sequence[str], expected: int, runs: int) -> Iterator[str]:
        """Say what is not as it should be, with these streams of `expected` events each, in so many runs."""
        for stream in streams:
            for fault in faults_in(self.numbers.get(stream, []), expected):
                yield f"{stream}: {fault}"
        if strange := set(self.numbers) - set(streams):
            yield f"events of {sorted(strange)}, which nobody asked for"
        if (self.gaps, self.ends) != (0, runs):
            yield f"{self.gaps} gaps and {self.ends} ends in {runs} runs"


def faults_in(numbers: Sequence[int], expected: int) -> list[str]:
    """Say how the numbers of a source differ from 1, 2, …, `expected`."""
    all_of_them = set(range(1, expected + 1))
    missing = sorted(all_of_them - set(numbers))
    repeated = len(numbers) - len(set(numbers))
    backward = sum(second < first for first, second in itertools.pairwise(numbers))
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing, the first is {missing[0]}")
    if repeated:
        faults.append(f"{repeated} repeated")
    if backward:
        faults.append(f"{backward} out of order")
    if unknown := set(numbers) - all_of_them:
        faults.append(f"{len(unknown)} that nobody said")
    return faults


async def run_many(load: Load, directory: Path, say: Callable[[str], None]) -> Findings:
    """Start an installation in `directory`, put the load on it, and judge what was seen when all runs have ended.

    Raises:
        ExceptionGroup: of a TimeoutError when some runs had not ended long after their last event.
    """
    async with (
        open_servers(directory / "stores") as urls,
        Stack(directory / "stack", postgres_url=urls.postgres_url, redis_url=urls.redis_url) as stack,
        running_agent(directory) as agent,
    ):
        async with asyncio.TaskGroup() as group:
            group.create_task(stack.add_gateway())
            for _ in range(load.relays):
                group.create_task(stack.add_relay())
        async with Client(stack.gateways[0].url, stack.api_key, timeout_s=CALL_WITHIN_S) as client:
            await _start(load, agent, client)
            say(f"{load.runs} runs of {load.sources} sources at {load.rate:g} events/s are followed")
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_watch_all(load, client), name="watchers")
                shares = await _look_on(load, stack, watching, say)
            watched = watching.result()
            say("all have ended; reading the logs back")
            logs = await _read_logs(load, stack)
            runs = await _each(load.names, lambda run: _read_ended(client, run))
        states = await _each(load.streams_of(*load.names), agent.state)
    problems = [*_problems(load, "watcher", watched), *_problems(load, "log", logs)]
    fair = load.runs / load.relays
    if not all((1 - SHARE_TOLERANCE) * fair <= share <= (1 + SHARE_TOLERANCE) * fair for share in shares):
        problems.append(f"the relays' shares were {shares}")
    if doubled := sum(state["most_connections"] > 1 for state in states):
        problems.append(f"{doubled} sources had more than one connection at once")
    problems += [f"{run.run} is {run.state}" for run in runs if run.state != "completed"]
    logged = [lag for log in logs.values() for lag in log.lags_ms]
    seen = [lag for account in watched.values() for lag in account.lags_ms]
    return Findings(sum(log.events for log in logs.values()), shares, _p50_p99(logged), _p50_p99(seen), problems)


async def _start(load: Load, agent: RemoteAgent, client: Client) -> None:
    script = Script(rate=load.rate, total=load.events_per_source - 1)

    async def start(run: str) -> None:
        streams = load.streams_of(run)
        for stream in streams:
            await agent.put(stream, script)
        await client.follow_run(run, [SourceFollow(stream, agent.url(stream), "ids") for stream in streams])

    await _each(load.names, start)


async def _watch_all(load: Load, client: Client) -> dict[tuple[str, ...], Account]:
    """Follow all runs to their ends, as many to a connection as one may carry."""
    groups = [tuple(load.names[at : at + STREAM_RUNS_MAX]) for at in range(0, load.runs, STREAM_RUNS_MAX)]
    accounts = {group: Account(time.time() * 1000) for group in groups}

    async def watch(runs: tuple[str, ...]) -> None:
        account = accounts[runs]
        async for item in client.events(runs):
            if isinstance(item, RunEvent):
                account.take(item.type, item.data, time.time() * 1000)
            else:
                account.gaps += not isinstance(item, End)

    async with asyncio.timeout(load.seconds + END_WITHIN_S), asyncio.TaskGroup() as group:
        for runs in groups:
            group.create_task(watch(runs), name=f"watcher:{runs[0]}")
    return accounts


async def _look_on(load: Load, stack: Stack, watching: asyncio.Task[object], say: Callable[[str], None]) -> list[int]:
    """Tell how the runs are shared out until the watchers are done. Returns the shares when the relays had most."""
    began = time.monotonic()
    shares: list[int] = []
    for tenth in range(1, 10):
        await asyncio.wait({watching}, timeout=max(0.0, began + tenth * load.seconds / 10 - time.monotonic()))
        if watching.done():
            break
        metrics = [await relay.read_metrics() for relay in stack.relays]
        owned = [round(each["towline_relay_runs_owned"]) for each in metrics]
        say(f"{time.monotonic() - began:4.0f} s: the relays have {owned} runs")
        if sum(owned) > sum(shares):
            shares = owned
    return shares


async def _read_ended(client: Client, run: str) -> Run:
    """Read a run whose end is in its log; the record has it a moment later, or never."""
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while True:
        record = await client.read_run(run)
        if record.terminal or time.monotonic() > deadline:
            return record
        await asyncio.sleep(LOOK_EVERY_S)


async def _read_logs(load: Load, stack: Stack) -> dict[tuple[str, ...], Account]:
    """Read each run's log to its end, page by page."""

    async def read(run: str) -> Account:
        account = Account()
        params: dict[str, str | int] = {"limit": EVENTS_PAGE_MAX}
        while True:
            response = await http.get(f"/v1/runs/{run}/events", params=params)
            page = msgspec.json.decode(response.raise_for_status().content, type=EventsPage)
            account.gaps += page.gap is not msgspec.UNSET
            for event in page.items:
                account.take(event.type, event.data, event.ts)
            if page.end is not msgspec.UNSET or not page.items:
                return account
            assert page.last_event_id is not None, "there was an event"
            params["last_event_id"] = page.last_event_id

    headers = {"Authorization": f"Bearer {stack.api_key}", "Accept": "application/json"}
    async with httpx.AsyncClient(base_url=stack.gateways[0].url, headers=headers, timeout=CALL_WITHIN_S) as http:
        accounts = await _each(load.names, read)
    return {(run,): account for run, account in zip(load.names, accounts, strict=True)}


def _problems(load: Load, whose: str, accounts: dict[tuple[str, ...], Account]) -> Iterator[str]:
    for runs, account in accounts.items():
        for problem in account.problems(load.streams_of(*runs), load.events_per_source, len(runs)):
            yield f"{whose} of {runs[0]}: {problem}"


def _p50_p99(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return 0.0, 0.0
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98]


async def _each(items: Iterable[T], call: Callable[[T], Awaitable[U]]) -> list[U]:
    """Call it for every item, a few at a time; results in the items' order."""
    places = asyncio.Semaphore(CALLS_AT_ONCE)

    async def one(item: T) -> U:
        async with places:
            return await call(item)

    return list(await asyncio.gather(*(one(item) for item in items)))


def main() -> int:
    """Run it from the command line; 1 when something was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--sources", type=int, default=3, help="of each run")
    parser.add_argument("--rate", type=float, default=5.0, help="events per second of each source")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--relays", type=int, default=3)
    arguments = parser.parse_args()
    load = Load(arguments.runs, arguments.sources, arguments.rate, arguments.minutes * 60, arguments.relays)
    with temporary_directory() as directory:
        findings = asyncio.run(run_many(load, directory, lambda text: print(text, flush=True)))
    print(f"{findings.events} events in the logs; runs of each relay: {findings.shares}")
    for whom, (p50, p99) in (("relay", findings.relay_lags_ms), ("watcher", findings.watcher_lags_ms)):
        print(f"from the agent to the {whom}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print("\n".join(findings.problems) or "nothing lost, nothing doubled")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
