"""Problems: what a refusal over HTTP is (RFC 9457), and the types of those that more than a gateway sends.

Owns:     what a problem type consists of, and its body. A gateway documents every type at `GET /problems/{slug}`.
Promises: a body has nothing in it of what was sent, but what its caller puts into `detail`.
Used by:  the gateway, whose own types are in `gateway.problems`; the worker's handshake;
          common.process.hypercorn_fixes.
"""

from typing import NamedTuple

from msgspec import UNSET

from towline.wire import json
from towline.wire.api import Problem

MEDIA_TYPE = "application/problem+json"


class ProblemType(NamedTuple):
    """One problem type. `status`: the usual one; `advice`: what the caller should do."""

    slug: str
    status: int
    title: str
    meaning: str
    advice: str

    def body(self, detail: str, *, place: str = "", status: int | None = None) -> bytes:
        """The problem as JSON. `status`: that of the response, where it is not the usual one."""
        return json.dumps(
            Problem(
                type=f"/problems/{self.slug}",
                title=self.title,
                status=status or self.status,
                detail=detail,
                place=place or UNSET,
            )
        )


# ---- of every service

MALFORMED_REQUEST = ProblemType(
    "malformed-request",
    400,
    "This is not a request of HTTP",
    "The request breaks the rules of HTTP itself (no Host, a Content-Length that is none, stray bytes), so nothing of"
    " it was heeded. A transfer coding that is not known here is answered with 501 instead. Nothing was recorded.",
    "Look at what builds the request: the client library, or a proxy in between. The connection is closed.",
)
HEADERS_TOO_LARGE = ProblemType(
    "headers-too-large",
    431,
    "The head of the request is too large",
    "Path, query and headers together are larger than a server here takes. A gateway takes 16 KiB of them always; a"
    " worker takes 8 KiB a line and 128 headers, and refuses more in plain text (414 for the path). Nothing was"
    " recorded.",
    "Shorten them; large data belongs in the body. The connection is closed.",
)
NOT_FOUND = ProblemType(
    "not-found",
    404,
    "There is no such thing here",
    "The path is unknown, or what it names does not exist or lies outside the credential's reach; these are not told"
    " apart. Ended jobs are forgotten after the retention of their keys.",
    "Check the path and the id, and whether the key is bound to other users.",
)
STORE_UNAVAILABLE = ProblemType(
    "store-unavailable",
    503,
    "A store does not answer",
    "Redis or Postgres is out of reach or refuses to write. The request may or may not have been recorded.",
    "Repeat it with the same key after `Retry-After` seconds: it is never run twice.",
)

# ---- of a worker, to a sidecar that connects

BAD_HANDSHAKE = ProblemType(
    "bad-handshake",
    400,
    "This is no handshake of a WebSocket",
    "The request is not the one of RFC 6455 (`GET` of HTTP/1.1, `Upgrade: websocket`, version 13, a key). Its status"
    " may also be 405 (another method), 426 (no upgrade was asked for) or 505 (another HTTP).",
    "A sidecar connects here, over a WebSocket. The HTTP API is a gateway's; and a proxy in between must pass on"
    " `Upgrade` and `Connection`.",
)
BAD_SUBPROTOCOL = ProblemType(
    "bad-subprotocol",
    400,
    "The subprotocol is not spoken here",
    "The sidecar did not offer the subprotocol (`Sec-WebSocket-Protocol`) that `detail` names.",
    "Use a sidecar of a version that speaks it.",
)
UNAUTHORIZED = ProblemType(
    "unauthorized",
    401,
    "No valid machine token was given",
    "The handshake needs exactly one Authorization header, `Bearer` with a machine token; and this token is unknown,"
    " revoked or expired, or there is none.",
    "Mint a token for the machine's user (`POST /v1/users/{user}/machine-tokens`) and give it to the sidecar.",
)
DRAINING = ProblemType(
    "draining",
    503,
    "This worker is leaving",
    "The worker has been told to stop, and takes no more machines.",
    "Connect again after `Retry-After` seconds: another worker answers.",
)
TOO_MANY_SOCKETS = ProblemType(
    "too-many-sockets",
    503,
    "This worker is full",
    "As many machines are connected to this worker as it may have (`TOWLINE_SOCKETS_MAX`).",
    "Connect again after `Retry-After` seconds; the operator may add workers.",
)
