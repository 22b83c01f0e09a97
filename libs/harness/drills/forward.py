"""Ways into a pod: loopback ports of ours, `kubectl port-forward` behind them.

All connections of a pod share one to the API server, and that stands still for good once one of them is left with data
that nobody takes. So clients are kept away from it: what comes for a client that has gone is taken, and thrown away.

Owns:     the `kubectl` process of a pod, made anew when it ends, and a listener for each port.
Used by:  `kube` and its parts.
"""

import asyncio
import contextlib
import os
from pathlib import Path

from harness.drills.kubectl import Kubectl
from harness.drills.reach import wait_until
from harness.ports import free_port
from harness.runner import Process

FORWARDS_WITHIN_S = 30.0
REDIAL_EVERY_S = 0.2
CHUNK_BYTES = 64 * 1024


class Forward:
    """Loopback ports that lead to those of a pod, as long as there is one of that name.

    Attributes:
        ports: ours, by the pod's own; the same always.
    """

    def __init__(self, kubectl: Kubectl, slot: str, directory: Path, inner_ports: tuple[int, ...]) -> None:
        """Describe one; `slot` names the file that takes its log."""
        self.ports = {inner: free_port() for inner in inner_ports}
        self._behind = {inner: free_port() for inner in inner_ports}
        self._kubectl = kubectl
        self._process = Process(f"{slot}-forward", [], directory=directory, env=os.environ)
        self._keeper: asyncio.Task[None] | None = None
        self._doors: list[Door] = []

    async def lead_to(self, pod: str) -> None:
        """Lead there, and nowhere else; returns when it does. Raises: DrillFailed."""
        await self.stop()
        pairs = [f"{behind}:{inner}" for inner, behind in self._behind.items()]
        self._process.argv = self._kubectl.argv("port-forward", "--address", "127.0.0.1", f"pod/{pod}", *pairs)
        await self._process.start()
        self._keeper = asyncio.create_task(self._keep(), name=f"forward:{pod}")

        async def is_there() -> bool:
            return self._process.read_log().count("Forwarding from") >= len(pairs)

        await wait_until(f"a way to {pod}", is_there, within_s=FORWARDS_WITHIN_S)
        self._doors = [Door(ours, self._behind[inner]) for inner, ours in self.ports.items()]
        for door in self._doors:
            await door.open()

    async def stop(self) -> None:
        """Close the ports and what goes through them."""
        for door in self._doors:
            await door.close()
        self._doors = []
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._process.stop()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(REDIAL_EVERY_S)
            if not self._process.is_running:
                await self._process.start()


class Door:
    """Takes connections on one loopback port, and leads them to another; what comes back is taken in any case."""

    def __init__(self, port: int, behind: int) -> None:
        self.port = port
        self._behind = behind
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._behind)
            async with asyncio.TaskGroup() as group:
                group.create_task(_there(reader, far_writer))
                group.create_task(_back(far_reader, writer))
        except* OSError:
            pass  # Nobody is there, or it broke off; the client is told below.
        except* asyncio.CancelledError:
            pass  # Only `close` does it. Python 3.11 would report a cancelled connection as an error.
        finally:
            self._connections.discard(task)
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()


async def _there(reader: asyncio.StreamReader, far_writer: asyncio.StreamWriter) -> None:
    """Carry what the client says; its leaving, however it left, is an end like any other."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            far_writer.write(chunk)
            await far_writer.drain()
    far_writer.write_eof()


async def _back(far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry what the pod says to its end, and let the client go then; take it also when the client has gone."""
    is_there = True
    while chunk := await far_reader.read(CHUNK_BYTES):
        if is_there:
            try:
                writer.write(chunk)
                await writer.drain()
            except OSError:
                is_there = False
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()
