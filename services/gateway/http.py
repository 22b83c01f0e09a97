"""HTTP as the gateway speaks it: the route table, requests, answers, and the one ASGI application that joins them.

Owns:     dispatch, reading bodies, X-Request-Id, turning errors into problems, counting requests.
Promises: every request gets an answer, and every refusal is a problem; a body over the limit is counted by us and
          refused readably, with or without Content-Length; no header value, query or body is logged.
Used by:  `app` builds `Application` from the handlers' routes; `openapi` describes the same routes.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import StoreUnavailable
from common.process.logs import request_id
from gateway import problems
from gateway.metrics import GatewayMetrics
from gateway.problems import Kind, Refusal
from towline.wire import ids, json

logger = structlog.get_logger(__name__)

# A body of the largest permitted size over a slow line; longer, and a trickle holds a connection for ever.
BODY_TIMEOUT_S = 30.0
# How much of a body that is too large is read and thrown away, so that a caller who is still sending can read the
# answer instead of a connection reset.
DRAIN_BYTES_MAX = 1024 * 1024

JSON = b"application/json"
EXPOSED_HEADERS = ("X-Request-Id", "Location", "Retry-After", "Idempotent-Replayed", "Preference-Applied")

Header = tuple[bytes, bytes]
Body = TypeVar("Body")


class Answer(NamedTuple):
    """A whole response."""

    status: int
    body: bytes = b""
    headers: tuple[Header, ...] = ()
    content_type: bytes = JSON


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
        scope: what the API key must cover; None: no credential is needed.
        body: struct of the request's body; None: there is none.
        answers: by status, the struct of the body (None: empty) and when it is given.
        problems: every refusal of this operation beside those that any operation may give.
    """

    method: str
    template: str
    handler: "Callable[[Request], Awaitable[Answer]]"
    summary: str
    answers: Mapping[int, tuple[Any, str]]
    scope: str | None = None
    description: str = ""
    parameters: Sequence[Parameter] = ()
    body: Any = None
    problems: Sequence[Kind] = ()


class Request:
    """One request, as a handler sees it."""

    __slots__ = ("_headers", "_query", "_receive", "body_bytes_max", "params")

    def __init__(
        self,
        headers: Sequence[Header],
        receive: Receive,
        *,
        params: Mapping[str, str],
        query: Mapping[str, str],
        body_bytes_max: int,
    ) -> None:
        self._headers: dict[bytes, list[str]] = {}
        for name, value in headers:
            self._headers.setdefault(name, []).append(value.decode("latin-1"))
        self.params = params
        self.body_bytes_max = body_bytes_max
        self._receive = receive
        self._query = query

    def values(self, name: bytes) -> list[str]:
        """All values of a header, named in lower case."""
        return self._headers.get(name, [])

    def query(self, name: str) -> str | None:
        """One query parameter."""
        return self._query.get(name)

    def user(self) -> str:
        """The path's user id. Raises: Refusal, if it is none."""
        user = self.params["user"]
        if not ids.is_id(user):
            raise Refusal(
                problems.INVALID_REQUEST,
                "the user id in the path is not 1 to 200 of A-Z a-z 0-9 . _ : @ - beginning with a letter or digit",
            )
        return user

    async def read(self, body: type[Body]) -> Body:
        """Read and check the JSON body. Raises: Refusal, naming the place of what is wrong."""
        self._check_media_type()
        data = await self._read_bytes()
        try:
            return msgspec.convert(json.loads(data), body)
        except json.JsonProblem as problem:
            raise Refusal(problems.INVALID_REQUEST, f"the body: {problem}", place=problem.place) from None
        except msgspec.ValidationError as error:
            detail, _, place = str(error).partition(" - at ")
            place = place.strip("`") or "$"
            raise Refusal(problems.INVALID_REQUEST, f"the body: {detail} at {place}", place=place) from None

    async def disconnected(self) -> None:
        """Return when the client has gone; for handlers that wait, after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_media_type(self) -> None:
        given = self.values(b"content-type")
        media_type, _, parameters = (given[0] if len(given) == 1 else "").lower().partition(";")
        charset = parameters.strip().removeprefix("charset=").strip('"') if "charset=" in parameters else "utf-8"
        if media_type.strip() != "application/json" or charset != "utf-8":
            raise Refusal(problems.UNSUPPORTED_MEDIA_TYPE, "the header Content-Type must be application/json, in UTF-8")
        if any(value.strip().lower() not in ("", "identity") for value in self.values(b"content-encoding")):
            raise Refusal(problems.UNSUPPORTED_MEDIA_TYPE, "the header Content-Encoding must not be set")

    async def _read_bytes(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while size <= self.body_bytes_max + DRAIN_BYTES_MAX:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size <= self.body_bytes_max:
                        chunks.append(chunk)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Refusal(problems.BODY_TIMEOUT, f"the body was not complete within {BODY_TIMEOUT_S:g} s") from None
        if size > self.body_bytes_max:
            raise Refusal(problems.BODY_TOO_LARGE, f"the body is larger than {self.body_bytes_max} bytes")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


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
                allow_methods=("GET", "POST", "DELETE"),
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
        status = 499  # the client left before there was an answer; never sent

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        try:
            await self._inner(scope, receive, send_with_id)
        finally:
            self._metrics.observe_request(
                route=scope.get("towline.route"),
                method=scope["method"],
                code=status,
                seconds=time.perf_counter() - began,
            )

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        except Refusal as refusal:
            answer = _refused(refusal)
        except StoreUnavailable as error:
            logger.warning("store_unavailable", route=scope.get("towline.route"), problem=str(error))
            answer = _refused(problems.store_unavailable())
        except Exception:
            logger.exception("request_failed", route=scope.get("towline.route"))
            answer = _refused(Refusal(problems.INTERNAL_ERROR, "the gateway failed; its log has the request's id"))
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        if answer.body:
            headers.append((b"content-type", answer.content_type))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        # The answer to HEAD has the length that GET's would have, and no body.
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
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
    headers = [(b"content-type", answer.content_type)]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})


def _refused(refusal: Refusal) -> Answer:
    logger.debug("refused", problem=refusal.kind.slug)
    return Answer(refusal.kind.status, refusal.body(), refusal.headers, b"application/problem+json")
