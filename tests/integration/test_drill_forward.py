"""The door before `kubectl port-forward`: that must never be left with data that nobody takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from harness.drills.forward import Door
from harness.ports import free_port

PIECE = b"x" * 10_000
# More than all buffers between the two ends hold.
PIECES = 2000


class Far:
    """What stands for the forward: says much, and notes how its connection ended."""

    def __init__(self) -> None:
        self.port = 0
        self.said_all = asyncio.Event()
        self.was_told_the_end = asyncio.Event()
        self.broken = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def hear() -> None:
            while await reader.read(1024):
                pass
            self.was_told_the_end.set()

        hearing = asyncio.create_task(hear())
        try:
            for _ in range(PIECES):
                writer.write(PIECE)
                await writer.drain()
            self.said_all.set()
            await hearing
        except OSError:
            self.broken = True
        finally:
            hearing.cancel()
            writer.close()


@asynccontextmanager
async def far_behind_a_door() -> AsyncIterator[tuple[Far, int]]:
    """A far end, and the port of a door that leads to it."""
    far = Far()
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    door = Door(free_port(), server.sockets[0].getsockname()[1])
    await door.open()
    try:
        yield far, door.port
    finally:
        await door.close()
        server.close()


async def test_a_client_gets_all_of_it() -> None:
    async with far_behind_a_door() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(30):
            assert len(await reader.readexactly(len(PIECE) * PIECES)) == len(PIECE) * PIECES
        writer.close()


async def test_what_comes_for_a_client_that_has_gone_is_taken() -> None:
    async with far_behind_a_door() as (far, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(len(PIECE))
        # With bytes unread this is a reset.
        writer.transport.abort()
        async with asyncio.timeout(30):
            await far.said_all.wait()
            await far.was_told_the_end.wait()
        assert not far.broken


async def test_a_client_is_let_go_where_nobody_is() -> None:
    door = Door(free_port(), free_port())
    await door.open()
    try:
        reader, _ = await asyncio.open_connection("127.0.0.1", door.port)
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                assert await reader.read() == b""
    finally:
        await door.close()
