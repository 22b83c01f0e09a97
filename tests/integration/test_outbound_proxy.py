"""The client for URLs of callers behind a forward proxy: a small real one, which looks names up in its own way."""

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
from common.process.outbound import open_outbound, stream_bytes

# A name that nobody but the proxy can look up.
AGENT = "agent.example"


class ConnectProxy:
    """A forward proxy that knows CONNECT, and where `AGENT` is.

    Attributes:
        asked: what connections were asked for, in order.
        refusal: an answer in place of a connection; empty: none.
        open_tunnels: how many there are now.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusal = b""
        self.open_tunnels = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "ConnectProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            method, authority, _ = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ", 2)
            self.asked.append(f"{method} {authority}")
            if self.refusal:
                writer.write(self.refusal)
            else:
                await self._tunnel(authority, reader, writer)
        writer.close()

    async def _tunnel(self, authority: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = authority.rpartition(":")
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1" if host == AGENT else host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 proxy\r\n\r\n")
        self.open_tunnels += 1
        try:
            pipes = [asyncio.create_task(_pipe(reader, back_writer)), asyncio.create_task(_pipe(back_reader, writer))]
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
        finally:
            self.open_tunnels -= 1
            back_writer.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()


@pytest.fixture
async def proxy() -> AsyncIterator[ConnectProxy]:
    async with ConnectProxy() as running:
        yield running


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    async with RawUpstream() as running:
        running.pieces = [b"data: x\n\n"]
        running.then = "close"
        yield running


@pytest.fixture
async def client(proxy: ConnectProxy) -> AsyncIterator[httpx.AsyncClient]:
    async with open_outbound(Allowlist.parse([AGENT, "10.0.0.0/8"]), proxy.url) as opened:
        yield opened


async def read(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url) as response:
        return b"".join([piece async for piece in stream_bytes(response)])


async def test_the_proxy_opens_the_connection_and_the_name_is_left_to_it(
    client: httpx.AsyncClient, proxy: ConnectProxy, upstream: RawUpstream
) -> None:
    """No second look-up here: from a network without a way out there is nobody to ask."""
    port = httpx.URL(upstream.url).port
    assert await read(client, f"http://{AGENT}:{port}/stream") == b"data: x\n\n"
    assert proxy.asked == [f"CONNECT {AGENT}:{port}"]
    # The upstream is asked as without a proxy: a path, and not a word to the proxy.
    assert upstream.heads[0].startswith("GET /stream HTTP/1.1")
    assert f"Host: {AGENT}:{port}" in upstream.heads[0]


async def test_tls_is_spoken_with_the_host_and_not_with_the_proxy(
    proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate of the name is asked for through the tunnel; one of another name is refused there, too."""
    pem = _certificate(tmp_path, AGENT)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
        writer.close()

    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        async with open_outbound(Allowlist.parse([AGENT, "127.0.0.1"]), proxy.url) as client:
            assert await read(client, f"https://{AGENT}:{port}/") == b"ok"
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await read(client, f"https://127.0.0.1:{port}/")
    assert proxy.asked == [f"CONNECT {AGENT}:{port}", f"CONNECT 127.0.0.1:{port}"]


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/",  # in no list; it might be in the network, but who looks it up is not us
        "https://localhost/",
        "https://192.0.2.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::ffff:169.254.169.254]/",
    ],
)
async def test_what_is_not_allowed_as_it_is_written_never_reaches_the_proxy(
    client: httpx.AsyncClient, proxy: ConnectProxy, url: str
) -> None:
    with pytest.raises(EgressRefused):
        await read(client, url)
    assert proxy.asked == []


async def test_what_the_proxy_does_not_let_through_is_refused_for_good(
    client: httpx.AsyncClient, proxy: ConnectProxy
) -> None:
    proxy.refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(EgressRefused, match=f"{AGENT}:443"):
        await read(client, f"https://{AGENT}/")


@pytest.mark.parametrize(
    "refusal",
    [
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"what is this\r\n",
        b"x" * 200_000,
    ],
)
async def test_a_proxy_that_cannot_is_an_error_that_may_pass(
    client: httpx.AsyncClient, proxy: ConnectProxy, refusal: bytes
) -> None:
    proxy.refusal = refusal
    with pytest.raises(httpx.ConnectError, match="egress proxy"):
        await read(client, f"https://{AGENT}/")


async def test_a_proxy_that_is_not_there_is_an_error_that_may_pass() -> None:
    async with open_outbound(Allowlist.parse([AGENT]), "http://127.0.0.1:9") as client:
        with pytest.raises(httpx.ConnectError):
            await read(client, f"https://{AGENT}/")


async def test_a_stream_that_is_left_takes_its_tunnel_along(
    client: httpx.AsyncClient, proxy: ConnectProxy, upstream: RawUpstream
) -> None:
    upstream.then = "hold"
    port = httpx.URL(upstream.url).port
    async with client.stream("GET", f"http://{AGENT}:{port}/stream") as response:
        assert await anext(stream_bytes(response)) == b"data: x\n\n"
        assert proxy.open_tunnels == 1
    await eventually(lambda: proxy.open_tunnels == 0)


def _certificate(directory: Path, name: str) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = directory / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return pem
