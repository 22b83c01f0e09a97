"""Absurd with its own worker, as a peer of turns; and the least that a wake-up through Postgres can cost.

    python -m harness.bench.peers_absurd work
    python -m harness.bench.peers_absurd drive PLAN RESULT
    python -m harness.bench.peers_absurd drive-spaced PLAN RESULT
    python -m harness.bench.peers_absurd notify PLAN RESULT

`work` is the SDK's worker as it comes: it polls each 0.25 s, and finishes what it has claimed before it claims again.
`drive` spawns tasks that do nothing and waits until they are completed, which a trigger announces, so that nobody polls
for that. `drive-spaced` rests up to one poll between two tasks: without that each comes just after a poll and waits for
all of the next. `notify` commits a row and a notification in one statement, one at a time, and waits until a second
connection hears it. Waits are from the commit to the start (for `notify`: to the hearing). All take `DATABASE_URL`.
"""

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psycopg
from absurd_sdk import AsyncAbsurd, AsyncTaskContext

from harness.bench.load import Measured
from harness.bench.task_queues import READY, VALUE, Plan, read_plan, run_closed_loop, write_measured

QUEUE = "bench"
CONCURRENCY = 32
# The SDK's own.
POLL_EVERY_S = 0.25
URL = os.environ.get("DATABASE_URL", "")
_SPAWN = "select task_id::text from absurd.spawn_task('bench', 'nothing', '{}'::jsonb, '{}'::jsonb)"
_ANNOUNCE = """
create or replace function bench_announce() returns trigger language plpgsql as $$
begin
  if new.state = 'completed' then
    perform pg_notify('bench_completed', new.task_id::text);
  end if;
  return null;
end
$$;
create or replace trigger bench_announce after update of state on absurd.t_bench
for each row execute function bench_announce();
"""
_HOPS = """
select (extract(epoch from first_started_at - enqueue_at) * 1000)::float8 from absurd.t_bench
where task_id = any (%s::uuid[])
"""
_HEARD = "insert into bench_heard default values returning pg_notify('bench_heard', '')"


async def work() -> None:
    """Work until killed."""
    async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as connection:
        await connection.execute("select absurd.create_queue('bench')")
        await connection.execute(_ANNOUNCE)
    absurd = AsyncAbsurd(URL, queue_name=QUEUE)

    @absurd.register_task("nothing")
    async def do_nothing(params: Any, context: AsyncTaskContext) -> None:  # the SDK passes both
        pass

    print(READY, flush=True)
    await absurd.start_worker(concurrency=CONCURRENCY, poll_interval=POLL_EVERY_S)


async def drive(plan: Plan, *, rests_s: float = 0.0) -> Measured:
    """Spawn tasks and wait until they are completed; before each rest up to `rests_s`. Raises: TimeoutError."""
    spawned: list[str] = []
    async with (
        await psycopg.AsyncConnection.connect(URL, autocommit=True) as connection,
        _hearing("bench_completed") as heard,
    ):

        async def run_task() -> object:
            await asyncio.sleep(random.uniform(0, rests_s))
            cursor = await connection.execute(_SPAWN)
            ((task,),) = await cursor.fetchall()
            spawned.append(task)
            await heard(task)
            return VALUE

        measured = await run_closed_loop(plan, run_task)
        hops = await (await connection.execute(_HOPS, [spawned])).fetchall()
    return msgspec.structs.replace(measured, latencies_ms=[hop for (hop,) in hops])


async def notify(plan: Plan) -> Measured:
    """Commit and be told of it, again and again. Raises: TimeoutError."""
    async with (
        await psycopg.AsyncConnection.connect(URL, autocommit=True) as connection,
        _hearing("bench_heard") as heard,
    ):
        await connection.execute("create table if not exists bench_heard (at timestamptz default clock_timestamp())")

        async def wake() -> object:
            await asyncio.gather(connection.execute(_HEARD), heard(""))
            return VALUE

        return await run_closed_loop(plan, wake)


class _Hearing:
    """Who waits for which payload; what nobody waits for yet is kept for whoever comes."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def note(self, payload: str) -> None:
        future = self._future(payload)
        if not future.done():
            future.set_result(None)

    async def __call__(self, payload: str) -> None:
        await self._future(payload)
        del self._waiting[payload]

    def _future(self, payload: str) -> asyncio.Future[None]:
        return self._waiting.setdefault(payload, asyncio.get_running_loop().create_future())


@asynccontextmanager
async def _hearing(channel: str) -> AsyncIterator[_Hearing]:
    hearing = _Hearing()
    async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as connection:
        await connection.execute(f"listen {channel}")

        async def listen() -> None:
            async for note in connection.notifies():
                hearing.note(note.payload)

        listener = asyncio.create_task(listen(), name=f"listener:{channel}")
        try:
            yield hearing
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)


def main(role: str, plan_path: str = "", result_path: str = "") -> None:
    """Play one of the four."""
    match role:
        case "work":
            asyncio.run(work())
        case "drive":
            write_measured(result_path, asyncio.run(drive(read_plan(plan_path))))
        case "drive-spaced":
            write_measured(result_path, asyncio.run(drive(read_plan(plan_path), rests_s=POLL_EVERY_S)))
        case "notify":
            write_measured(result_path, asyncio.run(notify(read_plan(plan_path))))


if __name__ == "__main__":
    main(*sys.argv[1:])
