"""What tests of the gateway share: a gateway to knock at, and a machine played with the real store functions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import httpx
import redis.asyncio
from support import eventually

from common.ids import GatewayId, JobId, MachineId, SessionId, UserId, WorkerId, new_id
from common.store import keys, presence
from common.store.control import control_inbox, tell_gateway
from common.store.jobs import Jobs, Taken, parse_take, take_call
from common.store.postgres import Postgres, open_postgres
from common.store.records import Begin, Finish, Finished
from common.store.redis import Redis, open_redis
from common.store.requests import Requests
from common.store.tokens import Tokens
from harness.servers import Servers
from harness.stack import Gateway, Stack
from towline.wire import json
from towline.wire.frames import Hints, Tool

# Presence lives three of these: long enough for a test's loop that is kept busy by its own callers.
HEARTBEAT_S = 1.0
TIMING = keys.Timing(HEARTBEAT_S)
RETENTION_S = 7 * 24 * 3600


@dataclass
class Door:
    """A stack of gateways with its stores, open to the test.

    Attributes:
        commands: a plain client, to look at what is there and to break it.
    """

    stack: Stack
    redis: Redis
    commands: redis.asyncio.Redis
    postgres: Postgres
    redis_url: str

    def client(self, gateway: Gateway | None = None, *, key: str | None = None) -> httpx.AsyncClient:
        """A client of one gateway (the first), with an API key (the stack's)."""
        gateway = gateway or self.stack.gateways[0]
        headers = {"authorization": f"Bearer {key or self.stack.api_key}"}
        return httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30)

    def machine(self, user: str, **tools: Hints) -> "Machine":
        """A machine of a user, not yet connected; tools by name (default: `read`, hinted, and `write`)."""
        return Machine(self, UserId(user), tools or {"read": Hints(read_only=True), "write": Hints()})

    async def add_gateway(self, env: Mapping[str, str] | None = None) -> Gateway:
        """Start one more and wait until it knows enough of Redis to say `offline`."""
        gateway = await self.stack.add_gateway(env)
        async with self.client(gateway) as client:

            async def knows() -> bool:
                answer = await client.get("/v1/users/nobody/presence")
                return bool(answer.json()["state"] == "offline")

            await eventually(knows)
        return gateway

    async def count(self, user: str) -> int:
        """How many records a user has."""
        return len(await self.rows("select 1 from requests where user_id = %s", user))

    async def rows(self, query: str, *params: Any) -> list[Any]:
        """Run SQL of the test's own."""
        async with self.postgres._pool.connection() as connection:
            cursor = await connection.execute(query.encode(), params)
            return await cursor.fetchall() if cursor.description else []


@contextlib.asynccontextmanager
async def open_door(
    servers: Servers, postgres_url: str, directory: Path, *, gateways: int = 1, env: Mapping[str, str] | None = None
) -> AsyncIterator[Door]:
    """Run gateways on an empty Redis database; use it as a fixture of the module, and other users in each test."""
    # No other test runs meanwhile, so whichever database `redis_url` of those hands out is free.
    redis_url = urlunsplit(urlsplit(servers.redis_url)._replace(path="/1"))
    async with (
        redis.asyncio.Redis.from_url(redis_url) as client,
        Stack(directory, postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S) as stack,
        open_redis(redis_url) as opened,
        open_postgres(postgres_url) as postgres,
    ):
        await client.flushdb()
        door = Door(stack, opened, client, postgres, redis_url)
        for _ in range(gateways):
            await door.add_gateway(env)
        yield door


