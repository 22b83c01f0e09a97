"""The client for URLs of callers: where it connects, what it believes, and what it leaves behind."""

import asyncio
import contextlib
import datetime
import gzip
import socket
import ssl
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from followed_runs import RawUpstream
from support import eventually

from common.process import connections
from common.process.connections import CONNECTING_MAX, READ_BYTES
from common.process.egress import Allowlist, EgressRefused
from common.process.outbound import open_outbound, stream_bytes


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


async def test_no_cookie_of_one_request_goes_out_with_another(client: httpx.AsyncClient, upstream: RawUpstream) -> None:
    """One client serves the sources and agents of many callers. What a caller configured himself is sent as it is."""
    upstream.then = "close"
    upstream.head = b"HTTP/1.1 200 OK\r\nSet-Cookie: session=alice; Path=/\r\nConnection: close\r\n\r\n"
    await read(client, upstream.url)
    await read(client, upstream.url)
    assert "cookie:" not in upstream.heads[1].lower()
    assert len(client.cookies.jar) == 0
    async with client.stream("GET", upstream.url, headers={"Cookie": "mine=1"}):
        pass
    assert "Cookie: mine=1\r\n" in upstream.heads[2]


@contextlib.contextmanager
def dead_host() -> Iterator[str]:
    """Where nobody answers: the backlog is full, and the kernel drops what else comes."""
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        yield f"http://127.0.0.1:{hole.getsockname()[1]}/"


@contextlib.asynccontextmanager
async def reading(client: httpx.AsyncClient, urls: list[str]) -> AsyncIterator[None]:
    """Meanwhile somebody reads these."""
    tasks = [asyncio.create_task(read(client, url)) for url in urls]
    try:
        await asyncio.sleep(0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_sources_on_a_dead_host_hold_up_the_others_only_for_a_moment(
    upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four connects to nowhere in two places: each place is free again long before its connect has timed out."""
    monkeypatch.setattr(connections, "CONNECTING_MAX", 2)
    monkeypatch.setattr(connections, "PLACE_HELD_MAX_S", 0.05)
    upstream.then = "close"
    async with open_outbound(Allowlist.parse(["127.0.0.1"])) as client:
        with dead_host() as dead:
            async with reading(client, [dead] * 4), asyncio.timeout(5):
                await read(client, upstream.url)


async def test_a_place_that_was_given_back_early_is_not_given_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each slow connect would widen the burst for good."""
    opening = 0

    async def never(*_: object, **__: object) -> None:
        nonlocal opening
        opening += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    monkeypatch.setattr(connections, "CONNECTING_MAX", 1)
    monkeypatch.setattr(connections, "PLACE_HELD_MAX_S", 0.02)
    async with open_outbound(Allowlist.parse(["127.0.0.1"])) as client:
        async with reading(client, ["http://127.0.0.1/"] * 3):
            await eventually(lambda: opening == 3)  # the places of the first two came back early
        monkeypatch.setattr(connections, "PLACE_HELD_MAX_S", 60.0)
        opening = 0
        for _ in range(2):  # and the second time, that of a cancelled connect
            async with reading(client, ["http://127.0.0.1/"] * 3):
                await asyncio.sleep(0.05)  # a second one would have begun by now
                assert opening == 1
            opening = 0


async def test_a_name_that_nobody_resolves_holds_up_no_other_name(
    upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver blocks its thread for longer than anybody waits; many sources on one such name must not use up all."""
    release = threading.Event()
    find = socket.getaddrinfo

    def resolver(host: str, *rest: Any, **named: Any) -> Any:
        if host.startswith("dead"):
            release.wait(30)
        return find(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    upstream.then = "close"
    async with open_outbound(Allowlist.parse(["localhost", "dead.invalid"])) as client:
        try:
            async with reading(client, ["http://dead.invalid/"] * 40), asyncio.timeout(3):
                await read(client, upstream.url.replace("127.0.0.1", "localhost"))
        finally:
            release.set()


class Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def compressed(*pieces: bytes) -> AsyncIterator[bytes]:
    """The body of a response with these compressed bytes, as it is read."""
    return stream_bytes(httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=Pieces(list(pieces))))


EVENTS = [b"data: %d\n\n" % number for number in range(3)]
MEMBERS = [gzip.compress(event) for event in EVENTS]


@pytest.mark.parametrize(
    "pieces",
    [
        MEMBERS,
        [b"".join(MEMBERS)],
        [bytes([byte]) for byte in b"".join(MEMBERS)],
        [MEMBERS[0] + MEMBERS[1][:7], MEMBERS[1][7:], gzip.compress(b"") * 2, MEMBERS[2]],
    ],
    ids=["one each", "in one", "byte by byte", "across"],
)
async def test_every_member_of_a_compressed_stream_is_read(pieces: list[bytes]) -> None:
    """Some compress event by event. What would vanish after the first one would still count as a sign of life."""
    read_pieces = [piece async for piece in compressed(*pieces)]
    assert b"".join(read_pieces) == b"".join(EVENTS)
    assert all(read_pieces)  # an empty piece would look like life, too


async def test_compressed_bytes_never_come_in_larger_pieces_than_plain_ones() -> None:
    """A bomb in a later member, too."""
    bomb = gzip.compress(bytes(20 * READ_BYTES + 1))
    sizes = [len(piece) async for piece in compressed(MEMBERS[0], bomb + bomb)]
    assert max(sizes) <= READ_BYTES
    assert sum(sizes) == len(EVENTS[0]) + 2 * (20 * READ_BYTES + 1)


async def test_what_one_piece_holds_does_not_wait_for_the_next_one() -> None:
    """The inflater may have taken all its bytes while it still owes some of what they stand for."""
    flushing = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    said = bytes(READ_BYTES + 200)
    first = flushing.compress(said) + flushing.flush(zlib.Z_SYNC_FLUSH)
    # Without the end mark of the flush, too: then the last byte of input is one that stands for a run of bytes.
    for size in range(len(first) - 6, len(first) + 1):
        plain = [piece async for piece in compressed(first[:size])]
        assert b"".join(plain) == zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(first[:size])


@pytest.mark.parametrize("rest", [b"garbage", b"\0\0", MEMBERS[1][:2] + b"\xff" * 8])
async def test_what_follows_a_member_and_is_none_is_an_error_with_a_reason(rest: bytes) -> None:
    """Bytes that nobody can read are no silence, and no end either. What came before them arrives."""
    body = compressed(MEMBERS[0] + rest)
    assert await anext(body) == EVENTS[0]
    with pytest.raises(httpx.DecodingError, match=r"broken: .* (header|method)"):
        await anext(body)


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
