"""What a gateway holds of each caller that waits: less than what the caller sent, however large that is."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest
from job_stores import TIMING, new_user
from prometheus_client import CollectorRegistry
from starlette.types import Message
from support import eventually

from common.ids import GatewayId, UserId, new_id
from common.store.jobs import Jobs
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.replies import Waiters
from common.store.requests import Requests
from common.store.tokens import Tokens
from gateway.auth import Auth
from gateway.http import Answer
from gateway.jobs import JobRoutes
from gateway.metrics import GatewayMetrics
from gateway.request import Request
from gateway.stream_tokens import StreamTokens
from towline.wire import json

BODY_BYTES_MAX = 256 * 1024
# Many small values: parsed, they take ten times the room of their text.
ARGS = {"rows": [[number, "x" * 20, 2 * number, True] for number in range(5600)]}
ARGS_BYTES = len(json.dumps(ARGS))
CALLERS = 8


class Door(NamedTuple):
    """The routes in this process, so that its memory can be looked into; `count` tells how many callers wait."""

    routes: JobRoutes
    count: Callable[[], int]
    api_key: str

    async def submit(self, user: UserId, key: str, wait_s: int) -> Answer:
        return await self.routes.submit(self._request({"user": user}, key, wait_s))

    async def read(self, job: str, wait_s: int) -> Answer:
        return await self.routes.read(self._request({"job": job}, "", wait_s))

    def _request(self, params: dict[str, str], key: str, wait_s: int) -> Request:
        headers = [
            (b"authorization", f"Bearer {self.api_key}".encode()),
            (b"content-type", b"application/json"),
            (b"idempotency-key", key.encode()),
            (b"prefer", b"wait=%d" % wait_s),
        ]
        is_read = asyncio.Event()

        async def receive() -> Message:
            """The body, which nothing here keeps; then nothing, for the caller stays."""
            if is_read.is_set():
                await asyncio.Event().wait()
            is_read.set()
            return {"type": "http.request", "body": json.dumps({"name": "echo", "args": ARGS, "if_offline": "queue"})}

        return Request(headers, receive, params=params, query={}, body_bytes_max=BODY_BYTES_MAX)


@pytest.fixture
async def door(redis_store: Redis, postgres: Postgres, jobs: Jobs, requests: Requests) -> Door:
    tokens = Tokens(postgres)
    added = await tokens.add_api_key("test", ["jobs"], None)
    assert added
    name = GatewayId(f"gateway-{new_id()}")
    waiters = Waiters(redis_store, jobs, requests, gateway=name, timing=TIMING)
    routes = JobRoutes(
        auth=Auth(tokens, StreamTokens([])),
        redis=redis_store,
        jobs=jobs,
        requests=requests,
        tokens=tokens,
        waiters=waiters,
        is_full=lambda: False,
        timing=TIMING,
        metrics=GatewayMetrics(CollectorRegistry()),
        is_strict=True,
    )
    return Door(routes, lambda: waiters.count, added[1])


@pytest.fixture
async def measured() -> AsyncIterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("way", ["submitter", "joiner", "reader"])
async def test_a_caller_that_waits_holds_no_arguments(door: Door, way: str) -> None:
    """A thousand of them may wait at one gateway, with a quarter of a megabyte each."""
    user = new_user()
    accepted = json.loads((await door.submit(user, "known", 0)).body)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]

    def wait(number: int) -> "asyncio.Task[Answer]":
        if way == "reader":
            return asyncio.create_task(door.read(accepted["job"], 60))
        return asyncio.create_task(door.submit(user, f"new-{number}" if way == "submitter" else "known", 60))

    waiting = [wait(number) for number in range(CALLERS)]

    def is_little_held() -> bool:
        assert not any(task.done() for task in waiting)
        assert door.count() == CALLERS
        gc.collect()
        held = (tracemalloc.get_traced_memory()[0] - before) // CALLERS
        assert held < ARGS_BYTES / 4, f"{held} bytes for each that waits"
        return True

    try:
        await eventually(is_little_held)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
