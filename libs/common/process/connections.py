"""Connections to what callers named, for httpcore: opened where the egress guard allows, a bounded burst at a time.

Promises: the address connected to is the one that the guard has just allowed. Where a forward proxy is set, all goes
          through it. What does not answer holds up nobody else for long. A connection is closed hard, at once.
Used by:  outbound.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpcore

from common.process.egress import Allowlist, EgressRefused, Proxy, ResolveFailed, Target, resolve
from common.process.lookups import LookUps

# Connections being opened at one time. A relay that takes over a thousand runs must not open all in one tick: the
# handshakes would starve the loop, and the leases with it.
CONNECTING_MAX = 64
# What takes longer than this to answer costs the loop nothing meanwhile, and gives its place to the next one: else some
# hundred sources on one dead host would keep the healthy ones out until their connects have timed out.
PLACE_HELD_MAX_S = 1.0
READ_BYTES = 64 * 1024


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that the guard allows. On plain asyncio: half the cost a read of httpcore's own."""

    def __init__(self, allowlist: Allowlist, proxy: Proxy | None) -> None:
        self._allowlist = allowlist
        self._proxy = proxy
        self._look_ups = LookUps()
        self._places = asyncio.Semaphore(CONNECTING_MAX)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002  (of the interface; not used here)
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        target = Target("", host.lower().removesuffix("."), port)
        async with self._place():
            try:
                async with asyncio.timeout(timeout):
                    if self._proxy is not None:
                        self._allowlist.check_name(target.host)
                        addresses = await self._look_ups.find(self._proxy.host)
                        return _Stream(*await _tunnel(addresses, self._proxy.port, target))
                    addresses = await resolve(self._allowlist, target, self._look_ups)
                    return _Stream(*await _connect_first(addresses, port))
            except TimeoutError as error:
                raise httpcore.ConnectTimeout(f"no connection to {host} within {timeout:g} s") from error
            except (OSError, ResolveFailed) as error:
                raise httpcore.ConnectError(str(error)) from error

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait for one of the places; it is given back at the end, or already after `PLACE_HELD_MAX_S`."""
        await self._places.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._places.release()

        timer = asyncio.get_running_loop().call_later(PLACE_HELD_MAX_S, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()


async def _connect_first(addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Try the addresses in order. Raises: OSError, that of the last one."""
    for tries_left, address in reversed(list(enumerate(reversed(addresses)))):
        try:
            return await asyncio.open_connection(address, port, limit=READ_BYTES)
        except OSError:
            if not tries_left:
                raise
    raise OSError("the name has no address")


async def _tunnel(
    proxy_addresses: list[str], proxy_port: int, target: Target
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Have the proxy open the connection.

    Raises:
        EgressRefused: the proxy does not let it through (403).
        OSError: it does not answer, or cannot reach the target.
    """
    authority = f"[{target.host}]:{target.port}" if ":" in target.host else f"{target.host}:{target.port}"
    reader, writer = await _connect_first(proxy_addresses, proxy_port)
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
    return reader, writer


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
