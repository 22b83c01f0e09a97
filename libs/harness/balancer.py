"""A TCP balancer in front of the workers, for development: what a Kubernetes Service does in production.

Each connection goes to the next backend, in turn, that accepts it; a backend that refuses is passed over. Backends are
neither probed nor weighted, so a frozen one still gets its share, as a Service gives it until the probe has failed.
"""

import asyncio
import contextlib
from collections.abc import Sequence

CONNECT_WITHIN_S = 1.0
# What one machine's sidecars and clients need, with room; over it a new connection is closed at once.
CONNECTIONS_MAX = 10_000
CHUNK_BYTES = 64 * 1024


class Balancer:
    """Listens on a loopback port from `start` to `stop`.

    Attributes:
        backends: host and port of each; may be changed at any time and counts for new connections.
    """

    def __init__(self, backends: Sequence[tuple[str, int]] = ()) -> None:
        self.backends = list(backends)
        self.port = 0
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> None:
        """Listen on a loopback port. Raises: OSError if it is taken."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = port

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        backend: asyncio.StreamWriter | None = None
        try:
            if len(self._connections) > CONNECTIONS_MAX:
                return
            connected = await self._connect()
            if connected is None:
                return
            backend_reader, backend = connected
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, backend))
                group.create_task(_copy(backend_reader, writer))
        except* OSError:
            pass  # One side reset the connection; `abort` below tells the other.
        except* asyncio.CancelledError:
            pass  # Only `stop` does it. Python 3.11 would report a cancelled connection as an error.
        finally:
            self._connections.discard(task)
            for end in (writer, backend):
                if end is not None:
                    end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for _ in range(len(self.backends)):
            self._turn += 1
            host, port = self.backends[self._turn % len(self.backends)]
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_WITHIN_S):
                    return await asyncio.open_connection(host, port)
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    # A half-closed connection stays half open, as without us between.
    writer.write_eof()
