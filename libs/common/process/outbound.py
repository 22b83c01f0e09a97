"""Outgoing HTTP for URLs that callers gave: one client for thousands of long streams, behind the egress guard.

Promises: every connection goes to an address that the guard has just allowed, and to nothing else: it is resolved and
          checked where the socket is opened, and never looked up again. No redirect is followed, no proxy of the
          environment is used, TLS is verified. A request has a connection of its own, closed with its response: no
          pool that streams could fill or cancelled requests could leak. No cookie of an answer is kept or sent.
Used by:  the relay (upstreams), the worker (agents). A refusal surfaces as `EgressRefused`, everything else as
          `httpx.TransportError`.
"""

import contextlib
import ssl
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpcore
import httpx

from common.process.connections import READ_BYTES, GuardedBackend
from common.process.egress import Allowlist, Proxy

# For TCP over all addresses of the name, and again for TLS: what is slower is down.
CONNECT_TIMEOUT_S = 10.0
# From the request to the answer's first line. Some agents start a machine before they answer.
ANSWER_TIMEOUT_S = 60.0
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def open_outbound(allowlist: Allowlist, proxy_url: str = "") -> httpx.AsyncClient:
    """Make the client inside the running loop; close it with `async with`.

    It reads streams without a deadline: silence is the caller's to judge. Give each other request its own timeout.

    Args:
        proxy_url: of the forward proxy, as the setting has it; empty: none.
    """
    return httpx.AsyncClient(
        transport=_GuardedTransport(allowlist, Proxy.parse(proxy_url) if proxy_url else None),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        follow_redirects=False,
        trust_env=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "towline"},
        # One client serves many callers: what is set for one must not go out with the request of another.
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )


def stream_bytes(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes, uncompressed if the upstream compressed it unasked, in pieces of bounded size.

    Raises:
        httpx.RequestError: the connection broke, or the compressed bytes are no good.
    """
    assert isinstance(response.stream, httpx.AsyncByteStream)
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        # Not `aiter_raw`: most upstreams send an event a piece, and each would pay for a look at its size.
        return aiter(response.stream)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise httpx.DecodingError(f"the upstream used Content-Encoding {encoding[:40]!r} unasked")
    return _inflated(response.stream)


async def _inflated(stream: httpx.AsyncByteStream) -> AsyncIterator[bytes]:
    """Member after member, as many as there are: some compress event by event. What is no member is an error."""
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    async for piece in stream:
        left = piece
        owes = False
        while left or owes:
            if inflater.eof:
                inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                # Bounded: a few bytes can inflate to a thousand times as many.
                plain = inflater.decompress(left, READ_BYTES)
            except zlib.error as error:
                raise httpx.DecodingError(f"the compressed body is broken: {error}") from error
            left = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            # It may have taken all bytes and not yet given all that they stand for.
            owes = len(plain) == READ_BYTES and not inflater.eof
            if plain:  # an empty piece would look like a sign of life
                yield plain


class _GuardedTransport(httpx.AsyncBaseTransport):
    """Opens a connection per request and closes it with the response."""

    def __init__(self, allowlist: Allowlist, proxy: Proxy | None) -> None:
        self._allowlist = allowlist
        self._backend = GuardedBackend(allowlist, proxy)
        self._tls = ssl.create_default_context()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._allowlist.check_url(str(request.url))
        url = httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        connection = httpcore.AsyncHTTPConnection(
            origin=url.origin, ssl_context=self._tls, network_backend=self._backend
        )
        try:
            with _httpx_errors():
                answer = await connection.handle_async_request(
                    httpcore.Request(
                        method=request.method,
                        url=url,
                        headers=request.headers.raw,
                        content=request.stream,
                        extensions=request.extensions,
                    )
                )
        except BaseException:
            await connection.aclose()
            raise
        return httpx.Response(
            status_code=answer.status,
            headers=answer.headers,
            stream=_Body(connection, answer),
            extensions=answer.extensions,
        )


class _Body(httpx.AsyncByteStream):
    """The response's body; its end is the connection's."""

    def __init__(self, connection: httpcore.AsyncHTTPConnection, answer: httpcore.Response) -> None:
        assert isinstance(answer.stream, AsyncIterable)
        self._connection = connection
        self._parts: AsyncIterable[bytes] = answer.stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for part in self._parts:
                yield part

    async def aclose(self) -> None:
        await self._connection.aclose()


_ERRORS: dict[type[Exception], type[httpx.TransportError]] = {
    httpcore.ConnectTimeout: httpx.ConnectTimeout,
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.ConnectError: httpx.ConnectError,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
}


@contextlib.contextmanager
def _httpx_errors() -> Iterator[None]:
    """What httpcore raises, as httpx would raise it."""
    try:
        yield
    except tuple(_ERRORS) as error:
        raise _ERRORS[type(error)](str(error)) from error
