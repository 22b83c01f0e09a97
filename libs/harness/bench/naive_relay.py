"""The naive relay: what one writes first, one upstream event after the other.

    python -m harness.bench.naive_relay

httpx by lines, one awaited XADD per event, then one SETEX for liveness and, as every event here is forward progress,
one for that, trimmed as it goes. No lease is looked at, no cursor is kept, nothing is
de-duplicated. Which run to tail, and where, it takes from a list in Redis (`FOLLOW`).
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import redis.asyncio

READY = "naive relay ready"
FOLLOW = "bench:naive-relay:follow"

STREAM_MAXLEN = 10_000
LIVENESS_TTL_S = 300
PROGRESS_TTL_S = 3600
PROGRESS_TYPES = {"output", "result", "assistant", "tool_result"}


def stream_key(run: str) -> str:
    """Where the events of a run go."""
    return f"naive:{run}"


async def parse_sse_stream(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a response, each a dictionary as the essay's is."""
    event_type, event_id = "message", ""
    data: list[str] = []
    async for line in response.aiter_lines():
        if not line:
            if data:
                yield {"type": event_type, "id": event_id, "data": json.loads("\n".join(data))}
            event_type, data = "message", []
        elif line.startswith("data:"):
            data.append(line[5:].strip())
        elif line.startswith("event:"):
            event_type = line[6:].strip()
        elif line.startswith("id:"):
            event_id = line[3:].strip()


async def tail(http: httpx.AsyncClient, client: "redis.asyncio.Redis", run: str, url: str) -> None:
    """Follow one upstream until it ends or breaks."""
    timeout = httpx.Timeout(connect=15.0, read=1800.0, write=15.0, pool=15.0)
    async with http.stream("GET", url, timeout=timeout) as response:
        response.raise_for_status()
        async for event in parse_sse_stream(response):
            await client.xadd(stream_key(run), {"data": json.dumps(event)}, maxlen=STREAM_MAXLEN, approximate=True)
            now = str(time.time())
            await client.setex(f"naive-liveness:{run}", LIVENESS_TTL_S, now)
            if event["type"] in PROGRESS_TYPES:
                await client.setex(f"naive-progress:{run}", PROGRESS_TTL_S, now)


async def run_relay() -> None:
    """Tail what is asked for, one after the other, until killed."""
    limits = httpx.Limits(max_keepalive_connections=200, max_connections=200, keepalive_expiry=None)
    client = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True, socket_timeout=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http, client:
        print(READY, flush=True)
        while True:
            _, asked = await client.blpop([FOLLOW])  # type: ignore[misc]  # awaitable in the asyncio client
            run, url = json.loads(asked)
            try:
                await tail(http, client, run, url)
            except httpx.HTTPError as error:
                print(f"{run} ended: {error!r}", flush=True)  # the essay would retry; here the measurement is over


if __name__ == "__main__":
    asyncio.run(run_relay())
