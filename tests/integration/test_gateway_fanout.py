"""The one reader of a gateway: what it costs, counted; and who cannot hurt whom."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import redis.asyncio
from event_stores import Relay, event, events, new_run
from gateway_door import Door, open_door
from gateway_streams import TS, Browser, PlayedRun, metric
from prometheus_client import CollectorRegistry
from support import eventually

from common.ids import GatewayId, RunId
from common.process.metrics import new_registry
from common.store import keys
from common.store.control import Note, tell_gateway
from common.store.eventlog import EventId, EventLog, NewEvent, Position, Writer
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.runs import Runs
from gateway import frames
from gateway.fanout import Fanout
from gateway.feeds import Client
from gateway.frames import Alone, Together
from gateway.metrics import GatewayMetrics
from gateway.topics import Topic, Topics, of_run, stream_of
from harness.faults import TcpProxy
from harness.servers import Servers

BUFFER_BYTES = 64 * 1024


class Bench:
    """A fan-out that runs, with its reads counted; and runs with owners."""

    def __init__(self, redis: Redis, postgres: Postgres) -> None:
        self.redis = redis
        self.registry: CollectorRegistry = new_registry()
        self.notes: list[Note] = []
        self.gateway = GatewayId(f"gateway-{new_run()}")
        self.log = EventLog(redis, stream_of)
        self.fanout = Fanout(
            redis,
            self.log,
            Topics(Runs(postgres)),
            gateway=self.gateway,
            take_notes=self.notes.extend,
            lost_notes=lambda: None,
            metrics=GatewayMetrics(self.registry),
            keepalive_s=60,
            buffer_bytes=BUFFER_BYTES,
        )
        # By read: the streams that it asked for, and those of which it brought something.
        self.reads: list[tuple[set[str], set[str]]] = []
        reader = self.fanout._inbox._reader
        read = reader.read

        async def counted(streams: dict[str, str]) -> Any:
            found = await read(streams)
            self.reads.append((set(streams), {key for key, _ in found}))
            return found

        reader.read = counted  # type: ignore[method-assign]

    async def owner(self, run: RunId, epoch: int = 7) -> Writer:
        return await Relay(self.redis, run).take(epoch)

    def reads_of(self, run: RunId) -> int:
        """How many reads brought something of a run."""
        return sum(keys.events(run) in brought for _, brought in self.reads)

    async def is_reading(self, *runs: RunId) -> None:
        """Wait until the reader is blocked on these runs: a note that it was woken by has come and it reads again."""
        wanted = {keys.events(run) for run in runs}
        before = len(self.reads)
        await tell_gateway(self.redis, self.gateway, {"wake": ""})
        await eventually(lambda: len(self.reads) > before)
        await tell_gateway(self.redis, self.gateway, {"wake": ""})
        await eventually(lambda: len(self.reads) > before + 1 and wanted <= self.reads[-1][0])

    def closed(self, reason: str) -> float:
        return self.registry.get_sample_value("towline_sse_closed_total", {"reason": reason}) or 0.0


@pytest.fixture
async def bench(redis_store: Redis, postgres: Postgres) -> AsyncIterator[Bench]:
    made = Bench(redis_store, postgres)
    running = asyncio.create_task(made.fanout.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def joined(bench: Bench, run: RunId, position: Position, count: int = 1) -> AsyncIterator[list[Client]]:
    """So many clients that read on from one position."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(bench.fanout.client(Alone(of_run(run)))) for _ in range(count)]
        for client in clients:
            assert bench.fanout.join(client, of_run(run), position)
        yield clients


def ids_in(chunk: bytes) -> list[str]:
    return [line[4:].decode() for line in chunk.split(b"\n") if line.startswith(b"id: ")]


