"""What differs from Hypercorn's own HTTP, for which it has no settings: private methods of it are replaced.

Promises: a connection of HTTP/1.1 never turns into HTTP/2; what is no request that an application could be given is
          refused with a problem and an id of its own, like everything else, and nothing of it is repeated or logged.
          What one stream's client sends or does not read holds up no other stream, and nothing once it has left.
Used by:  common.process.http_server. `tests/integration/test_http_server.py` fails where Hypercorn is not as here.
"""

import asyncio
from typing import Any, cast

import hypercorn.protocol
import structlog
from h2.events import DataReceived, RequestReceived
from h2.events import Event as Http2Event
from hypercorn.events import Closed, Event
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.protocol.ws_stream import WSStream

from common import problems
from common.ids import new_id

logger = structlog.get_logger(__name__)

_DETAILS = {
    problems.HEADERS_TOO_LARGE: "path, query and headers are too large together",
    problems.MALFORMED_REQUEST: "the bytes sent are not a request of HTTP, or not one that can be served",
}


def install() -> None:
    """Replace them, in every connection that is made from now on; again is the same."""
    hypercorn.protocol.H2Protocol = Http2  # type: ignore[attr-defined]
    H11Protocol._check_protocol = _stay_with_http1  # type: ignore[assignment, method-assign]
    H11Protocol._send_error_response = _refuse_request  # type: ignore[assignment, method-assign]
    HTTPStream.handle = _handle_stream_event  # type: ignore[assignment, method-assign]
    WSStream._send_error_response = _refuse_handshake  # type: ignore[assignment, method-assign]


class Http2(H2Protocol):
    """One connection of HTTP/2."""

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            # Whoever waits for a window of the client's would do so for ever.
            for buffer in self.stream_buffers.values():
                await buffer.close()
        await super().handle(event)

    async def stream_send(self, event: StreamEvent) -> None:
        if self.closed:
            await asyncio.sleep(0)  # an application that sends on and on has to hear of it: the loop needs a turn
        else:
            await super().stream_send(event)

    async def _handle_events(self, events: list[Http2Event]) -> None:
        for event in events:
            if isinstance(event, DataReceived) and event.stream_id not in self.streams:
                # The rest of a body whose request was answered before it had come: Hypercorn raises, and every other
                # stream would end with it. Taken all the same, for its bytes count against the connection's window.
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                await super()._handle_events([event])
        await self._flush()

    async def _create_stream(self, request: RequestReceived) -> None:
        head = dict(request.headers)
        if not all(head.get(name, b"\xff").isascii() for name in (b":method", b":path")):
            # Hypercorn raises, of a CONNECT without a path, too. A handshake that lacks everything is refused instead.
            request.headers = [(b":method", b"CONNECT"), (b":path", b"/")]
        await super()._create_stream(request)


_original_handle = HTTPStream.handle


async def _handle_stream_event(stream: HTTPStream, event: StreamEvent) -> None:
    """Forget what was not read of a body once its request is answered, or once its client has left.

    The application's queue is a short one. Full, the connection waits for room in it, and the end of the stream waits
    behind that, though nobody reads any more: the connection would stay for ever, whether or not its client does.
    """
    if isinstance(event, StreamClosed) and not stream.closed:
        unread: asyncio.Queue[object] = cast("Any", stream.app_put).__self__
        # Of a client that only ended its side of the connection, the request is still to be served.
        if unread.full() or stream.state is not ASGIHTTPState.REQUEST:
            while not unread.empty():
                unread.get_nowait()
    await _original_handle(stream, event)


async def _stay_with_http1(_protocol: H11Protocol, _request: object) -> None:
    """Heed neither `Upgrade: h2c` nor HTTP/2's preface: a proxy in front would see one request, and we serve hundreds.

    The first is answered as if it had not asked, as RFC 9110 permits; the second is no HTTP/1.1 that we know.
    """


async def _refuse_request(protocol: H11Protocol, status: int) -> None:
    for event in _refusal(STREAM_ID, status):
        await protocol.stream_send(event)


async def _refuse_handshake(stream: WSStream, status: int) -> None:
    async def refuse() -> None:
        for event in _refusal(stream.stream_id, status):
            await stream.send(event)
        await stream.send(StreamClosed(stream.stream_id))  # Hypercorn says that it closes the connection, and does not

    if stream.scope["http_version"] == "2":
        # The body waits for the client's window, and this is called by what would read of that window.
        stream.task_group.spawn(refuse)
    else:
        await refuse()


def _refusal(stream_id: int, status: int) -> tuple[Response, Body, EndBody]:
    kind = problems.HEADERS_TOO_LARGE if status == problems.HEADERS_TOO_LARGE.status else problems.MALFORMED_REQUEST
    body, request_id = kind.body(_DETAILS[kind], status=status), new_id()
    logger.debug("refused", problem=kind.slug, request_id=request_id)
    headers = [
        (b"content-type", problems.MEDIA_TYPE.encode()),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
        (b"connection", b"close"),
    ]
    return Response(stream_id, headers, status), Body(stream_id, body), EndBody(stream_id)
