"""A machine and its worker as the gateway sees them, played with the real store functions.

For tests of what stands before the door: presence is asserted, jobs are taken and finished in the stores themselves,
without a socket or a sidecar.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from common.ids import MachineId, SessionId, UserId, WorkerId, new_id
from common.store import control, keys
from common.store.jobs import Entry, Jobs
from common.store.postgres import open_postgres
from common.store.presence import Assertion, leave, parse_serve, serve_call
from common.store.records import Finish
from common.store.redis import open_redis
from common.store.requests import Requests
from common.store.tokens import Tokens
from towline.wire import json
from towline.wire.frames import Hints, Tool

# A tool's outcome as its state and document, or None: it never ends.
Ending = tuple[str, dict[str, Any]] | None
RETENTION_S = 7 * 24 * 3600


class PlayedMachine:
    """One user's connected machine: `async with`, and it is online and works.

    Attributes:
        entries: every entry that it was given, in order.
    """

    def __init__(
        self,
        user: str,
        tools: dict[str, Callable[[Entry], Ending]],
        *,
        postgres_url: str,
        redis_url: str,
        heartbeat_s: float,
    ) -> None:
        self._user = UserId(user)
        self._endings = tools
        self._tools = [_tool(name) for name in tools]
        self._urls = postgres_url, redis_url
        self._timing = keys.Timing(heartbeat_s)
        self._machine, self._session = MachineId("played"), SessionId(new_id())
        self._worker = WorkerId(f"played-{new_id()}")
        self._cleanup = AsyncExitStack()
        self.entries: list[Entry] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as cleanup:
            postgres = await cleanup.enter_async_context(open_postgres(self._urls[0]))
            self._redis = await cleanup.enter_async_context(open_redis(self._urls[1]))
            self._requests, self._jobs = Requests(postgres, retention_s=RETENTION_S), Jobs(self._redis)
            tokens = Tokens(postgres)
            _, value = await tokens.add_machine_token(self._user, "played", None)
            minted = await tokens.mint_session(value)
            assert minted is not None
            self._epoch = minted.epoch
            await tokens.see_machine(
                self._user, self._machine, name="played", version="0", tools=self._tools, epoch=self._epoch
            )
            await self._serve_once(first=True)
            group = await cleanup.enter_async_context(asyncio.TaskGroup())
            for loop in (self._run_heartbeats(), self._run_probes()):
                cleanup.callback(group.create_task(loop).cancel)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    async def go(self) -> None:
        """Say goodbye: presence is gone at once."""
        await self._cleanup.aclose()
        async with open_redis(self._urls[1]) as redis:
            await leave(redis, self._user, self._epoch, grace_ms=None)

    async def _run_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(0.05, self._timing.heartbeat_s))
            await self._serve_once(first=False)

    async def _run_probes(self) -> None:
        inbox = control.control_inbox(self._redis, self._worker)
        while True:
            for note in await inbox.read():
                if note["note"] == "probe":
                    answer = {"probe": note["probe"], "busy": "0"}
                    await control.tell_gateway(self._redis, note["reply_to"], answer)

    async def _serve_once(self, *, first: bool) -> None:
        """Assert, claim, take; and end what was taken."""
        now_ms = int(time.time() * 1000)
        assertion = Assertion(
            user=self._user,
            machine=self._machine,
            worker=self._worker,
            session=self._session,
            epoch=self._epoch,
            first=first,
            since_ms=now_ms,
            seen_ms=now_ms,
            busy=False,
            free=16,
            in_flight=[entry.job for entry in self.entries],
            tools={tool.name: tool.hints.repeatable for tool in self._tools},
        )
        (answer,) = await self._redis.run_many([serve_call(assertion, self._timing)])
        for taken in parse_serve(answer).taken:
            self.entries.append(taken.entry)
            ending = self._endings[taken.entry.name](taken.entry)
            if ending is None:
                continue
            state, document = ending
            finish = Finish(taken.entry.job, self._user, state, json.dumps(document).decode(), new_id())
            finished = await self._requests.finish(finish)
            assert finished is not None
            await self._jobs.settle(finished.record)


def _tool(name: str) -> Tool:
    """A read-only tool with one argument."""
    schema = {"type": "object", "properties": {"value": {}, "loud": {}}, "required": ["value"]}
    return Tool(name, f"The tool {name}", schema, Hints(read_only=True))
