"""The fault proxy in front of a real Redis, and the balancer in front of real sockets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from support import eventually

from harness.balancer import Balancer
from harness.faults import TcpProxy
from harness.ports import free_port

Backends = Callable[[str], Awaitable[tuple[str, int]]]


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(redis_url)
    await proxy.start()
    yield proxy
    await proxy.stop()
    assert proxy.connections == 0


@pytest.fixture
async def client(proxy: TcpProxy) -> AsyncIterator[redis.asyncio.Redis]:
    """One connection through the proxy, which raises what happens to it."""
    pool = {"socket_timeout": 0.5, "retry": Retry(NoBackoff(), 0), "single_connection_client": True}
    async with redis.asyncio.Redis.from_url(proxy.url, **pool) as client:
        await client.ping()
        yield client


@pytest.fixture
async def direct(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """Around the proxy: what really is in the store."""
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def backend() -> AsyncIterator[Backends]:
    """Start servers that answer a whole request, up to its end, with their name and the request."""
    servers: list[asyncio.Server] = []

    async def start(name: str) -> tuple[str, int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(name.encode() + b":" + await reader.read())
            writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", free_port()))
        return servers[-1].sockets[0].getsockname()[:2]

    yield start
    for server in servers:
        server.close()


async def test_bytes_pass_unchanged_and_in_order(client: redis.asyncio.Redis, direct: redis.asyncio.Redis) -> None:
    """More than the proxy holds, both ways at once."""
    value = bytes(range(256)) * 64 * 1024  # 16 MiB
    await client.connection.disconnect()
    client.connection.socket_timeout = 30
    await client.set("large", value)
    assert await client.get("large") == value
    assert await direct.strlen("large") == len(value)


async def test_stalled_requests_arrive_when_healed(
    proxy: TcpProxy, client: redis.asyncio.Redis, direct: redis.asyncio.Redis
) -> None:
    """A dead link without a word: the server sees nothing until it heals, then everything."""
    proxy.stall("to_server")
    with pytest.raises(RedisTimeoutError):
        await client.set("late", "1")
    assert await direct.get("late") is None
    await proxy.heal()
    await eventually(lambda: direct.get("late"))


async def test_stalled_replies_hide_what_was_done(
    proxy: TcpProxy, client: redis.asyncio.Redis, direct: redis.asyncio.Redis
) -> None:
    """One way only: the server acts, the client waits in vain."""
    proxy.stall("to_client")
    with pytest.raises(RedisTimeoutError):
        await client.set("done", "1")
    assert await direct.get("done") == "1"


async def test_delay_costs_time_and_no_rate(backend: Backends) -> None:
    """Each packet comes later, but they do not wait for one another."""
    proxy = TcpProxy("tcp://{}:{}".format(*await backend("")))
    await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    proxy.delay(0.2, "to_server")
    started = time.monotonic()
    writer.write(b"x" * 4_000_000)  # at least 60 packets
    writer.write_eof()
    assert len(await reader.read()) == 4_000_001
    assert 0.2 <= time.monotonic() - started < 5
    writer.close()
    await proxy.stop()


async def test_cut_resets_open_connections_and_serves_new_ones(proxy: TcpProxy, client: redis.asyncio.Redis) -> None:
    """As when a Redis fails over: every connection breaks, the next one works."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await eventually(lambda: proxy.connections == 2)
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await eventually(lambda: proxy.connections == 0)
    async with redis.asyncio.Redis.from_url(proxy.url) as another:
        assert await another.ping()
    assert proxy.accepted == 3


async def test_cut_also_ends_what_is_being_opened(proxy: TcpProxy) -> None:
    """A connection that the system has accepted and nobody here has seen yet is none that goes on."""
    for _ in range(20):
        await proxy.heal()
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        proxy.refuse()
        proxy.cut()
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_cut_also_ends_what_is_held_back(proxy: TcpProxy, client: redis.asyncio.Redis) -> None:
    """Bytes of a stalled connection that was cut never arrive."""
    proxy.stall()
    with pytest.raises(RedisTimeoutError):
        await client.ping()
    proxy.cut()
    await eventually(lambda: proxy.connections == 0)


