"""Systems that store the events of an upstream: the measure that they are put to, and the peers.

What is compared is the way from an upstream's socket into a Redis stream, one event per HTTP chunk.
"""

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

import msgspec
import redis.asyncio

from harness.bench import bare_append, naive_relay, upstream
from harness.bench.figures import Sample
from harness.bench.ground import DRIVER_START_S, LOAD_WITHIN_S, Ground, sample_of
from harness.bench.observed import Observed
from harness.bench.peers import has_said, running
from harness.ports import free_port
from harness.runner import Process


@dataclass(frozen=True, slots=True)
class Ingest:
    """So many events of one upstream, as fast as they are taken."""

    events: int


class Relay(Protocol):
    """A system that follows upstreams. `pids`: its processes."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Who is accounted."""

    def stream_of(self, run: str) -> str:
        """Key of the Redis stream that a run's events go into."""

    async def follow(self, run: str, url: str) -> None:
        """Begin to store what this upstream sends."""

    async def forget(self, run: str) -> None:
        """Remove what is left of a run."""


class IngestPeer:
    """A relay, as a peer."""

    def __init__(self, ground: Ground, relay: Relay) -> None:
        self._ground = ground
        self._relay = relay

    async def run(self, load: Ingest) -> Sample:
        """Let it store the events of one upstream. Raises: BenchFailed."""
        run, port = f"bench-{uuid4().hex}", free_port()
        watched = self._ground.watched(self._relay.pids)
        plan = upstream.Plan(port, load.events, self._relay.stream_of(run), watched, LOAD_WITHIN_S)

        async def follow(driver: Process) -> None:
            await wait_until_said(driver, upstream.LISTENING)
            await self._relay.follow(run, f"http://127.0.0.1:{port}/events")

        result = await self._ground.drive(["harness.bench.upstream"], plan, at_start=follow)
        await self._relay.forget(run)
        return sample_of(msgspec.json.decode(result, type=Observed))


async def wait_until_said(process: Process, line: str) -> None:
    """Return when a process has written this line. Raises: ProcessFailed."""

    async def probe() -> bool:
        return line in process.read_log()

    await process.wait_ready(probe, within_s=DRIVER_START_S)


class NaiveRelay:
    """`naive_relay`: one upstream event after the other."""

    def __init__(self, process: Process, client: "redis.asyncio.Redis") -> None:
        self._process = process
        self._client = client

    @property
    def pids(self) -> Mapping[str, int]:
        """See `Relay`."""
        return {"relay": self._process.pid}

    def stream_of(self, run: str) -> str:
        """See `Relay`."""
        return naive_relay.stream_key(run)

    async def follow(self, run: str, url: str) -> None:
        """See `Relay`."""
        await self._client.rpush(naive_relay.FOLLOW, json.dumps([run, url]))

    async def forget(self, run: str) -> None:
        """See `Relay`."""
        await self._client.unlink(naive_relay.stream_key(run))


@asynccontextmanager
async def open_naive_relay(ground: Ground) -> AsyncIterator[IngestPeer]:
    """Run the naive relay until the block ends. Raises: ProcessFailed."""
    process = ground.process("naive-relay", "harness.bench.naive_relay")
    async with (
        redis.asyncio.Redis.from_url(ground.servers.redis_url) as client,
        running(process, is_ready=has_said(process, naive_relay.READY)),
    ):
        yield IngestPeer(ground, NaiveRelay(process, client))


class BareAppend:
    """`bare_append`, as a peer; its driver is all of it."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def run(self, load: Ingest) -> Sample:
        """Append as many events. Raises: BenchFailed."""
        plan = bare_append.Plan(load.events, self._ground.watched({}), LOAD_WITHIN_S)
        result = await self._ground.drive(["harness.bench.bare_append"], plan)
        sample = sample_of(msgspec.json.decode(result, type=Observed))
        return dataclasses.replace(sample, cpu_us={"client": sample.driver_cpu_us}, driver_cpu_us=0.0)
