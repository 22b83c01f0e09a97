"""What differs from Hypercorn's own HTTP/1.1, for which it has no settings: private methods of it are replaced.

Promises: a connection never turns into HTTP/2; what is no request that an application could be given is refused with a
          problem and an id of its own, like everything else, and nothing of it is repeated or logged.
Used by:  common.process.health.
"""

import structlog
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.ws_stream import WSStream

from common import problems
from common.ids import new_id

logger = structlog.get_logger(__name__)

_DETAILS = {
    problems.HEADERS_TOO_LARGE: "path, query and headers are too large together",
    problems.MALFORMED_REQUEST: "the bytes sent are not a request of HTTP/1.1, or not one that can be served",
}


def install() -> None:
    """Replace them, in every connection that is made from now on; again is the same."""
    H11Protocol._check_protocol = _stay_with_http1  # type: ignore[assignment, method-assign]
    H11Protocol._send_error_response = _refuse_request  # type: ignore[assignment, method-assign]
    WSStream._send_error_response = _refuse_handshake  # type: ignore[assignment, method-assign]


async def _stay_with_http1(_protocol: H11Protocol, _request: object) -> None:
    """Heed neither `Upgrade: h2c` nor HTTP/2's preface: a proxy in front would see one request, and we serve hundreds.

    The first is answered as if it had not asked, as RFC 9110 permits; the second is no HTTP/1.1 that we know.
    """


async def _refuse_request(protocol: H11Protocol, status: int) -> None:
    for event in _refusal(STREAM_ID, status):
        await protocol.stream_send(event)


async def _refuse_handshake(stream: WSStream, status: int) -> None:
    for event in _refusal(stream.stream_id, status):
        await stream.send(event)
    await stream.send(StreamClosed(stream.stream_id))  # Hypercorn says that it closes the connection, and does not


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
