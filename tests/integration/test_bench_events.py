"""The peers of the event rows, on real stores and in processes of their own: each stores, or delivers, all there is."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from harness.bench.events import SERVERS, open_peers, unavailable
from harness.bench.ground import Ground
from harness.bench.relays import BareAppend, Ingest, open_naive_relay
from harness.bench.streams import FanOut, FanOutPeer, Idle, IdlePeer
from harness.servers import Servers
from harness.stack import Stack


@pytest.fixture
async def ground(tmp_path: Path, redis_url: str, postgres_url: str) -> Ground:
    return Ground(tmp_path, Servers(postgres_url, redis_url))


async def test_naive_loop_stores_every_event_of_its_upstream(ground):
    async with open_naive_relay(ground) as relay:
        sample = await relay.run(Ingest(200))

    assert sample.units == 200
    assert sample.cpu_us["relay"] > 0


async def test_bare_append_is_its_own_driver(ground):
    sample = await BareAppend(ground).run(Ingest(1000))

    assert sample.units == 1000
    assert (set(sample.cpu_us), sample.driver_cpu_us) == ({"client"}, 0.0)


@pytest.mark.parametrize("name", SERVERS)
async def test_server_tells_every_client_everything(ground, name):
    if name in unavailable():
        pytest.skip(unavailable()[name])
    async with SERVERS[name](ground, "server") as server:
        paced = await FanOutPeer(ground, server).run(FanOut(events=3, per_s=50, clients=20))
        at_once = await FanOutPeer(ground, server).run(FanOut(events=10, per_s=0, clients=20))
        idle = await IdlePeer(ground, server).run(Idle(clients=20))

    assert (paced.units, at_once.units, idle.units) == (60, 200, 20)
    assert paced.p50_ms is not None
    assert paced.p50_ms > 0
    assert set(idle.memory_kib) == {"server"}


async def test_ours_stores_and_delivers_the_whole_way(ground):
    async with (
        Stack(
            ground.directory / "stack", postgres_url=ground.servers.postgres_url, redis_url=ground.servers.redis_url
        ) as stack,
        AsyncExitStack() as cleanup,
    ):
        peers = await open_peers(ground, stack, {"towline ingest", "towline idle"}, cleanup)
        stored = await peers["towline ingest"].run(Ingest(500))
        told = await peers["towline fan-out"].run(FanOut(events=5, per_s=0, clients=20))
        idle = await peers["towline idle"].run(Idle(clients=20))

    assert (stored.units, told.units, idle.units) == (500, 100, 20)
    assert (set(stored.cpu_us), set(told.cpu_us), set(idle.memory_kib)) == (
        {"relay"},
        {"gateway", "relay"},
        {"gateway"},
    )
