"""The rows of the event bench: which systems are put under which load, and what is compared with what."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from harness.bench.figures import Figure
from harness.bench.ground import Ground, Peer
from harness.bench.ours_events import OurRelay, OurStreams, Runs
from harness.bench.peers_streams import NCHAN_MISSING, find_nginx, open_floor, open_naive_streams, open_nchan
from harness.bench.relays import BareAppend, Ingest, IngestPeer, open_naive_relay
from harness.bench.runs import Run, cpu, memory, of, p99, rate
from harness.bench.streams import FanOut, FanOutPeer, Idle, IdlePeer, StreamServer
from harness.stack import Stack

_PACED = FanOut(events=30, per_s=10)
_FEW_PACED = FanOut(events=4, per_s=10, clients=50)
_FEW_AT_ONCE = FanOut(events=10, per_s=0, clients=50)
_FEW_IDLE = Idle(clients=50)

RUNS = (
    Run("naive loop, ingest", "naive relay", Ingest(5_000), Ingest(300), "event"),
    Run("towline, ingest", "towline ingest", Ingest(100_000), Ingest(1_000), "event"),
    Run("bare XADD", "bare append", Ingest(100_000), Ingest(1_000), "event"),
    Run("reader per client, paced", "reader per client", _PACED, _FEW_PACED, "delivery"),
    Run("towline, paced", "towline fan-out", _PACED, _FEW_PACED, "delivery"),
    Run("hypercorn's floor, paced", "hypercorn's floor", _PACED, _FEW_PACED, "delivery"),
    Run("nchan, paced", "nchan", _PACED, _FEW_PACED, "delivery"),
    Run("reader per client, burst", "reader per client", FanOut(20, 0), _FEW_AT_ONCE, "delivery"),
    Run("towline, burst", "towline fan-out", FanOut(200, 0), _FEW_AT_ONCE, "delivery"),
    Run("hypercorn's floor, burst", "hypercorn's floor", FanOut(200, 0), _FEW_AT_ONCE, "delivery"),
    Run("nchan, burst", "nchan", FanOut(200, 0), _FEW_AT_ONCE, "delivery"),
    Run("reader per client, idle", "reader per client, idle", Idle(), _FEW_IDLE, "client"),
    Run("towline, idle", "towline idle", Idle(), _FEW_IDLE, "client"),
    Run("hypercorn's floor, idle", "hypercorn's floor, idle", Idle(), _FEW_IDLE, "client"),
    Run("nchan, idle", "nchan, idle", Idle(), _FEW_IDLE, "client"),
)
_NAIVE_INGEST, _OURS_INGEST, _BARE = (run.name for run in RUNS[:3])
_NAIVE_PACED, _OURS_PACED, _FLOOR_PACED, _NCHAN_PACED = (run.name for run in RUNS[3:7])
_NAIVE_BURST, _OURS_BURST, _FLOOR_BURST, _NCHAN_BURST = (run.name for run in RUNS[7:11])
_NAIVE_IDLE, _OURS_IDLE, _FLOOR_IDLE, _NCHAN_IDLE = (run.name for run in RUNS[11:])

# By the word that chooses it on the command line.
ROWS: dict[str, Sequence[Figure]] = {
    "ingest": (
        Figure(
            "relay ingest, one event per chunk: CPU per event",
            (_OURS_INGEST, _NAIVE_INGEST),
            "µs",
            of(_OURS_INGEST, cpu),
            "naive loop",
            of(_NAIVE_INGEST, cpu),
            goal=15,
            then=12,
            bounds="value",
        ),
        Figure(
            "the same: events per second",
            (_OURS_INGEST, _NAIVE_INGEST),
            "/s",
            of(_OURS_INGEST, rate),
            "naive loop",
            of(_NAIVE_INGEST, rate),
            goal=20,
            better="higher",
        ),
        Figure(
            "the same",
            (_OURS_INGEST, _BARE),
            "/s",
            of(_OURS_INGEST, rate),
            "bare XADD, pipelined by 100",
            of(_BARE, rate),
            goal=1.0,
            better="higher",
        ),
    ),
    "fanout": (
        Figure(
            "fan-out to 1 000 clients, paced: CPU per delivery",
            (_OURS_PACED, _NAIVE_PACED),
            "µs",
            of(_OURS_PACED, cpu),
            "a reader per client",
            of(_NAIVE_PACED, cpu),
            goal=1 / 3.5,
        ),
        Figure(
            "the same",
            (_OURS_PACED, _NCHAN_PACED),
            "µs",
            of(_OURS_PACED, cpu),
            "nchan",
            of(_NCHAN_PACED, cpu),
            goal=3.5,
        ),
        Figure(
            "the same",
            (_OURS_PACED, _FLOOR_PACED),
            "µs",
            of(_OURS_PACED, cpu),
            "hypercorn's floor",
            of(_FLOOR_PACED, cpu),
            then=1.25,
        ),
        Figure(
            "the same: from upstream to client, p99",
            (_OURS_PACED, _NAIVE_PACED),
            "ms",
            of(_OURS_PACED, p99),
            "a reader per client, from Redis to client",
            of(_NAIVE_PACED, p99),
        ),
        Figure(
            "fan-out to 1 000 clients, all at once: deliveries per second",
            (_OURS_BURST, _NAIVE_BURST),
            "/s",
            of(_OURS_BURST, rate),
            "a reader per client",
            of(_NAIVE_BURST, rate),
            goal=50,
            better="higher",
        ),
        Figure(
            "the same",
            (_OURS_BURST, _FLOOR_BURST),
            "/s",
            of(_OURS_BURST, rate),
            "hypercorn's floor",
            of(_FLOOR_BURST, rate),
            better="higher",
        ),
        Figure(
            "the same",
            (_OURS_BURST, _NCHAN_BURST),
            "/s",
            of(_OURS_BURST, rate),
            "nchan",
            of(_NCHAN_BURST, rate),
            better="higher",
        ),
    ),
    "idle": (
        Figure(
            "memory of an idle client, of 1 000",
            (_OURS_IDLE, _FLOOR_IDLE),
            "KiB",
            of(_OURS_IDLE, memory),
            "hypercorn's floor",
            of(_FLOOR_IDLE, memory),
            goal=42,
            bounds="value",
        ),
        Figure(
            "the same",
            (_OURS_IDLE, _NAIVE_IDLE),
            "KiB",
            of(_OURS_IDLE, memory),
            "a reader per client",
            of(_NAIVE_IDLE, memory),
        ),
        Figure(
            "the same",
            (_OURS_IDLE, _NCHAN_IDLE),
            "KiB",
            of(_OURS_IDLE, memory),
            "nchan",
            of(_NCHAN_IDLE, memory),
        ),
    ),
}


SERVERS: Mapping[str, Callable[[Ground, str], AbstractAsyncContextManager[StreamServer]]] = {
    "reader per client": open_naive_streams,
    "hypercorn's floor": open_floor,
    "nchan": open_nchan,
}


def unavailable() -> dict[str, str]:
    """Peers that this machine does not have, by name, and why."""
    return {} if find_nginx() else dict.fromkeys(("nchan", "nchan, idle"), NCHAN_MISSING)


async def open_peers(
    ground: Ground, stack: Stack, wanted: AbstractSet[str], cleanup: AsyncExitStack
) -> Mapping[str, Peer[Any]]:
    """Start those of the event systems that are wanted, until `cleanup` is closed. Raises: ProcessFailed."""
    peers: dict[str, Peer[Any]] = {}
    if "naive relay" in wanted:
        peers["naive relay"] = await cleanup.enter_async_context(open_naive_relay(ground))
    if "bare append" in wanted:
        peers["bare append"] = BareAppend(ground)
    for name, open_server in SERVERS.items():
        process = name.replace(" ", "-").replace("'", "")
        if name in wanted:
            server = await cleanup.enter_async_context(open_server(ground, process))
            peers[name] = FanOutPeer(ground, server)
        if f"{name}, idle" in wanted:
            server = await cleanup.enter_async_context(open_server(ground, f"{process}-idle"))
            peers[f"{name}, idle"] = IdlePeer(ground, server)
    if wanted & {"towline ingest", "towline fan-out", "towline idle"}:
        gateway, relay = await asyncio.gather(stack.add_gateway(), stack.add_relay())
        runs = Runs(stack, gateway)
        peers["towline ingest"] = IngestPeer(ground, OurRelay(runs, relay))
        peers["towline fan-out"] = FanOutPeer(ground, OurStreams(runs, gateway, relay))
        if "towline idle" in wanted:
            gateway = await stack.add_gateway()  # restarted again and again, which nobody else should notice
            peers["towline idle"] = IdlePeer(ground, OurStreams(Runs(stack, gateway), gateway))
    return peers
