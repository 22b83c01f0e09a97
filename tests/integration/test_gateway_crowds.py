"""Crowds of readers: when a deploy sends all of them away at once, and when they vanish without a word."""

import asyncio
import ctypes
import gc
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio
from gateway_door import Door, open_door
from gateway_streams import PlayedRun, metric
from support import eventually

from common.process import http_server
from common.process.lifecycle import Lifecycle
from common.process.metrics import new_registry
from common.store.postgres import Postgres
from common.store.redis import CONNECTIONS_MAX, Redis
from common.store.tokens import Tokens
from gateway import app
from gateway.feeds import Client
from gateway.settings import GatewaySettings
from harness.ports import free_port, is_http_ready
from harness.servers import Servers

# ---- a deploy

CLIENTS = 200
DRAIN_S = 10.0


@pytest.fixture
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """Two gateways, with the drain that they have by default."""
    env = {"TOWLINE_SSE_DRAIN_S": f"{DRAIN_S:g}"}
    async with open_door(servers, postgres_url, state_directory / "crowds", gateways=2, env=env) as opened:
        yield opened


class Follower:
    """A reader that does as it is told: comes back after `retry`, to whoever is there, with the last id that it saw."""

    def __init__(self, door: Door, run: str, ports: list[int]) -> None:
        self.texts: list[str] = []
        self.opened_at: list[float] = []
        self._door = door
        self._run = run
        self._ports = ports
        self._last_id = ""
        self._retry_s = 0.0

    async def follow(self) -> None:
        for port in self._ports:
            await self._read(port)
            await asyncio.sleep(self._retry_s)

    async def _read(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            resume = f"last-event-id: {self._last_id}\r\n" if self._last_id else ""
            head = f"GET /v1/runs/{self._run}/events HTTP/1.1\r\nhost: x\r\n{resume}"
            writer.write(f"{head}authorization: Bearer {self._door.stack.api_key}\r\n\r\n".encode())
            self.opened_at.append(time.monotonic())
            # Until the last chunk: the connection itself may stay open.
            while (line := await reader.readline()) not in (b"", b"0\r\n"):
                name, _, value = line.decode().strip().partition(": ")
                if name == "id":
                    self._last_id = value
                elif name == "retry":
                    self._retry_s = int(value) / 1000
                elif name == "data":
                    self.texts.append(value)
        finally:
            writer.close()


async def test_a_deploy_sends_no_crowd_to_the_other_replica(door: Door) -> None:
    """Two hundred readers of ten runs are sent away by one SIGTERM: no second brings a fifth of them to the other
    gateway, and none of them asks for its history again or misses what comes."""
    runs = [await (await PlayedRun(door).put()).begin() for _ in range(10)]
    for run in runs:
        await run.add(1, 20)
    leaving, staying = door.stack.gateways
    followers = [Follower(door, runs[n % 10].run, [leaving.port, staying.port]) for n in range(CLIENTS)]
    tasks = [asyncio.create_task(each.follow()) for each in followers]
    await eventually(lambda: all(len(each.texts) == 20 for each in followers), 30)

    door.stack.gateways.remove(leaving)
    stopping = asyncio.create_task(leaving.stop(within_s=DRAIN_S + 20))
    for number in range(21, 31):
        for run in runs:
            await run.add(number)
        await asyncio.sleep(DRAIN_S / 10)  # while they move
    await eventually(lambda: all(len(each.opened_at) == 2 for each in followers), DRAIN_S + 20)
    await eventually(lambda: all(len(each.texts) >= 30 for each in followers), 20)
    await stopping
    assert await metric(door, "towline_sse_clients", staying) == CLIENTS
    came = sorted(each.opened_at[1] for each in followers)
    busiest = max(sum(at <= other < at + 1 for other in came) for at in came)
    assert busiest < CLIENTS / 5
    for each in followers:
        told = Counter(text.partition('"uid":"')[2].partition('"')[0] for text in each.texts)
        assert told == Counter(f"coder:{n}" for n in range(1, 31))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- a crowd that vanishes

DEAD_PEER_TIMEOUT_MS = 1500
SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: `ret 0`


def vanish_silently(peer: socket.socket) -> None:
    """From now on the kernel throws away all that arrives: nothing is acknowledged, no FIN and no RST goes out."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    peer.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux gives dead peers up by this option")
async def test_readers_that_vanish_leave_nothing_behind(
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    redis_store: Redis,
    postgres: Postgres,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a run that stays silent: half of the readers reset their connections, half of them are cut off without a word.

    The first are forgotten at once, the others when nothing was acknowledged for a while; no connection to Redis, no
    stream that is read and no object is left of either, and it is no error.
    """
    monkeypatch.setattr(http_server, "DEAD_PEER_TIMEOUT_MS", DEAD_PEER_TIMEOUT_MS)
    added = await Tokens(postgres).add_api_key("test", ["runs"], None)
    assert added is not None
    port, admin_port = free_port(), free_port()
    settings = GatewaySettings(
        REDIS_URL=redis_url,
        DATABASE_URL=postgres_url,
        admin_host="127.0.0.1",
        admin_port=admin_port,
        http_host="127.0.0.1",
        http_port=port,
        unready_s=0,
        drain_s=1,
        sse_drain_s=0,
        sse_keepalive_s=0.2,
    )
    registry, lifecycle = new_registry(), Lifecycle()
    gateway = asyncio.create_task(app.run(settings, lifecycle, registry))

    def clients() -> int:
        return int(registry.get_sample_value("towline_sse_clients") or 0)

    try:
        await eventually(lambda: is_http_ready(admin_port), 20)
        stores: Any = SimpleNamespace(redis=redis_store, postgres=postgres)  # as much of a `Door` as a run needs
        run = await (await PlayedRun(stores).put()).begin()
        before = len(await redis_client.client_list())
        peers = [await _open(port, run.run, added[1]) for _ in range(40)]
        await eventually(lambda: clients() == 40)
        # The pool's, however many readers there are.
        assert len(await redis_client.client_list()) <= before + CONNECTIONS_MAX < before + len(peers)
        for peer in peers[20:]:
            vanish_silently(peer)
        for peer in peers[:20]:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        await eventually(lambda: clients() <= 20)
        await eventually(lambda: clients() == 0, 20)
        assert registry.get_sample_value("towline_sse_closed_total", {"reason": "gone"}) == 40
        assert len(await redis_client.client_list()) <= before + CONNECTIONS_MAX
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
        caplog.clear()  # records of lost connections hold on to their frames
        await eventually(lambda: _clients_left() <= 1)  # the last one seen by a loop that is asleep
        for peer in peers[20:]:
            peer.close()
    finally:
        lifecycle.begin_drain("test")
        await gateway


async def _open(port: int, run: str, key: str) -> socket.socket:
    """A reader that has its stream's head."""
    loop = asyncio.get_running_loop()
    peer = socket.socket()
    peer.setblocking(False)
    await loop.sock_connect(peer, ("127.0.0.1", port))
    head = f"GET /v1/runs/{run}/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n"
    await loop.sock_sendall(peer, head.encode())
    await loop.sock_recv(peer, 512)
    return peer


def _clients_left() -> int:
    gc.collect()
    return sum(isinstance(each, Client) for each in gc.get_objects())