async def test_k_events_for_m_clients_are_one_read_one_encoding_and_one_write_each(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget: one read, k encodings, and for each client one write of the same bytes."""
    encoded: list[bytes] = []
    encode = frames.sse.encode

    def counted(*args: Any) -> bytes:
        frame = encode(*args)
        encoded.append(frame)
        return frame

    monkeypatch.setattr(frames.sse, "encode", counted)
    run = new_run()
    writer = await bench.owner(run)
    async with joined(bench, run, Position.after(writer.tail), 50) as clients:
        await bench.is_reading(run)
        await writer.append(events(1, 20), progressed=True)
        chunks = [await client.next_chunk() for client in clients]
    assert bench.reads_of(run) == 1
    assert len(encoded) == 20
    assert len({id(chunk) for chunk in chunks}) == 1
    assert len(ids_in(chunks[0])) == 20


async def test_however_many_runs_there_is_one_blocking_read(bench: Bench, redis_client: redis.asyncio.Redis) -> None:
    """A hundred runs are in one call on one connection; a new one is read at once, not after the block."""
    runs = [new_run() for _ in range(100)]
    writers = [await bench.owner(run) for run in runs]
    async with contextlib.AsyncExitStack() as stack:
        for run, writer in zip(runs, writers, strict=True):
            await stack.enter_async_context(joined(bench, run, Position.after(writer.tail)))
        await bench.is_reading(*runs)
        assert len([c for c in await _connections(redis_client) if c["cmd"] == "xread"]) == 1
        late = new_run()
        writer = await bench.owner(late)
        before = len(bench.reads)
        async with joined(bench, late, Position.after(writer.tail)) as (client,):
            await writer.append([event(1)], progressed=True)
            assert len(ids_in(await client.next_chunk())) == 1
        # Woken by a note: without it a block would have had to pass first, and that read would have brought nothing.
        assert all(brought for _, brought in bench.reads[before:])


async def test_replies_come_by_the_same_read(bench: Bench) -> None:
    """What waiters are told is handed over as it comes."""
    await tell_gateway(bench.redis, bench.gateway, {"job": "j", "record": "{}"})
    await eventually(lambda: bench.notes == [{"job": "j", "record": "{}"}])


async def test_who_was_ahead_gets_nothing_twice(bench: Bench) -> None:
    """A client whose own history went further than the shared read joins without a repetition or a hole."""
    run = new_run()
    writer = await bench.owner(run)
    behind = Position.after(writer.tail)
    async with joined(bench, run, behind) as (first,), bench.fanout.client(Alone(of_run(run))) as second:
        await bench.is_reading(run)
        # In one step of the loop: the append is not read yet when the second one, who has read it, joins.
        page_end = EventId(writer.tail.epoch, writer.tail.seq + 2)
        assert bench.fanout.join(second, of_run(run), Position.after(page_end))
        await writer.append(events(1, 3), progressed=True)
        assert len(ids_in(await first.next_chunk())) == 3
        assert ids_in(await second.next_chunk()) == [str(writer.tail)]
        await writer.append([event(4)], progressed=True)
        assert ids_in(await second.next_chunk()) == ids_in(await first.next_chunk()) == [str(writer.tail)]


async def test_who_is_behind_reads_on_before_it_joins(bench: Bench) -> None:
    """No place in the feed for a position that others have passed."""
    run = new_run()
    writer = await bench.owner(run)
    start = Position.after(writer.tail)
    async with joined(bench, run, start) as (first,), bench.fanout.client(Alone(of_run(run))) as second:
        await writer.append([event(1)], progressed=True)
        await first.next_chunk()
        assert not bench.fanout.join(second, of_run(run), start)
        assert bench.fanout.join(second, of_run(run), Position.after(writer.tail))


async def test_a_slow_client_is_closed_alone(bench: Bench) -> None:
    """More than its buffer queued: it is closed by name, in the middle of a write that gets nowhere."""
    run = new_run()
    writer = await bench.owner(run)
    stuck = asyncio.Event()

    async def never_reads() -> str:
        async with bench.fanout.client(Alone(of_run(run))) as client:
            assert bench.fanout.join(client, of_run(run), Position.after(writer.tail))
            await client.next_chunk()
            stuck.set()
            await asyncio.Event().wait()  # a send to a connection that is full
        return client.ending

    slow = asyncio.create_task(never_reads())
    block = NewEvent("coder", "", "output", "x" * (BUFFER_BYTES // 2), TS)
    await eventually(lambda: bench.fanout.position_of(of_run(run)))
    async with joined(bench, run, Position.after(writer.tail)) as (quick,):
        got = 0
        await writer.append([block], progressed=True)
        await stuck.wait()
        for _ in range(8):
            await writer.append([block], progressed=True)
            got += len(ids_in(await quick.next_chunk()))
        async with asyncio.timeout(10):
            assert await slow == "slow"
        assert got >= 8
        assert (bench.closed("slow"), quick.ending) == (1, "")


async def test_a_batch_that_cannot_be_read_closes_its_readers_and_no_others(
    bench: Bench, redis_client: redis.asyncio.Redis
) -> None:
    """An entry without the fields of one: whoever reads that run has to come back; the process goes on."""
    broken, sound = new_run(), new_run()
    writers = {run: await bench.owner(run) for run in (broken, sound)}
    async with (
        joined(bench, sound, Position.after(writers[sound].tail)) as (well,),
        bench.fanout.client(Alone(of_run(broken))) as unlucky,
    ):
        tail = writers[broken].tail
        assert bench.fanout.join(unlucky, of_run(broken), Position.after(tail))
        await redis_client.xadd(keys.events(broken), {"odd": "1"}, id=f"{tail.epoch}-{tail.seq + 1}")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        assert unlucky.ending == "failed"
    async with joined(bench, sound, Position.after(writers[sound].tail)) as (well,):
        await writers[sound].append([event(1)], progressed=True)
        assert await well.next_chunk()


async def test_whoever_leaves_leaves_nothing_behind(bench: Bench) -> None:
    """No client, no feed; the next read does not ask for the run any more."""
    run = new_run()
    writer = await bench.owner(run)
    async with joined(bench, run, Position.after(writer.tail), 3):
        await bench.is_reading(run)
    assert bench.fanout.position_of(of_run(run)) is None
    await bench.is_reading()
    assert keys.events(run) not in bench.reads[-1][0]
    assert bench.registry.get_sample_value("towline_sse_clients") == 0


async def test_ids_of_several_runs_say_where_it_stands_in_each(bench: Bench) -> None:
    """A frame's id names what went out before it, and no more: resuming from any of them repeats and skips nothing."""
    runs = sorted([new_run(), new_run()])
    writers = {run: await bench.owner(run) for run in runs}
    at = {run: writer.tail for run, writer in writers.items()}
    positions: dict[Topic, EventId | None] = {of_run(run): tail for run, tail in at.items()}
    async with bench.fanout.client(Together(positions)) as client:
        for run in runs:
            assert bench.fanout.join(client, of_run(run), Position.after(at[run]))
        await writers[runs[0]].append(events(1, 2), progressed=True)
        first = await client.next_chunk()
        await writers[runs[1]].append(events(1, 1), progressed=True)
        second = await client.next_chunk()
    told = [frames.parse_composite_id(text, [*positions]) for text in ids_in(first + second)]
    seqs = [tuple(place[of_run(run)].seq - at[run].seq for run in runs) for place in told if place]  # type: ignore[union-attr]
    assert seqs == [(1, 0), (2, 0), (2, 1)]
    assert frames.parse_composite_id(ids_in(first)[0], [of_run(runs[0]), of_run(new_run())]) is None


# ---- over sockets


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway whose clients may be little behind."""
    env = {"TOWLINE_SSE_BUFFER_BYTES": "65536", "TOWLINE_SSE_KEEPALIVE_S": "0.5"}
    async with open_door(servers, postgres_url, state_directory / "fanout", env=env) as opened:
        yield opened


async def deaf(door: Door, run: str) -> socket.socket:
    """A client that asks for a stream, takes its head and then nothing more."""
    loop = asyncio.get_running_loop()
    opened = socket.socket()
    opened.setblocking(False)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(opened, ("127.0.0.1", door.stack.gateways[0].port))
    head = f"GET /v1/runs/{run}/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {door.stack.api_key}\r\n\r\n"
    await loop.sock_sendall(opened, head.encode())
    await loop.sock_recv(opened, 512)
    return opened


async def test_one_that_never_reads_is_closed_and_resumes_elsewhere_than_the_others(door: Door) -> None:
    """It is closed by name, the others get everything in time, and its cursor is still good."""
    run = await (await PlayedRun(door).put()).begin()
    await run.add(1)
    async with Browser(door) as browser, browser.watch(run.run) as reader:
        await reader.has(1)
        before = await metric(door, 'towline_sse_closed_total{reason="slow"}')
        never = await deaf(door, run.run)
        block = NewEvent("coder", "", "output", "x" * 200_000, TS)
        for number in range(60):
            await run.add_event(block)
            await reader.has(number + 2)
        await eventually(lambda: _is(door, 'towline_sse_closed_total{reason="slow"}', before + 1))
        assert await metric(door, "towline_sse_clients") == 1
        async with browser.watch(run.run, reader.frames[0].id) as resumed:
            await resumed.has(60)
        never.close()


async def test_one_that_never_reads_its_history_is_closed(door: Door) -> None:
    """Nothing new comes that could fill its buffer: what it does not take is told by time."""
    run = await (await PlayedRun(door).put()).begin()
    block = NewEvent("coder", "", "output", "x" * 200_000, TS)
    for _ in range(60):  # more than the kernels on the way keep
        await run.add_event(block)
    before = await metric(door, 'towline_sse_closed_total{reason="slow"}')
    never = await deaf(door, run.run)
    await eventually(lambda: _is(door, 'towline_sse_closed_total{reason="slow"}', before + 1), within_s=30)
    never.close()


async def test_clients_that_vanish_are_forgotten(door: Door) -> None:
    """Forty connections are reset on a silent run; nothing of them is left, and Redis never heard of them."""
    run = await (await PlayedRun(door).put()).begin()
    connections_before = len(await _connections(door.commands))
    opened = [await deaf(door, run.run) for _ in range(40)]
    await eventually(lambda: _is(door, "towline_sse_clients", 40))
    assert len(await _connections(door.commands)) <= connections_before + 2
    for each in opened:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.close()
    await eventually(lambda: _is(door, "towline_sse_clients", 0))


async def test_several_runs_share_a_connection(door: Door) -> None:
    """Events of all of them, each with its run, resumed in each where it was; it ends when all have."""
    runs = [await (await PlayedRun(door).put()).begin() for _ in range(3)]
    names = [run.run for run in runs]
    async with Browser(door) as browser:
        async with browser.watch_many(names) as watcher:
            for run in runs:
                await run.add(1, 2)
            await watcher.has(6)
            middle = watcher.frames[3]
        seen = [(frame.data["run"], frame.text) for frame in watcher.frames[:4]]
        for run in runs:
            await run.add(3)
        await runs[0].end()
        async with browser.watch_many(names, middle.id) as watcher:
            for run in runs[1:]:
                await run.end()
            await watcher.is_done()
        seen += [(frame.data["run"], frame.text) for frame in watcher.frames if frame.type == "output"]
        assert sorted(seen) == sorted((name, f"coder {n}") for name in names for n in (1, 2, 3))
        assert [frame.type for frame in watcher.frames].count("towline.end") == 3
        assert not watcher.was_broken
        answer = await browser.client.get(
            "/v1/events", params={"runs": ",".join(names)}, headers={"last-event-id": watcher.last_id}
        )
        assert answer.status_code == 204


@pytest.mark.parametrize(
    ("runs", "last_id", "status"),
    [
        ("", "", 400),
        ("a,,b", "", 400),
        (",".join(f"r{n}" for n in range(21)), "", 400),
        ("nobody", "", 404),
        ("{run}", "1-1", 400),
        ("{run}", "AAAA", 400),
        ("{run}", "!", 400),
        ("{run},nobody", "", 404),
    ],
)
async def test_what_cannot_be_streamed_together(door: Door, runs: str, last_id: str, status: int) -> None:
    """Refused before the stream starts."""
    run = await PlayedRun(door).put()
    async with Browser(door) as browser:
        headers = {"last-event-id": last_id} if last_id else {}
        answer = await browser.client.get("/v1/events", params={"runs": runs.format(run=run.run)}, headers=headers)
    assert answer.status_code == status


async def test_a_reader_that_lost_its_connection_goes_on_where_it_was(door: Door) -> None:
    """Redis cuts the blocking read off; what comes meanwhile is there afterwards, and once."""
    run = await (await PlayedRun(door).put()).begin()
    async with Browser(door) as browser, browser.watch(run.run) as watcher:
        await run.add(1)
        await watcher.has(1)
        for client in await _connections(door.commands):
            if client["cmd"] == "xread":
                await door.commands.client_kill_filter(_id=client["id"])
        await run.add(2)
        assert await watcher.has(2) == ["coder 1", "coder 2"]


async def test_a_redis_out_of_reach_is_bridged_by_signs_of_life(door: Door) -> None:
    """Open streams stay open, new ones open too; when Redis is back both get what they are owed, without a gap."""
    proxy = TcpProxy(door.redis_url)
    gateway = await door.add_gateway({"REDIS_URL": await proxy.start(), "TOWLINE_SSE_KEEPALIVE_S": "0.5"})
    run = await (await PlayedRun(door).put()).begin()
    await run.add(1)
    try:
        async with Browser(door, gateway) as browser, browser.watch(run.run) as watcher:
            await watcher.has(1)
            proxy.refuse()
            proxy.cut()
            await run.add(2)
            async with browser.watch(run.run) as late:
                for each in (watcher, late):
                    shown = len(each.comments)
                    await eventually(lambda e=each, n=shown: len(e.comments) >= n + 3)  # type: ignore[misc]
                assert (watcher.texts, late.texts) == (["coder 1"], [])
                await proxy.heal()
                assert await watcher.has(2, within_s=20) == ["coder 1", "coder 2"]
                assert await late.has(2, within_s=20) == ["coder 1", "coder 2"]
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
        await proxy.stop()


async def _connections(client: redis.asyncio.Redis) -> list[dict[str, str]]:
    """The connections to the client's own database: the server may be shared."""
    number = str(client.connection_pool.connection_kwargs.get("db", 0))
    return [found for found in await client.client_list() if found["db"] == number]


async def _is(door: Door, sample: str, value: float) -> bool:
    return await metric(door, sample) == value


class _OneTopic:
    """As much of an encoder as a client needs that is sent nothing."""

    open_topics: ClassVar[set[int]] = {1}


async def test_a_response_that_is_being_cut_is_cut_again_in_peace() -> None:
    """A keep-alive finds it stuck just as the gateway drains: an error would end either for everybody."""
    made: asyncio.Future[Client] = asyncio.get_running_loop().create_future()

    async def respond() -> None:
        async with asyncio.timeout(None) as cut:
            made.set_result(Client(cast("Any", _OneTopic()), cut, buffer_bytes=1))
            await asyncio.Event().wait()

    response = asyncio.create_task(respond())
    client = await made
    client.cut("slow")
    while not response.done():
        client.cut("drain")
        await asyncio.sleep(0)
    assert isinstance(response.exception(), TimeoutError)
    assert client.ending == "slow"
