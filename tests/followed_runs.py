"""What tests of the relay share: runs on stand-in upstreams, a whole relay in this process, and what they left."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import redis.asyncio
from prometheus_client import CollectorRegistry
from support import eventually, redis_database

from common.ids import RunId, new_id
from common.process.lifecycle import Lifecycle
from common.store import keys
from common.store.postgres import Postgres
from common.store.runs import NewRun, NewSource, Resume, Run, Runs
from relay.app import run as run_relay
from relay.settings import RelaySettings


class Relay:
    """A whole relay in this process."""

    def __init__(self, redis_url: str, database_url: str, **settings: Any) -> None:
        self.redis_url = redis_url
        self.lifecycle = Lifecycle()
        self.registry = CollectorRegistry(auto_describe=True)
        self._settings = RelaySettings(
            REDIS_URL=redis_url,
            DATABASE_URL=database_url,
            admin_host="127.0.0.1",
            admin_port=0,
            **{"egress_allow": "127.0.0.1,localhost", **settings},
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(run_relay(self._settings, self.lifecycle, self.registry))

    async def stop(self) -> None:
        """As SIGTERM does."""
        self.lifecycle.begin_drain("test")
        assert self._task is not None
        await self._task

    async def kill(self) -> None:
        """Cut it off; nothing is given back. (Real kills: see the tests that start processes.)"""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def open_relay(redis_url: str, database_url: str, **settings: Any) -> AsyncIterator[Relay]:
    relay = Relay(redis_url, database_url, **settings)
    relay.start()
    try:
        yield relay
    finally:
        if not relay.lifecycle.draining.is_set():
            await relay.kill()


@contextlib.asynccontextmanager
async def open_module_relay(server_url: str, database_url: str) -> AsyncIterator[Relay]:
    """A relay for all tests of a module: on a Redis database that only one module uses at a time."""
    redis_url = redis_database(server_url, 15)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushdb()
    async with open_relay(redis_url, database_url) as relay:
        yield relay


@contextlib.asynccontextmanager
async def open_run(relay: Relay, postgres: Postgres) -> AsyncIterator["FollowedRun"]:
    """A run that is over, for the module's relay too, when its test is."""
    async with redis.asyncio.Redis.from_url(relay.redis_url, decode_responses=True) as client:
        run = FollowedRun(Runs(postgres), client)
        yield run
        if await run.runs.request_stop(run.run):
            await run.ended()


class FollowedRun:
    """One run, as its record, its log and its keys show it."""

    def __init__(self, runs: Runs, client: redis.asyncio.Redis) -> None:
        self.run = RunId(f"run-{new_id()}")
        self.runs = runs
        self.client = client

    async def put(self, *sources: NewSource, **options: Any) -> None:
        """As the gateway's PUT does."""
        given = {
            "progress_types": ["output", "result"],
            "terminal_types": ["result"],
            "stall_after_s": 900.0,
            "max_duration_s": 86_400.0,
            **options,
        }
        await self.runs.follow(NewRun(self.run, sources, **given))

    async def record(self) -> Run:
        record = await self.runs.read(self.run)
        assert record is not None
        return record

    async def state(self) -> str:
        return (await self.record()).state

    async def entries(self) -> list[dict[str, str]]:
        """The events of the log, oldest first, each with its `id`; markers are left out."""
        found = await self.client.xrange(keys.events(self.run))
        return [{"id": entry_id, **fields} for entry_id, fields in found if "marker" not in fields]

    async def upstream(self, source: str = "") -> list[dict[str, str]]:
        """Those that an upstream sent."""
        return [
            e
            for e in await self.entries()
            if not e["type"].startswith("towline.") and (not source or e["source"] == source)
        ]

    async def numbers(self, source: str = "") -> list[int]:
        """The numbers that the stand-in agent gave them."""
        return [json.loads(e["data"])["n"] for e in await self.upstream(source)]

    async def own(self) -> list[tuple[str, dict[str, Any]]]:
        """What the product said itself."""
        return [(e["type"], json.loads(e["data"])) for e in await self.entries() if e["type"].startswith("towline.")]

    async def owner(self) -> str:
        lease: str | None = await self.client.get(keys.owner(self.run))
        return lease or ""

    async def has(self, numbers: Sequence[int], *, source: str = "", within_s: float = 10.0) -> None:
        """Wait until the log has this many upstream events; then they must be exactly these, in this order."""

        async def enough() -> bool:
            return len(await self.numbers(source)) >= len(numbers)

        await eventually(enough, within_s)
        assert await self.numbers(source) == list(numbers)

    async def has_more_than(self, count: int) -> None:
        """Wait until the log has more upstream events than this."""

        async def more() -> bool:
            return len(await self.upstream()) > count

        await eventually(more, 20)

    async def ended(self, *, within_s: float = 10.0) -> Run:
        """Wait for the end in Postgres."""

        async def terminal() -> bool:
            return (await self.record()).terminal

        await eventually(terminal, within_s)
        return await self.record()


def source(url: str, name: str = "coder", *, resume: Resume = "ids", idle_timeout_s: float = 1800.0) -> NewSource:
    return NewSource(name, url, None, resume, idle_timeout_s)


class RawUpstream:
    """An upstream that sends given bytes, one write a piece, and then does as told.

    Attributes:
        pieces: what each connection gets after the head, in order.
        heads: the head of each request so far.
        then: `hold` the connection open, or `close` it.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        self.heads: list[str] = []
        self.then = "hold"
        self.open_connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "RawUpstream":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/stream"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open_connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                writer.write(self.head)
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.then == "hold":
                    await reader.read(1)
        finally:
            self.open_connections -= 1
            self._tasks.discard(task)
            writer.close()
