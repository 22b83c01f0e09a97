"""One HTTP/2 connection that reads all of its streams as they come, as a browser does.

(httpx over HTTP/2 stops opening streams while others on the connection are open and quiet.)
"""

import asyncio
import ssl
from pathlib import Path
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events


class Http2Connection:
    """`async with` connects; `get` opens one more stream.

    Attributes:
        statuses: of each stream, once its head is there.
        bodies: what has come of each.
        ended: streams that were ended properly.
    """

    def __init__(self, port: int, ca_file: Path) -> None:
        self._port = port
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        self._tls.set_alpn_protocols(["h2"])
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="ascii"))
        self.statuses: dict[int, int] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls)
        self._h2.initiate_connection()
        self._flush()
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.transport.abort()

    @property
    def protocol(self) -> str | None:
        """What was agreed upon in the TLS handshake."""
        found: str | None = self._writer.get_extra_info("ssl_object").selected_alpn_protocol()
        return found

    def get(self, path: str, headers: dict[str, str]) -> int:
        """Ask for something; returns the stream's number."""
        stream = self._h2.get_next_available_stream_id()
        head = [(":method", "GET"), (":scheme", "https"), (":authority", "localhost"), (":path", path)]
        self._h2.send_headers(stream, [*head, *headers.items()], end_stream=True)
        self._flush()
        return stream

    async def _read(self) -> None:
        while data := await self._reader.read(65536):
            for event in self._h2.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    self.statuses[event.stream_id] = int(dict(event.headers)[":status"])
                elif isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    self.ended.add(event.stream_id)
            self._flush()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