class Machine:
    """A user's machine and the worker that holds its socket; `async with` connects it, and keeps presence fresh."""

    def __init__(self, door: Door, user: UserId, tools: Mapping[str, Hints]) -> None:
        self.user = user
        self.machine = MachineId(f"machine-of-{user}")
        self.worker = WorkerId(f"played-worker-{new_id()}")
        self.session = SessionId(new_id())
        self.tools = tools
        self.epoch = 0
        self.token_id = ""
        self.executed: list[JobId] = []
        self.notes: list[Mapping[str, str]] = []
        self._since_ms = int(time.time() * 1000)
        self._redis = door.redis
        self._requests = Requests(door.postgres, retention_s=RETENTION_S)
        self._jobs = Jobs(door.redis)
        self._tokens = Tokens(door.postgres)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        _, value = await self._tokens.add_machine_token(self.user, "played", None)
        minted = await self._tokens.mint_session(value)
        assert minted is not None
        self.epoch, self.token_id = minted.epoch, minted.token_id
        tools = [Tool(name, hints=hints) for name, hints in self.tools.items()]
        await self._tokens.see_machine(
            self.user, self.machine, name="laptop", version="1", tools=tools, epoch=self.epoch
        )
        await self._assert(first=True)
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._read_notes())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.vanish()

    async def vanish(self) -> None:
        """Give no more sign of life; presence lapses by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def leave(self, *, grace_ms: int | None) -> None:
        """Say goodbye (None), or lose the socket."""
        await self.vanish()
        await presence.leave(self._redis, self.user, self.epoch, grace_ms=grace_ms)

    def serve(self, result: Any = "done") -> None:
        """From now on execute every job and answer every probe."""
        self._tasks.append(asyncio.create_task(self._serve(result)))

    async def take(self) -> Taken:
        """Wait for the next job."""

        async def taken() -> list[Taken] | None:
            call = take_call(self.user, self.epoch, self.session, 1)
            return parse_take(await self._redis.run(call.script, call.keys, call.args))

        return (await eventually(taken))[0]

    async def begin(self, job: JobId) -> None:
        """Mark it begun."""
        assert await self._requests.begin(Begin(job, self.machine, "journal"))

    async def finish(self, job: JobId, outcome: Any, *, state: str = "completed", settle: bool = True) -> Finished:
        """Make an outcome durable and, unless told otherwise, publish it."""
        text = json.dumps(outcome).decode()
        finished = await self._requests.finish(Finish(job, self.user, state, text, new_id()))
        assert finished is not None
        if settle:
            await self._jobs.settle(finished.record)
        return finished

    async def run_next(self, result: Any = "done") -> Taken:
        """Take, begin and complete the next job."""
        taken = await self.take()
        await self.begin(taken.entry.job)
        self.executed.append(taken.entry.job)
        await self.finish(taken.entry.job, {"result": result})
        return taken

    async def _assert(self, *, first: bool) -> None:
        call = presence.serve_call(
            presence.Assertion(
                user=self.user,
                machine=self.machine,
                worker=self.worker,
                session=self.session,
                epoch=self.epoch,
                first=first,
                since_ms=self._since_ms,
                seen_ms=int(time.time() * 1000),
                busy=False,
                free=0,
                in_flight=(),
                tools={name: hints.repeatable for name, hints in self.tools.items()} if first else None,
            ),
            TIMING,
        )
        served = presence.parse_serve(await self._redis.run(call.script, call.keys, call.args))
        assert served.status == "ok"

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._assert(first=False)

    async def _read_notes(self) -> None:
        inbox = control_inbox(self._redis, self.worker)
        while True:
            self.notes += await inbox.read()

    async def _serve(self, result: Any) -> None:
        answered = 0
        while True:
            for note in self.notes[answered:]:
                answered += 1
                if note["note"] == "probe":
                    reply = {"probe": note["probe"], "busy": "1"}
                    await tell_gateway(self._redis, GatewayId(note["reply_to"]), reply)
            call = take_call(self.user, self.epoch, self.session, 16)
            for taken in parse_take(await self._redis.run(call.script, call.keys, call.args)) or ():
                await self.begin(taken.entry.job)
                self.executed.append(taken.entry.job)
                await self.finish(taken.entry.job, {"result": result})
            await asyncio.sleep(0.005)
