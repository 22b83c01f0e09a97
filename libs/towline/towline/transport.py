"""Transport: single requests to the gateway over a pool of connections, repeated where a second one changes nothing.

Owns:     the connections, the credentials in the header, the pauses between attempts, how a refusal is read.
Promises: a POST without an idempotency key is sent once; everything else again after a broken link or a 503 that says
          when; a stream is opened once, its reader knows where to go on. A refusal is an `ApiProblem`, no answer is
          `GatewayUnreachable`.
Used by:  `towline.client`, `towline.stream`.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, NamedTuple

import httpx
import msgspec

from towline import __version__
from towline.wire import json

# A first call and four more, over 4 to 9 seconds with the pauses below: long enough for a replica to be replaced.
ATTEMPTS_MAX = 5
PAUSE_FIRST_S = 0.4
PAUSE_MAX_S = 3.2
# Who asks for more patience than this has the refusal handed on: the caller knows better what to do meanwhile.
RETRY_AFTER_MAX_S = 10.0
# Load balancers commonly cut requests that are silent for 60 s, so a longer wait is made of several requests.
WAIT_ROUND_S = 50.0
# Idle connections are dropped before the server does it (five seconds are common), or a call would meet a closed one.
KEEPALIVE_S = 4.0

Method = Literal["GET", "POST", "PUT", "DELETE"]


class InvalidRequest(ValueError):
    """What was asked for cannot be sent, and nothing was; `str()` says which argument and why."""


class GatewayUnreachable(Exception):
    """No answer, or one that is not this API's. What was asked for may have happened; a submission can be repeated."""


class ApiProblem(Exception):
    """The gateway, or a proxy before it, refused (RFC 9457).

    Attributes:
        status: HTTP status, 300 or above.
        slug: last part of the problem's type, such as `machine-offline`; empty if the answer was no problem document.
        title, detail: what kind of problem it is, and which field and why.
        members: all further members of the problem document.
        retry_after_s: what `Retry-After` asks for, in seconds; None without it.
    """

    def __init__(
        self,
        status: int,
        *,
        slug: str,
        title: str,
        detail: str,
        members: Mapping[str, Any],
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{slug or title} ({status})" + (f": {detail}" if detail else ""))
        self.status = status
        self.slug = slug
        self.title = title
        self.detail = detail
        self.members = dict(members)
        self.retry_after_s = retry_after_s


class Answer(NamedTuple):
    """A 2xx answer whose body is read as it comes.

    Attributes:
        media_type: of the body, without parameters; empty if it has none.
        chunks: raises `GatewayUnreachable` when the link breaks before the body's end.
    """

    status: int
    media_type: str
    chunks: AsyncIterator[bytes]


class Transport:
    """A gateway at one address, with one API key. Close it in the loop that used it."""

    def __init__(self, base_url: str, api_key: str, *, timeout_s: float) -> None:
        """Connect to nothing yet. Raises: InvalidRequest."""
        if not api_key or not all("!" <= c <= "~" for c in api_key):
            raise InvalidRequest("the API key is empty or has characters other than visible ASCII")
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{base_url!r} is no URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidRequest(f"{base_url!r} is no http:// or https:// URL")
        if url.userinfo:
            raise InvalidRequest("the URL has a user name or password; the API key is the only credential")
        self._url = url
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}", "User-Agent": f"towline/{__version__}"},
            # Callers who wait hold a connection each: a limit here would make them wait for one another.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEEPALIVE_S),
        )

    @property
    def url(self) -> str:
        """Where requests go, for messages."""
        return str(self._url)

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def request(
        self,
        method: Method,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
        wait_until: float = 0.0,
    ) -> httpx.Response:
        """Send one request, again where that is safe; returns a 2xx answer.

        Args:
            wait_until: monotonic seconds; the server is told to wait for what is left, one round at most.

        Raises:
            InvalidRequest: the body cannot be written as JSON.
        """
        sent = dict(headers or {})
        content = None
        if body is not None:
            sent["Content-Type"] = "application/json"
            try:
                content = json.dumps(body)
            except json.JsonProblem as error:
                raise InvalidRequest(f"the body {error.reason}") from error
        attempts = ATTEMPTS_MAX if method != "POST" or "Idempotency-Key" in sent else 1
        for attempt in range(1, attempts + 1):
            wait_s = max(0, math.ceil(min(wait_until - time.monotonic(), WAIT_ROUND_S)))
            if wait_s:
                sent["Prefer"] = f"wait={wait_s}"
            else:
                sent.pop("Prefer", None)
            try:
                response = await self._http.request(
                    method,
                    path,
                    params=params,
                    content=content,
                    headers=sent,
                    timeout=httpx.Timeout(self._timeout_s, read=self._timeout_s + wait_s),
                )
            except httpx.RequestError as error:
                # Who was silent for so long will be so the next time too: only broken links are tried again.
                is_slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
                if is_slow or attempt == attempts:
                    raise GatewayUnreachable(f"{self.url} does not answer: {_reason(error)}") from error
                pause_max_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**attempt)
                pause_s = random.uniform(pause_max_s / 2, pause_max_s)  # noqa: S311 (spread, no secret)
            else:
                if response.is_success:
                    return response
                problem = _problem(response)
                asked_s = problem.retry_after_s if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else None
                if asked_s is None or asked_s > RETRY_AFTER_MAX_S or attempt == attempts:
                    raise problem
                # Later than asked, each caller by another while: they were all refused at the same moment.
                pause_s = asked_s + random.uniform(0, PAUSE_FIRST_S)  # noqa: S311 (spread, no secret)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, *, params: Mapping[str, str], headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """Send one GET, once, and leave its answer open until the block ends; how long to wait for it is up to you."""
        # What compresses may hold back what it has not filled a block with.
        sent = {"Accept-Encoding": "identity", **headers}
        timeout = httpx.Timeout(self._timeout_s, read=None)
        request = self._http.build_request("GET", path, params=params, headers=sent, timeout=timeout)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._http.send(request, stream=True)
                    stack.push_async_callback(response.aclose)
                    if not response.is_success:
                        await response.aread()
            except TimeoutError as error:
                raise GatewayUnreachable(f"{self.url} does not answer within {self._timeout_s:g} s") from error
            except httpx.RequestError as error:
                raise GatewayUnreachable(f"{self.url} does not answer: {_reason(error)}") from error
            if not response.is_success:
                raise _problem(response)
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            yield Answer(response.status_code, media_type, _chunks(response))


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    except httpx.RequestError as error:
        raise GatewayUnreachable(f"the link broke: {_reason(error)}") from error


def _problem(response: httpx.Response) -> ApiProblem:
    try:
        members = json.loads(response.content)
    except json.JsonProblem:
        members = None
    if not isinstance(members, dict) or not isinstance(members.get("type"), str):
        # Not from the gateway: a proxy's page is of no use to anyone.
        members = {}
    slug = members.pop("type", "").rpartition("/")[2]
    title = str(members.pop("title", response.reason_phrase or "refused"))
    detail = str(members.pop("detail", ""))
    members.pop("status", None)
    return ApiProblem(
        response.status_code,
        slug=slug,
        title=title,
        detail=detail,
        members=members,
        retry_after_s=_retry_after_s(response),
    )


def _retry_after_s(response: httpx.Response) -> float | None:
    # The other form, a date, needs the server's clock to agree with ours: ours never sends it.
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


def _reason(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
