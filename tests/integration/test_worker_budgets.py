"""The budgets of the worker's half of a job, counted by the servers themselves."""

import asyncio
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import pytest
from bridge import Bridge, Peer, open_bridge
from job_stores import accepted, new_user
from support import eventually

from common.ids import GatewayId, UserId, new_id
from common.store.control import replies_inbox
from common.store.jobs import terminal_text
from common.store.records import Record
from common.store.redis import CONNECTIONS_MAX
from towline.wire import frames

JOBS = 20
GATEWAY = GatewayId("gateway-1")
KIB = 1024


@dataclass(frozen=True)
class Count:
    """What the servers had done at one moment."""

    commits: int  # of transactions that wrote
    scripts: int
    reads: int  # blocking reads that were answered or timed out

    def __sub__(self, other: "Count") -> "Count":
        return Count(self.commits - other.commits, self.scripts - other.scripts, self.reads - other.reads)


async def count(bridge: Bridge) -> Count:
    # A transaction gets an id when it first writes, and asking for the next one takes none.
    async with await psycopg.AsyncConnection.connect(bridge.postgres_url) as connection:
        cursor = await connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        row = await cursor.fetchone()
    assert row is not None
    stats = await bridge.client.info("commandstats")
    calls = {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "xread")}
    return Count(row[0], calls["evalsha"] + calls["eval"], calls["xread"])


async def one_job(bridge: Bridge, user: UserId, peer: Peer, *, hinted: bool) -> Record:
    """As a gateway would: ask, accept, enqueue, and wait for the reply."""
    inbox = replies_inbox(bridge.redis, GATEWAY)
    await bridge.jobs.ask(user, "echo")
    record = await accepted(bridge.requests, user, hinted=hinted)
    await bridge.jobs.enqueue(record, "{}", GATEWAY)
    await peer.answer(await peer.next(frames.Job))
    for note in await inbox.read():
        if note["job"] == record.job:
            assert note["record"] == terminal_text(await bridge.record(record.job))
    await inbox.remove()
    return record


@pytest.mark.parametrize(("hinted", "commits"), [(True, 2), (False, 3)])
async def test_an_idle_job_costs_what_the_budget_says(quiet_bridge: Bridge, hinted: bool, commits: int) -> None:
    """Accept, (mark,) finish; ask, enqueue, the worker's read, take, settle, the gateway's read."""
    bridge, user = quiet_bridge, new_user()
    peer = await bridge.machine(user)
    await one_job(bridge, user, peer, hinted=hinted)  # scripts are loaded
    before = await count(bridge)
    for _ in range(JOBS):
        await one_job(bridge, user, peer, hinted=hinted)
    spent = await count(bridge) - before
    assert spent.commits == commits * JOBS
    # Slack for what the clock does: blocking reads return each five seconds, the sweeper may find a slow job.
    assert 4 * JOBS <= spent.scripts <= 4 * JOBS + 3
    assert 2 * JOBS <= spent.reads <= 2 * JOBS + 6
    assert spent.scripts + spent.reads <= 6 * JOBS + 6


async def test_jobs_under_load_share_commits_and_round_trips(quiet_bridge: Bridge) -> None:
    """A hundred in flight: less than a commit and three round trips a job."""
    bridge = quiet_bridge
    users = [new_user() for _ in range(50)]
    peers = await asyncio.gather(*(bridge.machine(user) for user in users))

    async def answer(peer: Peer) -> None:
        while True:
            await peer.answer(await peer.next(frames.Job, within_s=60))

    async def submit(user: UserId) -> None:
        for _ in range(5):
            record = await bridge.submit(user)
            await bridge.ended(record.job, within_s=60)

    async with asyncio.TaskGroup() as group:
        answering = [group.create_task(answer(peer)) for peer in peers]
        before = await count(bridge)
        reads_before = (await bridge.client.info("stats"))["total_reads_processed"]
        await asyncio.gather(*(submit(user) for user in users for _ in range(2)))
        spent = await count(bridge) - before
        reads = (await bridge.client.info("stats"))["total_reads_processed"] - reads_before
        for task in answering:
            task.cancel()
    jobs = 50 * 2 * 5
    assert spent.commits < jobs
    # What Redis read from its sockets: one for each request or pipeline, however many scripts are in it.
    assert reads < 3 * jobs


@pytest.fixture
def many_files() -> Iterator[None]:
    """A thousand machines are a thousand sockets here, and as many in the worker, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_a_thousand_idle_machines_cost_a_pipeline_and_little_memory(
    state_directory: Path, postgres_url: str, redis_url: str
) -> None:
    """One refresh of all per heartbeat, no connection per machine, at most 24 KiB each."""
    machines = 1000
    async with open_bridge(
        state_directory / f"bridge-{new_id()}", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=3
    ) as bridge:
        process = psutil.Process(bridge.worker.pid)
        # As many as fill one pipeline: its buffers are the worker's, not a socket's.
        warm = [peer for _ in range(10) for peer in await _machines(bridge, 20)]
        await bridge.fence(_user_of(warm[0]), warm[0])
        connections = (await bridge.client.info("clients"))["connected_clients"]
        before = process.memory_info().rss
        peers: list[Peer] = []
        while len(peers) < machines:
            peers += await _machines(bridge, 50)
        await eventually(lambda: _are_connected(bridge, machines + len(warm)))
        await bridge.fence(_user_of(peers[-1]), peers[-1])
        grown = process.memory_info().rss - before
        assert grown / machines <= 24 * KIB, f"{grown / machines / KIB:.1f} KiB a socket"
        assert (await bridge.client.info("clients"))["connected_clients"] <= connections + CONNECTIONS_MAX

        before_stats = await bridge.client.info("stats"), await count(bridge)
        await eventually(lambda: _scripts_since(bridge, before_stats[1], 3 * machines), 30)
        reads = (await bridge.client.info("stats"))["total_reads_processed"] - before_stats[0]["total_reads_processed"]
        # Three refreshes of a thousand machines: each is some pipelines, and Redis reads a pipeline in a few pieces.
        assert reads < machines / 2


async def _machines(bridge: Bridge, number: int) -> list[Peer]:
    return await asyncio.gather(*(bridge.machine(new_user()) for _ in range(number)))


def _user_of(peer: Peer) -> UserId:
    welcome = peer.received[0]
    assert isinstance(welcome, frames.Welcome)
    return UserId(welcome.user)


async def _are_connected(bridge: Bridge, wanted: int) -> bool:
    return await bridge.metric("towline_bridge_sockets") == wanted


async def _scripts_since(bridge: Bridge, before: Count, wanted: int) -> bool:
    await asyncio.sleep(0.2)  # the question is counted too
    return (await count(bridge) - before).scripts >= wanted
