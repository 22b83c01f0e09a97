"""The client for URLs of callers: where it connects, what it believes, and what it leaves behind."""

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from followed_runs import RawUpstream
from support import eventually

from common.process.egress import Allowlist, EgressRefused
from common.process.outbound import CONNECTING_MAX, open_outbound, stream_bytes


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    async with RawUpstream() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_outbound(Allowlist.parse(["127.0.0.1"])) as opened:
        yield opened


async def read(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url) as response:
        return b"".join([piece async for piece in stream_bytes(response)])


async def test_what_an_upstream_says_is_read_as_it_is(client: httpx.AsyncClient, upstream: RawUpstream) -> None:
    upstream.pieces, upstream.then = [b"a", b"b"], "close"
    assert await read(client, upstream.url) == b"ab"
    head = upstream.heads[0].lower()
    assert "accept-encoding: identity" in head
    assert "user-agent: towline" in head


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:9/",
        "http://[::1]:9/",
        "http://[::ffff:127.0.0.2]:9/",
        "http://0.0.0.0:9/",
        "http://169.254.169.254/latest/meta-data",
        "http://2130706433/",
        "ftp://127.0.0.1/",
        "http://user:password@127.0.0.1/",
    ],
)
async def test_what_is_not_allowed_is_refused_before_a_connection(client: httpx.AsyncClient, url: str) -> None:
    """The same guard decides at the door; here it is asked again, where the socket is opened."""
    with pytest.raises((EgressRefused, httpx.UnsupportedProtocol)):
        await read(client, url)


async def test_a_name_that_leads_elsewhere_is_refused_although_it_is_allowed(upstream: RawUpstream) -> None:
    """`localhost` may be called by name only where the list says so: what counts is where the name leads."""
    url = upstream.url.replace("127.0.0.1", "localhost")
    async with open_outbound(Allowlist.parse(["10.0.0.0/8"])) as client:
        with pytest.raises(EgressRefused):
            await read(client, url)
    assert upstream.heads == []
    upstream.then = "close"
    async with open_outbound(Allowlist.parse(["localhost"])) as client:
        await read(client, url)
    assert len(upstream.heads) == 1


async def test_a_redirect_is_an_answer_like_any_other(client: httpx.AsyncClient, upstream: RawUpstream) -> None:
    upstream.head = b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"
    async with client.stream("GET", upstream.url) as response:
        assert response.status_code == 302
    assert len(upstream.heads) == 1


async def test_proxies_of_the_environment_are_not_used(upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect for us, wherever it likes."""
    async with RawUpstream() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        upstream.then = "close"
        async with open_outbound(Allowlist.parse(["127.0.0.1"])) as client:
            await read(client, upstream.url)
        assert (len(upstream.heads), len(proxy.heads)) == (1, 0)


async def test_a_certificate_that_nobody_vouches_for_is_refused(client: httpx.AsyncClient, tmp_path: Path) -> None:
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(1))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=_self_signed(tmp_path))
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
            await read(client, f"https://127.0.0.1:{port}/")
    assert b"G" not in asked


async def test_many_streams_are_open_at_once_and_cancelled_ones_leave_nothing(
    client: httpx.AsyncClient, upstream: RawUpstream
) -> None:
    """No pool that they could fill: after a churn of cancelled requests the next ones are served at once."""
    upstream.head = b""  # accepts, and never answers
    count = 3 * CONNECTING_MAX
    for _ in range(3):
        tasks = [asyncio.create_task(read(client, upstream.url)) for _ in range(count)]
        await eventually(lambda: upstream.open_connections == count, 30)
        for task in tasks:
            task.cancel()
            task.cancel()
        await asyncio.wait(tasks)
        await eventually(lambda: upstream.open_connections == 0, 30)
    upstream.head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    upstream.pieces = [b"x"]
    bodies = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            response = await stack.enter_async_context(client.stream("GET", upstream.url))
            bodies.append(stream_bytes(response))
            assert await anext(bodies[-1]) == b"x"
        assert upstream.open_connections == count
    await eventually(lambda: upstream.open_connections == 0, 30)


async def test_what_cannot_be_reached_is_an_error_that_may_pass(client: httpx.AsyncClient) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(httpx.ConnectError):
        await read(client, f"http://127.0.0.1:{port}/")
    async with open_outbound(Allowlist.parse(["no-such-host.invalid"])) as named:
        with pytest.raises(httpx.ConnectError):
            await read(named, "http://no-such-host.invalid/")


def _self_signed(directory: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = directory / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context
