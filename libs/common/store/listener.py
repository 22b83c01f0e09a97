"""Postgres notifications, on a connection of their own.

Promises: nothing alone: notes are lost while the connection is away, and whoever hears them looks for himself from time
to time. But each new connection is told of, so that what was missed is looked for at once.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable

import psycopg
from psycopg import sql

from common.store.postgres import CONNECT_TIMEOUT_S

# A dead link shows within this and three keepalives; a quiet channel costs one empty wait.
WAIT_S = 30.0
# The server is away: all its listeners come back spread over this long.
RECONNECT_AFTER_S = (0.2, 1.0)


async def run_listener(url: str, channel: str, heard: Callable[[str | None], None]) -> None:
    """Listen until cancelled; reconnects by itself.

    Args:
        heard: called with the payload of each note, and with None whenever listening has begun (again): anything may
            have happened before. Must not block.
    """
    while True:
        with contextlib.suppress(psycopg.OperationalError, psycopg.InterfaceError, OSError):
            await _listen_once(url, channel, heard)
        await asyncio.sleep(random.uniform(*RECONNECT_AFTER_S))  # noqa: S311


async def _listen_once(url: str, channel: str, heard: Callable[[str | None], None]) -> None:
    connection = await psycopg.AsyncConnection.connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name="towline-listener",
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
    )
    async with connection:
        await connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        heard(None)
        while True:
            async for note in connection.notifies(timeout=WAIT_S):
                heard(note.payload)