async def test_cut_after_a_request_loses_only_its_answer(
    proxy: TcpProxy, client: redis.asyncio.Redis, direct: redis.asyncio.Redis
) -> None:
    """The write that happened although its caller was told it failed: the seed of every double execution."""
    await client.incr("counter")
    cut = proxy.cut_after(b"INCR")
    assert await client.ping()
    with pytest.raises(RedisConnectionError):
        await client.incr("counter")
    assert cut.happened.is_set()
    assert await direct.get("counter") == "2"
    assert await client.incr("counter") == 3


async def test_needle_across_two_packets_is_found(proxy: TcpProxy, redis_url: str) -> None:
    """Where TCP cuts its packets is nobody's choice."""
    cut = proxy.cut_after(b"ECHO")
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    for part in (b"*2\r\n$4\r\nEC", b"HO\r\n$2\r\nhi\r\n"):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.05)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    assert cut.happened.is_set()
    writer.close()


async def test_new_connections_go_where_it_leads_to(backend: Backends) -> None:
    """As after a fail-over: the open ones stay where they are."""

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    old, new = await backend("old"), await backend("new")
    proxy = TcpProxy(f"tcp://{old[0]}:{old[1]}")
    await proxy.start()
    try:
        before = await asyncio.open_connection("127.0.0.1", proxy.port)
        await eventually(lambda: proxy.connections == 1)
        proxy.lead_to(f"tcp://{new[0]}:{new[1]}")
        after = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert [await ask(*before), await ask(*after)] == [b"old:", b"new:"]
    finally:
        await proxy.stop()


async def test_refusal_is_the_operating_systems(proxy: TcpProxy, client: redis.asyncio.Redis) -> None:
    """Connections that stand go on; new ones are refused until healed."""
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await client.ping()
    await proxy.heal()
    _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.close()


async def test_server_that_is_down_resets_the_client() -> None:
    """The proxy does not answer for a server that is not there."""
    proxy = TcpProxy(f"redis://127.0.0.1:{free_port()}/0")
    await proxy.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
    finally:
        await proxy.stop()


def test_url_leads_through_the_proxy_and_keeps_the_rest() -> None:
    """Credentials, path and options are the server's."""
    proxy = TcpProxy("postgresql://me:se%40cret@db.internal:5432/towline?sslmode=disable")
    assert proxy.url == f"postgresql://me:se%40cret@127.0.0.1:{proxy.port}/towline?sslmode=disable"


# The balancer.


@pytest.fixture
async def balancer() -> AsyncIterator[Balancer]:
    balancer = Balancer()
    await balancer.start(free_port())
    yield balancer
    await balancer.stop()


async def ask(balancer: Balancer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", balancer.port)
    writer.write(request)
    writer.write_eof()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_connections_go_round_and_pass_over_the_dead(balancer: Balancer, backend: Backends) -> None:
    """Half-closed requests are answered whole, and a backend that is down gets nothing."""
    balancer.backends = [await backend("a"), ("127.0.0.1", free_port()), await backend("b")]
    answers = [await ask(balancer, b"x" * 100_000) for _ in range(6)]
    assert {answer[:2] for answer in answers} == {b"a:", b"b:"}
    assert {answer[2:] for answer in answers} == {b"x" * 100_000}


async def test_nobody_to_serve_is_a_reset(balancer: Balancer) -> None:
    """The dialler is told at once, and backs off."""
    with pytest.raises(ConnectionResetError):
        await ask(balancer, b"x")


async def test_broken_backend_connection_breaks_the_clients(balancer: Balancer, redis_url: str) -> None:
    """A killed worker's sidecars must notice at once."""
    proxy = TcpProxy(redis_url)
    await proxy.start()
    balancer.backends = [("127.0.0.1", proxy.port)]
    reader, writer = await asyncio.open_connection("127.0.0.1", balancer.port)
    await eventually(lambda: proxy.connections == 1)
    proxy.cut()
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(5):
            assert await reader.read() == b""
    writer.close()
    await proxy.stop()
