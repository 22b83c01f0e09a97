"""Outgoing HTTP for URLs that callers gave: one client for thousands of long streams, behind the egress guard.

Promises: every connection goes to an address that the guard has just allowed, and to nothing else: it is resolved and
          checked here, where the socket is opened, and never looked up again. No redirect is followed, no proxy of the
          environment is used, TLS is verified. A request has a connection of its own, closed with its response: no
          pool that streams could fill or cancelled requests could leak.
Used by:  the relay (upstreams), the worker (agents). A refusal surfaces as `EgressRefused`, everything else as
          `httpx.TransportError`.
"""

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

import httpcore
import httpx

from common.process.egress import Allowlist, EgressRefused, Proxy, ResolveFailed, Target, resolve

# TCP and TLS together, over all addresses of the name: what is slower is down.
CONNECT_TIMEOUT_S = 10.0
# From the request to the answer's first line. Some agents start a machine before they answer.
ANSWER_TIMEOUT_S = 60.0
# Connections being opened at one time. A relay that takes over a thousand runs must not open all in one tick: the
# handshakes would starve the loop, and the leases with it.
CONNECTING_MAX = 64
READ_BYTES = 64 * 1024
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
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    async for piece in stream:
        left = piece
        try:
            while left:
                # Bounded: a few bytes can inflate to a thousand times as many.
                yield inflater.decompress(left, READ_BYTES)
                left = inflater.unconsumed_tail
        except zlib.error as error:
            raise httpx.DecodingError("the compressed body is broken") from error


class _GuardedTransport(httpx.AsyncBaseTransport):
    """Opens a connection per request and closes it with the response."""

    def __init__(self, allowlist: Allowlist, proxy: Proxy | None) -> None:
        self._allowlist = allowlist
        self._backend = _GuardedBackend(allowlist, proxy)
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


class _GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that the guard allows. On plain asyncio: half the cost a read of httpcore's own."""

    def __init__(self, allowlist: Allowlist, proxy: Proxy | None) -> None:
        self._allowlist = allowlist
        self._proxy = proxy
        self._connecting = asyncio.Semaphore(CONNECTING_MAX)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002  (of the interface; not used here)
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        async with self._connecting:
            try:
                async with asyncio.timeout(timeout):
                    target = Target("", host.lower().removesuffix("."), port)
                    if self._proxy is not None:
                        self._allowlist.check_name(target.host)
                        return await _connect_through(self._proxy, target)
                    addresses = await resolve(self._allowlist, target)
                    return await _connect_first(addresses, port)
            except TimeoutError as error:
                raise httpcore.ConnectTimeout(f"no connection to {host} within {timeout:g} s") from error
            except (OSError, ResolveFailed) as error:
                raise httpcore.ConnectError(str(error)) from error


async def _connect_first(addresses: list[str], port: int) -> "_Stream":
    """Try the addresses in order. Raises: OSError, that of the last one."""
    for tries_left, address in reversed(list(enumerate(reversed(addresses)))):
        try:
            return _Stream(*await asyncio.open_connection(address, port, limit=READ_BYTES))
        except OSError:
            if not tries_left:
                raise
    raise OSError("the name has no address")


async def _connect_through(proxy: Proxy, target: Target) -> "_Stream":
    """Have the proxy open the connection.

    Raises:
        EgressRefused: the proxy does not let it through (403).
        OSError: it does not answer, or cannot reach the target.
    """
    authority = f"[{target.host}]:{target.port}" if ":" in target.host else f"{target.host}:{target.port}"
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port, limit=READ_BYTES)
    status = b""
    try:
        writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        _, status, _ = head.split(b" ", 2)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise OSError("the egress proxy gives no answer that is HTTP") from error
    finally:
        if not status.startswith(b"2"):
            writer.transport.abort()
    if status == b"403":
        raise EgressRefused(f"the egress proxy does not let {authority} through")
    if not status.startswith(b"2"):
        raise OSError(f"the egress proxy answers {status[:3].decode('latin-1')!r} for {authority}")
    return _Stream(reader, writer)


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            if timeout is None:  # a stream's: every event would pay for the timer
                return await self._reader.read(max_bytes)
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(f"nothing came within {timeout:g} s") from error
        except OSError as error:
            raise httpcore.ReadError(str(error) or type(error).__name__) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore.WriteTimeout("the request could not be sent in time") from error
        except OSError as error:
            raise httpcore.WriteError(str(error) or type(error).__name__) from error

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except TimeoutError as error:
            self._writer.transport.abort()
            raise httpcore.ConnectTimeout("no TLS handshake in time") from error
        except (OSError, ssl.SSLError) as error:
            self._writer.transport.abort()
            raise httpcore.ConnectError(str(error) or type(error).__name__) from error
        except BaseException:
            self._writer.transport.abort()
            raise
        return self

    async def aclose(self) -> None:
        # Not a TLS goodbye: the streams closed here are endless, and a peer that has gone would be waited for.
        self._writer.transport.abort()

    def get_extra_info(self, info: str) -> Any:
        return self._writer.get_extra_info("ssl_object") if info == "ssl_object" else None


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
