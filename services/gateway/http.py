"""HTTP as the gateway speaks it: routes, answers, streams, and the one ASGI application that joins them.

Owns:     dispatch, X-Request-Id, turning errors into problems, counting requests (`request` reads them).
Promises: every request gets an answer, and every refusal is a problem; no header value, query or body is logged.
Used by:  `app` builds `Application` from the handlers' routes; `openapi` describes the same routes.
"""

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import StoreUnavailable
from common.problems import MEDIA_TYPE, ProblemType
from common.process.logs import request_id
from gateway import problems
from gateway.metrics import GatewayMetrics
from gateway.problems import Refusal
from gateway.request import ClientGone, Header, Request

logger = structlog.get_logger(__name__)

JSON = b"application/json"
EXPOSED_HEADERS = ("X-Request-Id", "Location", "Retry-After", "Idempotent-Replayed", "Preference-Applied")


class Answer(NamedTuple):
    """A whole response."""

    status: int
    body: bytes = b""
    headers: tuple[Header, ...] = ()
    content_type: bytes = JSON


Write = Callable[[bytes], Awaitable[None]]


class Stream(NamedTuple):
    """A response that lasts: its head, and who writes its body.

    Attributes:
        write: called once the head is out, with what sends some bytes and waits while the connection is full; returns
            at the end of the response, False if it is to be broken off instead. Not called for HEAD.
    """

    headers: tuple[Header, ...]
    content_type: bytes
    write: Callable[[Write], Awaitable[bool]]


class Parameter(NamedTuple):
    """A query parameter or header of a route, for its description. `schema`: JSON Schema."""

    name: str
    schema: Mapping[str, Any]
    description: str
    place: str = "query"
    required: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: how it is reached, what answers it, and how it is described.

    Attributes:
        template: the path with `{parameters}`, each one segment; also the label of its metrics.
        scope: what the API key must cover, of several at least one, as far as is asked for; None: no credential is
            needed.
        body: struct of the request's body; None: there is none.
        answers: by status, the struct of the body (None: empty) and when it is given.
        problems: every refusal of this operation beside those that any operation may give.
        locates: the answer to something new has its address in the header Location.
        streams: status 200 is an event stream, unless the caller asks for JSON; a stream token opens it, too.
    """

    method: str
    template: str
    handler: "Callable[[Request], Awaitable[Answer | Stream]]"
    summary: str
    answers: Mapping[int, tuple[Any, str]]
    scope: str | tuple[str, ...] | None = None
    description: str = ""
    parameters: Sequence[Parameter] = ()
    body: Any = None
    problems: Sequence[ProblemType] = ()
    locates: bool = False
    streams: bool = False


class Application:
    """The ASGI application of the public port.

    Args:
        routes: tried in this order.
        cors_origins: browser origins that may call; empty: none.
    """

    def __init__(
        self, routes: Sequence[Route], *, metrics: GatewayMetrics, body_bytes_max: int, cors_origins: Sequence[str] = ()
    ) -> None:
        self._routes = [(_pattern(route.template), route) for route in routes]
        self._metrics = metrics
        self._body_bytes_max = body_bytes_max
        self._inner: ASGIApp = self._dispatch
        if cors_origins:
            self._inner = CORSMiddleware(
                self._dispatch,
                allow_origins=cors_origins,
                allow_methods=("GET", "POST", "PUT", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; WebSockets are refused with 404: what a sidecar dials is a worker."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await _refuse_websocket(receive, send)
            return
        began = time.perf_counter()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        request = request_id(given.decode("latin-1") if given else None)
        structlog.contextvars.bind_contextvars(request_id=request)
        id_header = (b"x-request-id", request.encode())
        answered = False

        def observe(status: int) -> None:
            self._metrics.observe_request(
                route=scope.get("towline.route"),
                method=scope["method"],
                code=status,
                seconds=time.perf_counter() - began,
            )

        # Every chunk of every stream passes here and through `_send_stream`: neither adds a coroutine to it.
        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                observe(message["status"])  # now: a stream's end may be hours away
                message["headers"] = [*message["headers"], id_header]
            return send(message)

        try:
            await self._inner(scope, receive, send_with_id)
        finally:
            if not answered:
                observe(499)  # the client left before there was an answer; never sent

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer: Answer | Stream = await self._answer(scope, receive)
        except ClientGone:
            return
        except Refusal as refusal:
            answer = _refused(refusal)
        except StoreUnavailable as error:
            logger.warning("store_unavailable", route=scope.get("towline.route"), error=str(error))
            answer = _refused(problems.store_unavailable())
        except Exception:
            logger.exception("request_failed", route=scope.get("towline.route"))
            answer = _refused(Refusal(problems.INTERNAL_ERROR, "the gateway failed; its log has the request's id"))
        if isinstance(answer, Stream):
            await self._send_stream(answer, scope, send)
            return
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        if answer.body:
            headers.append((b"content-type", answer.content_type))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        # The answer to HEAD has the length that GET's would have, and no body.
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, stream: Stream, scope: Scope, send: Send) -> None:
        headers = [*stream.headers, (b"content-type", stream.content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        def write(chunk: bytes) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": chunk, "more_body": True})

        try:
            ended = scope["method"] == "HEAD" or await stream.write(write)
        except Exception:
            # Too late for a status; the client sees a broken body, and comes back.
            logger.exception("stream_failed", route=scope.get("towline.route"))
            return
        if ended:
            await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | Stream:
        path = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        allowed: list[str] = []
        for pattern, route in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            scope["towline.route"] = route.template
            if route.method == method:
                request = Request(
                    scope["headers"],
                    receive,
                    params=match.groupdict(),
                    query=_query(scope["query_string"], route) if scope["query_string"] else {},
                    body_bytes_max=self._body_bytes_max,
                )
                return await route.handler(request)
            allowed.append(route.method)
        if not allowed:
            raise problems.not_found("path")
        if "GET" in allowed:
            allowed.append("HEAD")
        raise Refusal(
            problems.METHOD_NOT_ALLOWED,
            f"this path takes {', '.join(allowed)}",
            headers=((b"allow", ", ".join(allowed).encode()),),
        )


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", template))


def _query(text: bytes, route: Route) -> dict[str, str]:
    """The query parameters. An unknown one is an error like an unknown member of a body: it would do nothing."""
    known = {parameter.name for parameter in route.parameters if parameter.place == "query"}
    query: dict[str, str] = {}
    for name, value in parse_qsl(text.decode("latin-1"), keep_blank_values=True):
        problem = ""
        if name not in known:
            problem = "is not known here"
        elif name in query:
            problem = "is given more than once"
        elif "\x00" in value:
            problem = "has U+0000 in it"
        if problem:
            raise Refusal(problems.INVALID_REQUEST, f"the query parameter {name[:40]!r} {problem}")
        query[name] = value
    return query


async def _refuse_websocket(receive: Receive, send: Send) -> None:
    await receive()
    answer = _refused(Refusal(problems.NOT_FOUND, "a gateway takes no WebSockets; a sidecar dials a worker"))
    headers = [(b"content-type", answer.content_type), (b"x-request-id", request_id(None).encode())]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})


def _refused(refusal: Refusal) -> Answer:
    logger.debug("refused", problem=refusal.kind.slug)
    return Answer(refusal.kind.status, refusal.body(), refusal.headers, MEDIA_TYPE.encode())
