"""Systems that serve one stream to many SSE clients: the measures that they are put to.

Promises: each measurement has a stream of its own, so that no client is told what an earlier one was told.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from harness.bench import deliver, idle, publish
from harness.bench.figures import Sample
from harness.bench.ground import LOAD_WITHIN_S, Ground, sample_of
from harness.bench.observed import Observed
from harness.bench.relays import wait_until_said
from harness.runner import Process

CLIENTS = 1000
# These come first when memory is looked at: what a process allocates once, and in steps, is there when they are.
FIRST_CLIENTS = 100


@dataclass(frozen=True, slots=True)
class FanOut:
    """So many events to so many clients. `per_s`: events per second at most, each by itself; 0: all at once."""

    events: int
    per_s: float
    clients: int = CLIENTS


@dataclass(frozen=True, slots=True)
class Idle:
    """So many clients to whom nothing happens."""

    clients: int = CLIENTS


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of a system.

    Attributes:
        name: of its own.
        port, path, headers: where clients find it, on the loopback address.
        target: where its events are put.
        opened_by: what else must be done once the publisher listens, where it is one that is called.
    """

    name: str
    port: int
    path: str
    target: publish.ToStream | publish.ToReader | publish.ToHttp
    headers: Mapping[str, str] = field(default_factory=dict)
    opened_by: Callable[[], Awaitable[None]] | None = None


class StreamServer(Protocol):
    """A system that serves streams."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Who is accounted, by name."""

    async def describe_stream(self) -> Stream:
        """Name a stream that nobody has used."""

    async def restart(self) -> None:
        """Start afresh what serves the clients: memory that earlier ones had used is not given back."""

    async def forget(self, stream: Stream) -> None:
        """Remove what is left of a stream."""


class FanOutPeer:
    """A server under a crowd of clients, as a peer."""

    def __init__(self, ground: Ground, server: StreamServer) -> None:
        self._ground = ground
        self._server = server

    async def run(self, load: FanOut) -> Sample:
        """Let it tell everybody everything. Raises: BenchFailed."""
        stream = await self._server.describe_stream()
        plan = deliver.Plan(
            stream.port,
            stream.path,
            dict(stream.headers),
            load.clients,
            publish.Plan(stream.target, load.events, one_by_one=load.per_s > 0),
            load.per_s,
            self._ground.watched(self._server.pids),
            LOAD_WITHIN_S,
        )

        async def begin(driver: Process) -> None:
            if stream.opened_by:
                await wait_until_said(driver, publish.LISTENING)
                await stream.opened_by()

        result = await self._ground.drive(["harness.bench.deliver"], plan, at_start=begin)
        await self._server.forget(stream)
        return sample_of(msgspec.json.decode(result, type=Observed))


class IdlePeer:
    """A server with clients to whom nothing happens, as a peer."""

    def __init__(self, ground: Ground, server: StreamServer) -> None:
        self._ground = ground
        self._server = server

    async def run(self, load: Idle) -> Sample:
        """Let them come, and look at what the server has grown by. Raises: BenchFailed."""
        await self._server.restart()
        stream = await self._server.describe_stream()
        if stream.opened_by:
            await stream.opened_by()
        plan = idle.Plan(
            stream.port,
            stream.path,
            dict(stream.headers),
            min(FIRST_CLIENTS, load.clients),
            load.clients,
            self._ground.watched(self._server.pids),
            LOAD_WITHIN_S,
        )
        result = await self._ground.drive(["harness.bench.idle"], plan)
        await self._server.forget(stream)
        return sample_of(msgspec.json.decode(result, type=Observed))
