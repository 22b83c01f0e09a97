"""Stream tokens over HTTP: what a product's backend gives to a browser, so that it may follow what it shows.

Promises: nobody gets a token for what their key does not reach.
"""

import time

from common.ids import RunId, ThreadId
from common.store.threads import Threads
from gateway import problems, topics
from gateway.auth import Auth
from gateway.http import Answer
from gateway.problems import Refusal
from gateway.request import Request
from gateway.stream_tokens import StreamTokens
from towline.wire import json
from towline.wire.api import timestamp
from towline.wire.runs import StreamToken, StreamTokenCreate


class StreamTokenRoutes:
    """The handler of stream tokens."""

    def __init__(self, *, auth: Auth, threads: Threads, tokens: StreamTokens) -> None:
        self._auth = auth
        self._threads = threads
        self._tokens = tokens

    async def mint_token(self, request: Request) -> Answer:
        """`POST /v1/stream-tokens`."""
        key = await self._auth.require(request, "runs", "threads")
        body = await request.read(StreamTokenCreate)
        if body.runs:
            await self._auth.require_unbound(request, "runs")
        if body.threads:
            await self._auth.require(request, "threads")
        runs = [RunId(run) for run in sorted(set(body.runs))]
        threads = [ThreadId(thread) for thread in sorted(set(body.threads))]
        if key.users is not None:
            for thread in threads:
                record = await self._threads.read(thread)
                if record is None or not key.reaches(record.user):
                    raise problems.not_found("thread")
        if not self._tokens.is_configured:
            raise Refusal(problems.NOT_CONFIGURED, "this installation makes no stream tokens: TOWLINE_TOKEN_KEYS")
        expires_ms = time.time_ns() // 1_000_000 + int(body.ttl_s * 1000)
        opens = [*map(topics.of_run, runs), *map(topics.of_thread, threads)]
        token = StreamToken(self._tokens.mint(opens, expires_ms), [*runs], [*threads], timestamp(expires_ms))
        return Answer(201, json.dumps(token), ((b"cache-control", b"no-store"),))
