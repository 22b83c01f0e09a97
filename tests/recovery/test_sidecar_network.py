"""Networks that stand between a laptop and its server: proxies, and IPv6 that leads nowhere."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sidecar_hub import Hub
from sidecar_starts import Start, logged, open_processes, open_sidecars
from support import eventually

# An address of this machine that is not its loopback address by name: what has to go out goes through a proxy.
HERE = "0.0.0.0"
ALL_VARIABLES = [each for name in ("http", "https", "all", "no") for each in (f"{name}_proxy", f"{name.upper()}_PROXY")]


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class ConnectProxy:
    """An HTTP proxy that knows CONNECT alone. Whatever host is asked for, it leads to this machine.

    Attributes:
        requests: the heads of the requests that came.
        refusal: the status to answer with instead.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.refusal = ""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        if self.refusal:
            writer.write(f"HTTP/1.1 {self.refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            writer.close()
            return
        port = int(head.split()[1].rpartition(":")[2])
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))


@pytest.fixture
async def proxy() -> AsyncIterator[ConnectProxy]:
    proxy = ConnectProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    yield proxy
    server.close()


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    for variable in ALL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    async with Hub() as running:
        yield running


@pytest.fixture
async def start(hub: Hub, tmp_path: Path) -> AsyncIterator[Start]:
    async with open_sidecars(f"ws://{HERE}:{hub.port}", tmp_path) as starter:
        yield lambda **settings: starter(allow_insecure=True, **settings)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Of `towline.test`, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with openssl, which is not here")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=towline.test"
    command += f" -addext subjectAltName=DNS:towline.test -out {certificate} -keyout {key}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


async def test_wss_goes_through_the_proxy_which_sees_no_token(
    hub: Hub, proxy: ConnectProxy, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """On this network nobody but the proxy can resolve the server's name."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)

    async def to_hub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", hub.port)
        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))

    front = await asyncio.start_server(to_hub, "127.0.0.1", 0, ssl=tls)
    url = f"wss://towline.test:{front.sockets[0].getsockname()[1]}"
    async with open_processes(url, tmp_path) as new:
        (tmp_path / "executions").touch()
        process = await new(
            HTTPS_PROXY=proxy.url, HTTP_PROXY="http://127.0.0.1:1", SSL_CERT_FILE=str(certificate[0])
        ).start()
        session = await hub.session(within_s=20)
        assert (await session.run("look", {"at": "x"}, hinted=True)).outcome == "completed"
        assert [head.split()[:2] for head in proxy.requests] == [["CONNECT", url.removeprefix("wss://")]]
        assert "authorization" not in proxy.requests[0].lower()
        process.process.terminate()
        assert await process.ended() == 0
    front.close()


async def test_no_proxy_is_heeded(hub: Hub, proxy: ConnectProxy, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    sidecar = start()
    await hub.session()
    assert len(proxy.requests) == 1
    monkeypatch.setenv("NO_PROXY", f"example.com,{HERE}")
    await hub.sessions[0].drop()
    await hub.session(2)
    assert len(proxy.requests) == 1
    await sidecar.ended()


async def test_wss_does_not_use_the_proxy_for_plain_http(
    hub: Hub, proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    async with open_sidecars(f"wss://{HERE}:{hub.port}", tmp_path) as start, logged() as lines:
        start()
        await eventually(lambda: sum(line["event"] == "cannot_connect" for line in lines) >= 2)
    assert proxy.requests == []


@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy"])
async def test_all_proxy_is_used_when_no_other_is_named(
    hub: Hub, proxy: ConnectProxy, start: Start, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, proxy.url)
    start()
    await hub.session()
    assert len(proxy.requests) == 1
    monkeypatch.setenv("NO_PROXY", HERE)
    await hub.sessions[0].drop()
    await hub.session(2)
    assert len(proxy.requests) == 1


async def test_loopback_is_never_proxied(
    hub: Hub, proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, proxy.url)
    for host in ("127.0.0.1", "localhost"):
        async with open_sidecars(f"ws://{host}:{hub.port}", tmp_path / host) as start:
            start()
            await hub.session(len(hub.sessions) + 1)
    assert proxy.requests == []


async def test_a_proxy_that_wants_a_password_is_named_and_not_stormed(
    hub: Hub, proxy: ConnectProxy, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once it lets us through, we are through, without a restart."""
    monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//ada:not-the-pass-word@"))
    proxy.refusal = "407 Proxy Authentication Required"
    async with logged() as lines:
        start()
        await eventually(lambda: len(proxy.requests) >= 2)
        said = [line["reason"] for line in lines if line["event"] == "cannot_connect"]
        assert "407" in said[0]
        assert "not-the-pass-word" not in str(lines)
    assert not hub.handshakes
    proxy.refusal = ""
    await hub.session(within_s=15)


@pytest.mark.parametrize(
    ("value", "said"),
    [("socks5://127.0.0.1:1", "python-socks"), ("ftp://ada:not-the-pass-word@127.0.0.1:1", "proxy cannot be used")],
)
async def test_a_proxy_that_we_cannot_speak_to_is_named(
    hub: Hub, start: Start, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    async with logged() as lines:
        start()
        await eventually(lambda: [line for line in lines if line["event"] == "cannot_connect"])
        assert said in next(line["reason"] for line in lines if line["event"] == "cannot_connect")
        assert "not-the-pass-word" not in str(lines)
    assert not hub.handshakes


@pytest.fixture
def dead_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with an IPv6 address before its IPv4 address, as home routers announce it: `laptop.localhost`."""
    resolve = socket.getaddrinfo

    def with_ipv6(host: Any, port: Any, family: int = 0, *rest: Any, **more: Any) -> Any:
        if host != "laptop.localhost":
            return resolve(host, port, family, *rest, **more)
        found = [(socket.AF_INET6, ("::1", int(port), 0, 0)), (socket.AF_INET, ("127.0.0.1", int(port)))]
        return [(kind, socket.SOCK_STREAM, 6, "", at) for kind, at in found if family in (socket.AF_UNSPEC, kind)]

    monkeypatch.setattr(socket, "getaddrinfo", with_ipv6)


def ipv6_listener(port: int) -> socket.socket:
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(("::1", port))
    except OSError as error:
        pytest.skip(f"no IPv6 on loopback here: {error}")
    return listener


@pytest.mark.usefixtures("dead_ipv6")
async def test_ipv6_that_refuses_costs_no_time(hub: Hub, tmp_path: Path) -> None:
    async with open_sidecars(f"ws://laptop.localhost:{hub.port}", tmp_path) as start:
        began = time.monotonic()
        start()
        await hub.session()
        assert time.monotonic() - began < 5


@pytest.mark.usefixtures("dead_ipv6")
async def test_ipv6_that_accepts_and_carries_nothing_is_left_for_ipv4(hub: Hub, tmp_path: Path) -> None:
    """Within the time for opening and five seconds; and the next dial, too, goes the way that worked."""
    with ipv6_listener(hub.port) as listener:
        listener.listen()
        async with open_sidecars(f"ws://laptop.localhost:{hub.port}", tmp_path) as start:
            start()
            await hub.session(within_s=15)
            began = time.monotonic()
            await hub.sessions[0].drop()
            await hub.session(2)
            assert time.monotonic() - began < 5
