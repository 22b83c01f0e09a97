"""A loop that uses Postgres ends when it is cancelled, at whatever point that happens."""

import asyncio

from common.store.postgres import CONNECTIONS_MAX, open_postgres

STEPS_MAX = 60


async def test_a_cancellation_is_never_lost_while_connections_are_waited_for(postgres_url: str) -> None:
    """On Python 3.11 the pool loses some: it waits in `asyncio.wait_for`. A relay whose runs end at the same moment
    waits for ever then, for the loop that writes their records.
    """

    async def ask_for_ever() -> None:
        while True:
            await postgres.fetch("schema_version")

    async with open_postgres(postgres_url) as postgres:
        for steps in range(STEPS_MAX):
            tasks = [asyncio.create_task(ask_for_ever()) for _ in range(2 * CONNECTIONS_MAX)]
            for _ in range(steps):
                await asyncio.sleep(0)  # one step of the loop: all points of waiting are met in the end
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5.0)
            assert all(task.cancelled() for task in tasks), f"after {steps} steps"
