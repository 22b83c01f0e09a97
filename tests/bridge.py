"""A worker as a real process, and the machine's end of its sockets, written by hand for tests.

A `Peer` does what the test says and nothing of its own accord, except answering pings (which can be turned off), so it
can lie, flood, fall silent or break off.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import redis.asyncio
from job_stores import UserKeys, queued
from support import eventually
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from common.ids import GatewayId, JobId, UserId, WorkerId, new_id
from common.store.control import tell_worker
from common.store.jobs import Jobs
from common.store.postgres import open_postgres
from common.store.records import Record
from common.store.redis import Redis, open_redis
from common.store.requests import Requests
from common.store.tokens import Tokens
from harness.stack import Stack, Worker
from towline.wire import frames

F = TypeVar("F", bound=frames.Frame)

READ = frames.Tool("echo", hints=frames.Hints(read_only=True))
WRITE = frames.Tool("fill_form")


def hello(
    *,
    machine: str = "machine-1",
    journal: str = "journal-1",
    tools: Sequence[frames.Tool] = (READ, WRITE),
    running: Sequence[str] = (),
) -> frames.Hello:
    """What a machine says first."""
    return frames.Hello(machine=machine, journal=journal, name="test", tools=list(tools), running=list(running))


class Peer:
    """The machine's end of one socket.

    Attributes:
        received: every frame that came, in order.
        answers_pings: set to False to fall silent.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.received: list[frames.FromWorker] = []
        self.answers_pings = True
        self._taken: set[int] = set()
        self._reader = asyncio.create_task(self._read(), name="peer")

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for text in self.socket:
                assert isinstance(text, str)
                frame = frames.decode_from_worker(text)
                assert frame is not None
                if isinstance(frame, frames.Ping) and self.answers_pings:
                    await self.send(frames.Pong(n=frame.n))
                self.received.append(frame)

    async def send(self, frame: frames.Frame | str | bytes) -> None:
        """Send a frame, or whatever else is said to be one."""
        await self.socket.send(frames.encode(frame) if isinstance(frame, frames.Frame) else frame)

    async def next(self, kind: type[F], *, within_s: float = 10) -> F:
        """The next frame of a kind that no earlier call returned; wait for it."""

        def find() -> tuple[int, F] | None:
            for index, frame in enumerate(self.received):
                if isinstance(frame, kind) and index not in self._taken:
                    return index, frame
            assert not self._reader.done(), (
                f"the socket was closed: {self.socket.close_code} {self.socket.close_reason}"
            )
            return None

        index, frame = await eventually(find, within_s)
        self._taken.add(index)
        return frame

    def acknowledged(self) -> list[str]:
        """Every job whose outcome was acknowledged, in order, repetitions included."""
        return [job for frame in self.received if isinstance(frame, frames.JobResultAck) for job in frame.jobs]

    async def acknowledgement(self, job: str, *, within_s: float = 15) -> None:
        """Wait until a job was acknowledged: at the worker's next heartbeat."""
        await eventually(lambda: job in self.acknowledged(), within_s)

    def jobs(self) -> list[JobId]:
        """Every job that came, in order, repetitions included."""
        return [JobId(frame.job) for frame in self.received if isinstance(frame, frames.Job)]

    async def answer(self, job: frames.Job, result: str = "1") -> None:
        """Complete a job with raw JSON."""
        await self.send(frames.JobResult(outcome="completed", id=job.id, result=msgspec.Raw(result.encode())))

    async def closed(self, within_s: float = 10) -> tuple[int | None, str | None]:
        """Close code and reason, once the worker has closed the socket."""
        async with asyncio.timeout(within_s):
            await asyncio.wait({self._reader})
            await self.socket.wait_closed()
        return self.socket.close_code, self.socket.close_reason

    async def goodbye(self) -> None:
        """Leave on purpose."""
        await self.send(frames.Goodbye())
        await self.socket.close()

    def break_off(self) -> None:
        """Vanish without a word."""
        self.socket.transport.abort()

    async def stop(self) -> None:
        """Close the socket and end the reader."""
        self.socket.transport.abort()
        await asyncio.wait({self._reader})


