"""A whole product on stores of its own, each behind a proxy: for tests of what becomes of jobs when a store fails."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import redis.asyncio
import sidecar_tools
from support import eventually

from common.ids import UserId
from common.store import keys
from harness.embedded import EmbeddedPostgres, EmbeddedValkey
from harness.faults import TcpProxy
from harness.stack import Stack

# Presence outlives the seconds in which Redis loads what it had, and a busy machine's way back to it.
HEARTBEAT_S = 2.0
RECOVERS_WITHIN_S = 10.0
# A door gives a store five seconds. Whoever came while another waited does not wait as long again.
REFUSED_WITHIN_S = 8.0
USER = UserId("alice")
CONNECTIONS_MAX = 30
# While it loads, Redis answers after each 1024 commands only: here, a tenth of a second.
LOAD_DELAY_US = 100

Calls = dict[str, asyncio.Task[dict[str, Any]]]


class ScarcePostgres(EmbeddedPostgres):
    """One whose connections can all be taken."""

    def _argv(self) -> list[str]:
        return [*super()._argv(), "-c", f"max_connections={CONNECTIONS_MAX}"]


class SlowValkey(EmbeddedValkey):
    """One that takes its time to load what it had."""

    def _argv(self) -> list[str]:
        return [*super()._argv(), "--key-load-delay", str(LOAD_DELAY_US)]


class World:
    """A gateway, a worker and a sidecar on two stores, each behind a proxy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.postgres = ScarcePostgres(directory)
        self.valkey = SlowValkey(directory)
        self.executions = directory / "executions"
        self.executions.touch()
        self._callers: list[asyncio.Task[dict[str, Any]]] = []
        self.refusals: dict[str, list[float]] = {}  # by key: how long each 503 took, in seconds

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.postgres.stop)
            stack.push_async_callback(self.valkey.stop)
            self.to_postgres = TcpProxy(await self.postgres.start())
            self.to_redis = TcpProxy(await self.valkey.start())
            for proxy in (self.to_postgres, self.to_redis):
                await proxy.start()
                stack.push_async_callback(proxy.stop)
            self.client = await stack.enter_async_context(self.plain_client(self.valkey.url))
            product = Stack(
                self.directory / "stack",
                postgres_url=self.to_postgres.url,
                redis_url=self.to_redis.url,
                heartbeat_s=HEARTBEAT_S,
            )
            await stack.enter_async_context(product)
            gateway, _ = await asyncio.gather(product.add_gateway(), product.add_worker())
            headers = {"authorization": f"Bearer {product.api_key}"}
            self.http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30)
            )
            env = {"EXECUTIONS": str(self.executions), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            await product.add_sidecar(USER, tools=[sidecar_tools.__file__], env=env)
            try:
                yield self
            finally:
                for caller in self._callers:
                    caller.cancel()
                await asyncio.gather(*self._callers, return_exceptions=True)

    @staticmethod
    def plain_client(url: str) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(url, decode_responses=True, retry=None)

    async def ask(self, key: str, *, wait_s: int, seconds: float = 0) -> httpx.Response:
        """Submit a job with a side effect; what it does is noted under its key."""
        body = {"name": "click", "args": {"button": key, "seconds": seconds}}
        headers = {"idempotency-key": key, "prefer": f"wait={wait_s}"}
        return await self.http.post(f"/v1/users/{USER}/jobs", json=body, headers=headers)

    def start(self, key: str, *, seconds: float = 0) -> asyncio.Task[dict[str, Any]]:
        """A caller of its own; whatever becomes of the test, it does not outlive the world."""
        task = asyncio.create_task(self.call(key, seconds=seconds), name=key)
        self._callers.append(task)
        return task

    async def call(self, key: str, *, seconds: float = 0) -> dict[str, Any]:
        """As a caller does it: the same key until the job has ended."""
        while True:
            began = time.monotonic()
            answer = await self.ask(key, wait_s=20, seconds=seconds)
            if answer.status_code == 200:
                ended: dict[str, Any] = answer.json()
                return ended
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1
                self.refusals.setdefault(key, []).append(time.monotonic() - began)
            else:
                assert answer.status_code == 202, answer.text
            await asyncio.sleep(0.1)

    def runs(self, key: str) -> int:
        return Counter(self.executions.read_text().splitlines())[f"click {key}"]

    async def began(self, key: str) -> None:
        await eventually(lambda: self.runs(key) == 1)

    async def rows(self, query: str, *params: Any) -> list[Any]:
        async with await psycopg.AsyncConnection.connect(self.postgres.url, autocommit=True) as connection:
            return await (await connection.execute(query.encode(), params)).fetchall()

    async def ended_once(self, name: str, calls: Calls, back_at: float, *, within_s: float = RECOVERS_WITHIN_S) -> None:
        """Every job was answered in time with its own outcome, ran once, and has left nothing behind."""
        async with asyncio.timeout(3 * within_s):
            answers = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        took_s = time.monotonic() - back_at
        for key, answer in answers.items():
            assert (answer["state"], answer["outcome"]["result"]) == ("completed", f"clicked {key}")
            assert self.runs(key) == 1
        states = await self.rows("select key, state, outcome from requests where key = any(%s)", list(calls))
        assert sorted((key, state) for key, state, _ in states) == sorted((key, "completed") for key in calls)
        await eventually(self.is_clear)
        print(f"{name}: {len(calls)} jobs, the last was answered {took_s:.2f} s after the fault")
        assert took_s < within_s, f"{took_s:.1f} s"

    async def is_clear(self) -> bool:
        """Whether Redis holds no job of the user, taken or not."""
        if not await self.client.exists(keys.jobs(USER)):
            return True
        groups = await self.client.xinfo_groups(keys.jobs(USER))
        return await self.client.xlen(keys.jobs(USER)) == 0 and all(group["pending"] == 0 for group in groups)


async def under_way(world: World, name: str, *, seconds: float = 1.0) -> Calls:
    """Two jobs that were handed over: one runs, one is queued behind it."""
    running, behind = f"{name}-running", f"{name}-behind"
    calls = {running: world.start(running, seconds=seconds)}
    await world.began(running)
    calls[behind] = world.start(behind)

    async def both_are_there() -> bool:
        return int(await world.client.xlen(keys.jobs(USER))) == 2

    await eventually(both_are_there)
    return calls


async def refused(world: World, name: str, callers: int = 1) -> Calls:
    """Jobs that come during the fault: the door says 503 to each, in time."""
    late = [f"{name}-late-{n}" for n in range(callers)]
    calls: Calls = {}
    for key in late:
        calls[key] = world.start(key)
        await asyncio.sleep(0.2)
    for key in late:
        (took_s, *_) = await eventually(lambda key=key: world.refusals.get(key), within_s=30)
        assert took_s < REFUSED_WITHIN_S, f"{key} was refused after {took_s:.1f} s"
    return calls
