"""The naive fan-out: what one writes first, each client's response reads the Redis stream by itself.

    python -m harness.bench.naive_streams PORT

Starlette's StreamingResponse on Hypercorn; one blocking XREAD, and so one connection to Redis, per client; each event
is put into words for each client anew. `REDIS_URL` says where.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from harness.bench.crowd import raise_file_limit
from harness.bench.naive_hub import serve_app

READY = "naive streams ready"
KEEP_ALIVE_MS = 15_000
CONNECTIONS_MAX = 10_000


class Streams:
    """`GET /runs/{run}/events`."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def serve(self, request: Request) -> StreamingResponse:
        """Answer with what the run's stream holds, and then with what comes."""
        return StreamingResponse(self._events(request.path_params["run"]), media_type="text/event-stream")

    async def _events(self, run: str) -> AsyncIterator[str]:
        last = "0"
        while True:
            answer: Any = await self._client.xread({stream_key(run): last}, block=KEEP_ALIVE_MS)
            if not answer:
                yield ": keep-alive\n\n"
                continue
            ((_, entries),) = answer.items() if isinstance(answer, dict) else answer
            for last, fields in entries[0] if isinstance(entries[0], list) else entries:
                data = json.dumps({"uid": fields["uid"], "type": fields["type"], "data": fields["data"]})
                yield f"id: {last}\nevent: {fields['type']}\ndata: {data}\n\n"


def stream_key(run: str) -> str:
    """Where the events of a run are."""
    return f"naive-events:{run}"


async def serve(port: int) -> None:
    """Serve on the loopback address until killed."""
    raise_file_limit()
    client = redis.asyncio.Redis.from_url(
        os.environ["REDIS_URL"], decode_responses=True, socket_timeout=None, max_connections=CONNECTIONS_MAX
    )
    async with client:
        app = Starlette(routes=[Route("/runs/{run}/events", Streams(client).serve)])
        await serve_app(app, port, READY)


def main(port: str) -> None:
    """Serve."""
    asyncio.run(serve(int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