@dataclass
class Bridge:
    """A worker with its stores, open to the test."""

    stack: Stack
    worker: Worker
    redis: Redis
    client: redis.asyncio.Redis
    requests: Requests
    jobs: Jobs
    tokens: Tokens
    postgres_url: str
    cleanup: contextlib.AsyncExitStack

    async def token(self, user: UserId, ttl_s: float | None = None) -> str:
        """A fresh machine token."""
        return (await self.tokens.add_machine_token(user, "test", ttl_s))[1]

    async def dial(self, token: str, *, worker: Worker | None = None, path: str = frames.PATH) -> Peer:
        """A socket past the handshake; nothing is said on it yet. Raises: InvalidStatus."""
        socket = await connect(
            f"{(worker or self.worker).bridge_url}{path}",
            subprotocols=[Subprotocol(frames.SUBPROTOCOL)],
            additional_headers={"Authorization": f"Bearer {token}"},
            compression=None,
            max_size=None,
            ping_interval=None,
            close_timeout=1,
            proxy=None,
        )
        peer = Peer(socket)
        self.cleanup.push_async_callback(peer.stop)
        return peer

    async def machine(
        self, user: UserId, *, token: str | None = None, worker: Worker | None = None, **members: Any
    ) -> Peer:
        """A machine that was welcomed; `members` as in `hello`."""
        peer = await self.dial(token or await self.token(user), worker=worker)
        await peer.send(hello(**members))
        await peer.next(frames.Welcome)
        return peer

    async def submit(self, user: UserId, **members: Any) -> Record:
        """A job, as a gateway submits it; `members` as in `new_job`."""
        return await queued(self.requests, self.jobs, user, **members)

    async def record(self, job: str) -> Record:
        """The record of a job."""
        return (await self.requests.read([JobId(job)]))[JobId(job)]

    async def ended(self, job: str, within_s: float = 10) -> Record:
        """The record of a job, once it has ended."""

        async def terminal() -> Record | None:
            record = await self.record(job)
            return record if record.terminal else None

        return await eventually(terminal, within_s)

    async def fence(self, user: UserId, peer: Peer) -> None:
        """Wait until the worker has done all that it did before a probe that starts now."""
        worker = (await self.held(user).presence())["worker"]
        before = sum(isinstance(frame, frames.Status) for frame in peer.received)
        note = {"note": "probe", "user": user, "probe": new_id(), "reply_to": GatewayId("nobody")}
        await tell_worker(self.redis, WorkerId(worker), note)
        await eventually(lambda: sum(isinstance(frame, frames.Status) for frame in peer.received) > before)

    def held(self, user: UserId) -> UserKeys:
        """What Redis holds of a user."""
        return UserKeys(self.client, user)

    async def metric(self, sample: str) -> float:
        """A sample of the worker's metrics by its name with labels; 0 if there is none."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{self.worker.admin_port}/metrics")).text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @contextlib.asynccontextmanager
    async def counts(self, *samples: str) -> AsyncIterator[None]:
        """The block makes each of these counters grow, if only soon after it."""
        before = [await self.metric(sample) for sample in samples]
        yield
        for sample, value in zip(samples, before, strict=True):
            await eventually(lambda sample=sample, value=value: self._has_grown(sample, value))

    async def _has_grown(self, sample: str, before: float) -> bool:
        return await self.metric(sample) > before

    def counts_close(self, label: str) -> contextlib.AbstractAsyncContextManager[None]:
        """The block ends a session for this reason."""
        return self.counts(f'towline_bridge_sessions_total{{close="{label}"}}')

    def logged(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The worker's log lines of an event with these fields."""
        lines = [json.loads(line) for line in self.worker.read_log().splitlines() if f'"{event}"' in line]
        return [line for line in lines if line["event"] == event and fields.items() <= line.items()]

    async def script_calls(self) -> int:
        """How many scripts this worker's Redis has run, whoever asked."""
        stats = await self.client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


@contextlib.asynccontextmanager
async def open_bridge(
    directory: Path, *, postgres_url: str, redis_url: str, heartbeat_s: float = 10, env: Mapping[str, str] | None = None
) -> AsyncIterator[Bridge]:
    """Run one worker until the block ends; every peer that was dialled is closed then."""
    async with (
        Stack(directory, postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=heartbeat_s) as stack,
        open_redis(redis_url) as store,
        open_postgres(postgres_url) as postgres,
        redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client,
        contextlib.AsyncExitStack() as cleanup,
    ):
        yield Bridge(
            stack=stack,
            worker=await stack.add_worker(env),
            redis=store,
            client=client,
            requests=Requests(postgres, retention_s=3600),
            jobs=Jobs(store),
            tokens=Tokens(postgres),
            postgres_url=postgres_url,
            cleanup=cleanup,
        )
