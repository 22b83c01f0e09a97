"""What tests of the gateway's streams share: a run with a played relay, and a browser's side of a stream."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
from event_stores import Relay, events, new_run
from gateway_door import Door
from support import eventually

from common.ids import RunId
from common.store.eventlog import EventId, NewEvent, Writer
from common.store.runs import NewRun, NewSource, Run, Runs
from harness.stack import Gateway
from towline.wire import json

TS = 1_790_000_000_000
SOURCE = {"source": "coder", "url": "http://127.0.0.1:9/events", "resume": "ids"}


class PlayedRun:
    """A run that is followed by nobody, until `begin`; from then on by a relay that the test plays."""

    def __init__(self, door: Door, run: RunId | None = None) -> None:
        self.run = run or new_run()
        self.runs = Runs(door.postgres)
        self.relay = Relay(door.redis, self.run)
        self._writer: Writer | None = None

    @property
    def writer(self) -> Writer:
        """The owner's; `begin` first."""
        assert self._writer is not None
        return self._writer

    async def put(self) -> Self:
        """Record it as the gateway does."""
        source = NewSource("coder", SOURCE["url"], None, "ids", 1800)
        _, found = await self.runs.follow(NewRun(self.run, [source], ["output"], ["result"], 900, 86_400))
        assert found == "created"
        return self

    async def begin(self) -> Self:
        """Take it, as an owner that is new to it, under a fresh epoch."""
        await self.relay.leases.release([(self.run, self._writer.tail.epoch)] if self._writer else [])
        epochs = await self.runs.mint_epochs([self.run])
        self._writer = await self.relay.take(epochs[self.run])
        assert self.relay.taken is not None
        await self.runs.set_first_seq(self.run, self.relay.taken.first_seq)
        return self

    async def add(self, first: int, last: int | None = None) -> EventId:
        """Append events by their numbers in one batch; returns the id of the last one."""
        return await self.writer.append(events(first, last or first), progressed=True)

    async def add_event(self, event: NewEvent) -> EventId:
        """Append one event of the test's own."""
        return await self.writer.append([event], progressed=True)

    async def end(self, state: str = "completed", *, record: bool = True) -> EventId:
        """Append the last event and, unless told otherwise, write the end into the record."""
        data = json.dumps({"state": state, "reason": "all-sources-ended", "sources": {}})
        last = NewEvent("", "", "towline.run.ended", data, TS)
        tail = await self.writer.append([last], progressed=False, end=state)
        if record:
            assert await self.runs.end(self.run, state, "all-sources-ended", tail.seq)  # type: ignore[arg-type]
        return tail


@dataclass(frozen=True)
class Frame:
    """One event as a strict reader dispatches it. `id`: its last event id, sticky."""

    type: str
    data: Any
    id: str
    has_id: bool

    @property
    def text(self) -> str:
        """The upstream's text."""
        return str(self.data["data"])


class Watcher:
    """A reader of one stream that keeps what it was sent; `async with` opens and closes it."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        *,
        last_event_id: str | None = None,
        params: Mapping[str, str] | None = None,
    ) -> None:
        headers = {"accept": "text/event-stream"}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        self._client = client
        self._request = client.build_request("GET", url, headers=headers, params=dict(params or {}), timeout=None)
        self.frames: list[Frame] = []
        self.comments: list[str] = []
        self.retries: list[int] = []
        self.chunks: list[bytes] = []
        self.is_over = False
        self.was_broken = False
        self.last_id = ""
        self.response: httpx.Response
        self._task: asyncio.Task[None] | None = None
        self._rest = b""
        self._block: list[bytes] = []

    async def __aenter__(self) -> Self:
        self.response = await self._client.send(self._request, stream=True)
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.response.aclose()

    @property
    def texts(self) -> list[str]:
        """Texts of the upstream's events; our own and frames by their types."""
        return [frame.type if frame.type.startswith("towline.") else frame.text for frame in self.frames]

    async def has(self, count: int, within_s: float = 10) -> list[str]:
        """Wait until so many frames came; returns `texts`."""
        await eventually(lambda: len(self.frames) >= count, within_s)
        return self.texts

    async def is_done(self, within_s: float = 10) -> list[str]:
        """Wait until the response has ended; returns `texts`."""
        await eventually(lambda: self.is_over, within_s)
        return self.texts

    async def _read(self) -> None:
        try:
            async for chunk in self.response.aiter_raw():
                self.chunks.append(chunk)
                lines = (self._rest + chunk).split(b"\n")
                self._rest = lines.pop()
                for line in lines:
                    self._take(line)
        except httpx.TransportError:
            self.was_broken = True
        finally:
            self.is_over = True

    def _take(self, line: bytes) -> None:
        if line:
            self._block.append(line)
            return
        fields: dict[bytes, list[bytes]] = {}
        for each in self._block:
            name, _, value = each.partition(b":")
            fields.setdefault(name, []).append(value.removeprefix(b" "))
        self._block = []
        self.comments += [value.decode() for value in fields.pop(b"", [])]
        self.retries += [int(value) for value in fields.pop(b"retry", [])]
        has_id = b"id" in fields
        if has_id:
            self.last_id = fields.pop(b"id")[-1].decode()
        if b"data" in fields:
            kind = fields.pop(b"event", [b"message"])[-1].decode()
            data = msgspec.json.decode(b"\n".join(fields.pop(b"data")))
            self.frames.append(Frame(kind, data, self.last_id, has_id))
        assert not fields, f"fields that nobody sends: {fields}"


class Browser:
    """Opens streams of one gateway, with the stack's API key."""

    def __init__(self, door: Door, gateway: Gateway | None = None) -> None:
        self.client = door.client(gateway)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def watch(self, run: str, last_event_id: str | None = None, **params: str) -> Watcher:
        """Follow one run."""
        return Watcher(self.client, f"/v1/runs/{run}/events", last_event_id=last_event_id, params=params)

    def watch_many(self, runs: Sequence[str], last_event_id: str | None = None, **params: str) -> Watcher:
        """Follow several runs on one connection."""
        return Watcher(
            self.client, "/v1/events", last_event_id=last_event_id, params={"runs": ",".join(runs), **params}
        )


async def metric(door: Door, sample: str, gateway: Gateway | None = None) -> float:
    """One sample of a gateway's metrics, such as `towline_sse_clients`."""
    port = (gateway or door.stack.gateways[0]).admin_port
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{sample} ")), 0.0)


__all__ = ["Browser", "Frame", "PlayedRun", "Run", "Watcher", "metric"]
