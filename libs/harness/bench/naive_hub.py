"""The first peer: everything in one process and one dictionary. It remembers nothing, and it cannot be two.

    python -m harness.bench.naive_hub hub PORT
    python -m harness.bench.naive_hub laptop PORT USER [USER...]

The hub takes a job over HTTP, sends it down the user's WebSocket, and answers with what comes back: what one would
write in an afternoon, with the libraries that the gateway uses (Starlette on Hypercorn). A hub that dies forgets every
job; a caller that asks twice runs it twice. The laptop answers each job with the value that it brought.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from uuid import uuid4

import hypercorn.asyncio
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect

from common.process.http_server import open_listener

HUB_READY, LAPTOPS_READY = "hub ready", "laptops ready"


class Hub:
    """Who is connected, and who waits."""

    def __init__(self) -> None:
        self._laptops: dict[str, WebSocket] = {}
        self._answers: dict[str, asyncio.Future[object]] = {}

    async def submit(self, request: Request) -> Response:
        """`POST /v1/users/{user}/jobs`."""
        laptop = self._laptops.get(request.path_params["user"])
        if laptop is None:
            return JSONResponse({"detail": "not connected"}, 409)
        body = await request.json()
        job = str(uuid4())
        answer = self._answers[job] = asyncio.get_running_loop().create_future()
        try:
            await laptop.send_text(json.dumps({"job": job, "name": body["name"], "args": body["args"]}))
            return JSONResponse({"job": job, "state": "completed", "outcome": {"result": await answer}})
        finally:
            del self._answers[job]

    async def bridge(self, laptop: WebSocket) -> None:
        """`/v1/bridge/{user}`: one laptop, until it leaves."""
        await laptop.accept()
        user = laptop.path_params["user"]
        self._laptops[user] = laptop
        try:
            async for text in laptop.iter_text():
                answer = json.loads(text)
                if future := self._answers.get(answer["job"]):
                    future.set_result(answer["result"])
        finally:
            del self._laptops[user]


async def serve(port: int) -> None:
    """Serve on the loopback address until killed."""
    hub = Hub()
    app = Starlette(
        routes=[
            Route("/v1/users/{user}/jobs", hub.submit, methods=["POST"]),
            WebSocketRoute("/v1/bridge/{user}", hub.bridge),
        ]
    )
    await serve_app(app, port, HUB_READY)


async def serve_app(app: ASGIApp, port: int, ready: str) -> None:
    """Serve an application as the gateway's server would; say that it is ready once its socket listens."""
    config = Config()
    # As the gateway's: without TCP_NODELAY answers would wait for acknowledgements.
    config.bind = [f"fd://{open_listener('127.0.0.1', port).detach()}"]
    config.accesslog = None
    config.keep_alive_timeout = 75
    print(ready, flush=True)  # what connects from now on is served
    await hypercorn.asyncio.serve(app, config)  # type: ignore[arg-type]  # Starlette's types and Hypercorn's differ


async def run_laptops(port: int, users: Sequence[str]) -> None:
    """Be the laptops of some users, each with a socket of its own, until killed."""
    sockets = [await connect(f"ws://127.0.0.1:{port}/v1/bridge/{user}", compression=None) for user in users]
    print(LAPTOPS_READY, flush=True)
    async with asyncio.TaskGroup() as group:
        for socket in sockets:
            group.create_task(_answer(socket))


async def _answer(socket: ClientConnection) -> None:
    async for text in socket:
        job = json.loads(text)
        await socket.send(json.dumps({"job": job["job"], "result": job["args"]["value"]}))


def main(role: str, port: str, *users: str) -> None:
    """Play one of the two."""
    asyncio.run(serve(int(port)) if role == "hub" else run_laptops(int(port), users))


if __name__ == "__main__":
    main(*sys.argv[1:])
