"""The driver of turns: entries for threads that an `echo` agent answers, each waited for.

    python -m harness.bench.turn_load PLAN RESULT

A closed loop: each caller has a thread and a connection of its own, posts an entry, waits until its turn has ended, and
posts the next one. The waits that are reported are either the hops, from the entry's commit to the turn's start, both
by the clock of Postgres (`DATABASE_URL`), or how long each entry's 201 took. Raw HTTP/1.1, so that the driver leaves
the cores to what it measures.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec
import psycopg

from harness.bench import task_queues
from harness.bench.load import Measured
from harness.bench.task_queues import VALUE, run_closed_loop, write_measured

WAIT_S = 60
_HOPS = """
select (extract(epoch from started_at - created_at) * 1000)::float8 from turns where turn = any (%s::uuid[])
"""


class Plan(msgspec.Struct, frozen=True):
    """A closed loop against a gateway's port, with an agent that gives back what it is told; `waits`: the reported."""

    loop: task_queues.Plan
    port: int
    api_key: str
    agent: str
    waits: Literal["hop", "accept"]


class Caller:
    """One keep-alive connection. `turns` takes the id of every turn, and `accepts_ms` how long its entry's 201 took."""

    def __init__(self, plan: Plan, turns: list[str], accepts_ms: list[float]) -> None:
        self._plan = plan
        self._turns = turns
        self._accepts_ms = accepts_ms
        self._thread = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def answer(self) -> object:
        """Post an entry, and return the answer. Raises: RuntimeError: refused, or not answered."""
        if not self._thread:
            self._thread = (await self._ask("POST", "/v1/threads", {"agent": self._plan.agent}))["thread"]
        asked_at = time.perf_counter()
        turn = (await self._ask("POST", f"/v1/threads/{self._thread}/entries", {"text": VALUE}))["turn"]
        self._accepts_ms.append((time.perf_counter() - asked_at) * 1000)
        self._turns.append(turn["turn"])
        ended = await self._ask("GET", f"/v1/turns/{turn['turn']}")
        return ended["outcome"]["text"]

    async def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._plan.port)
        reader, writer = self._streams
        encoded = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: 127.0.0.1:{self._plan.port}",
            f"Authorization: Bearer {self._plan.api_key}",
            "Content-Type: application/json",
            f"Content-Length: {len(encoded)}",
        ]
        head.append(f'Idempotency-Key: "{uuid4().hex}"' if method == "POST" else f"Prefer: wait={WAIT_S}")
        writer.write("\r\n".join([*head, "", ""]).encode() + encoded)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        size = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        received = await reader.readexactly(size)
        if not answer.startswith("http/1.1 20"):
            raise RuntimeError(f"{method} {path}: {answer} {received[:2000]!r}")
        return json.loads(received)  # type: ignore[no-any-return]


async def drive(plan: Plan) -> Measured:
    """Put turns through the product. Raises: TimeoutError, WrongAnswer, RuntimeError."""
    turns: list[str] = []
    accepts_ms: list[float] = []
    free = [Caller(plan, turns, accepts_ms) for _ in range(plan.loop.in_flight)]

    async def run_turn() -> object:
        caller = free.pop()
        try:
            return await caller.answer()
        finally:
            free.append(caller)

    measured = await run_closed_loop(plan.loop, run_turn)
    if plan.waits == "accept":
        return msgspec.structs.replace(measured, latencies_ms=accepts_ms)
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"]) as connection:
        hops = await (await connection.execute(_HOPS, [turns])).fetchall()
    return msgspec.structs.replace(measured, latencies_ms=[hop for (hop,) in hops])


def main(plan_path: str, result_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    write_measured(result_path, asyncio.run(drive(plan)))


if __name__ == "__main__":
    main(*sys.argv[1:])
