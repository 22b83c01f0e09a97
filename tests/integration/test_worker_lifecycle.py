"""Ends and outages: tokens, silence, drain, and stores that are away while machines are connected."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec
import psutil
import psycopg
import pytest
from bridge import READ, Bridge, hello, open_bridge
from job_stores import accepted, new_user
from support import eventually
from websockets.exceptions import InvalidStatus

from common.ids import UserId, WorkerId, new_id
from common.store import keys
from common.store.control import tell_worker
from harness.faults import TcpProxy
from harness.servers import Servers
from towline.wire import frames


async def state(bridge: Bridge, user: UserId) -> str:
    """Presence, in one word."""
    return (await bridge.held(user).presence()).get("state", "absent")


async def has_state(bridge: Bridge, user: UserId, wanted: str) -> bool:
    return await state(bridge, user) == wanted


async def set_expiry(bridge: Bridge, token_id: str, expression: str) -> None:
    async with await psycopg.AsyncConnection.connect(bridge.postgres_url, autocommit=True) as connection:
        await connection.execute(f"update machine_tokens set expires_at = {expression} where token_id = %s", [token_id])


# ---- tokens


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_token_that_is_good_no_more_closes_its_socket_within_a_heartbeat(
    brisk_bridge: Bridge, user: UserId, how: str
) -> None:
    """4500, and the machine is gone from the door."""
    row, value = await brisk_bridge.tokens.add_machine_token(user, "test", 3600)
    other = await brisk_bridge.machine(new_user())
    peer = await brisk_bridge.machine(user, token=value)
    async with brisk_bridge.counts_close("token_refused"):
        if how == "revoked":
            await brisk_bridge.tokens.revoke_machine_token(user, row.token_id)
        else:
            await set_expiry(brisk_bridge, row.token_id, "now()")
        code, reason = await peer.closed(within_s=3)
    assert (code, reason) == (4500, "the token was revoked or has expired")
    await eventually(lambda: has_state(brisk_bridge, user, "absent"))
    assert other.socket.close_code is None


async def test_a_close_note_ends_a_revoked_session_at_once(bridge: Bridge, user: UserId) -> None:
    """Long before the next heartbeat; sessions of other tokens stay."""
    row, value = await bridge.tokens.add_machine_token(user, "test", None)
    peer = await bridge.machine(user, token=value)
    worker = WorkerId((await bridge.held(user).presence())["worker"])
    await tell_worker(bridge.redis, worker, {"note": "close", "user": user, "token_id": new_id()})
    await bridge.fence(user, peer)
    await tell_worker(bridge.redis, worker, {"note": "close", "user": user, "token_id": row.token_id})
    assert (await peer.closed(within_s=3))[0] == 4500


async def test_a_token_near_its_end_is_renewed_over_the_socket(brisk_bridge: Bridge, user: UserId) -> None:
    """Once; the new value opens sessions, and the old one does until it would have expired."""
    bridge = brisk_bridge
    row, value = await bridge.tokens.add_machine_token(user, "test", 3600)
    peer = await bridge.machine(user, token=value)
    await set_expiry(bridge, row.token_id, "now() + interval '700 seconds'")
    token = await peer.next(frames.Token)
    for good in (token.token, value):
        minted = await bridge.tokens.mint_session(good)
        assert minted is not None
        assert minted.token_id == row.token_id
    await bridge.fence(user, peer)
    assert sum(isinstance(frame, frames.Token) for frame in peer.received) == 1
    assert token.token not in bridge.worker.read_log()


# ---- silence


async def test_a_machine_that_falls_silent_is_closed_and_one_that_pongs_stays(brisk_bridge: Bridge) -> None:
    """4001 after two heartbeats without a frame; until then presence was refreshed."""
    bridge = brisk_bridge
    silent_user, living_user = new_user(), new_user()
    silent, living = await bridge.machine(silent_user), await bridge.machine(living_user)
    async with bridge.counts_close("no_pong"):
        silent.answers_pings = False
        assert await silent.closed(within_s=5) == (4001, "no sign of life")
    await eventually(lambda: has_state(bridge, silent_user, "reconnecting"))
    await eventually(lambda: has_state(bridge, silent_user, "absent"))
    pings = len(living.received)
    await eventually(lambda: len(living.received) >= pings + 3)
    assert living.socket.close_code is None
    assert await state(bridge, living_user) == "online"


async def test_the_applications_ping_is_answered(bridge: Bridge, user: UserId) -> None:
    """With its number, at once."""
    peer = await bridge.machine(user)
    await peer.send(frames.Ping(n=41))
    assert (await peer.next(frames.Pong)).n == 41


# ---- a worker of its own: it is stopped, killed, cut off


@dataclass
class Cut:
    """A bridge whose worker reaches its stores through proxies; the test's own connections go straight."""

    bridge: Bridge
    redis: TcpProxy
    postgres: TcpProxy


@pytest.fixture
async def cut(servers: Servers, state_directory: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Cut]:
    async with contextlib.AsyncExitStack() as cleanup:
        proxies = []
        for url in (redis_url, postgres_url):
            proxies.append(TcpProxy(url))
            await proxies[-1].start()
            cleanup.push_async_callback(proxies[-1].stop)
        bridge = await cleanup.enter_async_context(
            open_bridge(
                state_directory / f"bridge-{new_id()}",
                postgres_url=postgres_url,
                redis_url=redis_url,
                heartbeat_s=1,
                env={"REDIS_URL": proxies[0].url, "DATABASE_URL": proxies[1].url},
            )
        )
        yield Cut(bridge, *proxies)


async def test_what_was_gathered_is_acknowledged_before_a_machine_is_sent_elsewhere(
    state_directory: Path, postgres_url: str, redis_url: str, user: UserId
) -> None:
    """The next heartbeat is ten seconds away, and this session does not live to see it."""
    directory = state_directory / f"bridge-{new_id()}"
    async with open_bridge(directory, postgres_url=postgres_url, redis_url=redis_url) as bridge:
        peer = await bridge.machine(user)
        record = await bridge.submit(user)
        await peer.answer(await peer.next(frames.Job))
        await bridge.ended(record.job)
        await eventually(lambda: _entries(bridge, user, 0))
        bridge.worker.term()
        await peer.next(frames.Draining)
        assert peer.acknowledged() == [record.job]


async def test_sigterm_sends_machines_elsewhere_in_waves(
    state_directory: Path, postgres_url: str, redis_url: str
) -> None:
    """Draining, then 1012; handshakes are refused meanwhile; results still count; the process ends with 0."""
    directory = state_directory / f"bridge-{new_id()}"
    # Its heartbeat is long: what a wave has left behind is still there when the last one has been.
    async with open_bridge(directory, postgres_url=postgres_url, redis_url=redis_url) as bridge:
        users = [new_user() for _ in range(8)]
        peers = [await bridge.machine(user) for user in users]
        token = await bridge.token(new_user())
        record = await bridge.submit(users[-1], hinted=False, name="fill_form")
        job = await peers[-1].next(frames.Job)
        worker = WorkerId((await bridge.held(users[0]).presence())["worker"])
        async with bridge.counts_close("draining"):
            bridge.worker.term()
            await peers[0].next(frames.Draining)
            with pytest.raises(InvalidStatus) as caught:
                await bridge.dial(token)
            assert caught.value.response.status_code == 503
            assert b"/problems/draining" in caught.value.response.body
            assert caught.value.response.headers["Retry-After"] == "1"
            assert peers[-1].socket.close_code is None  # its wave is still to come
            await peers[-1].answer(job)
            assert (await peers[-1].next(frames.JobResultAck)).jobs == [record.job]
        for peer, user in zip(peers, users, strict=True):
            assert await peer.closed() == (1012, "this worker is leaving")
            await eventually(lambda user=user: has_state(bridge, user, "reconnecting"))
        assert await bridge.worker.wait(within_s=10) == 0
        assert (await bridge.record(record.job)).state == "completed"
        assert await bridge.client.exists(keys.control(worker)) == 0


async def test_a_killed_workers_jobs_are_claimed_at_once_elsewhere(cut: Cut, user: UserId) -> None:
    """No idle timeout: the older session is outranked, so what it held is taken over."""
    bridge, token = cut.bridge, await cut.bridge.token(user)
    peer = await bridge.machine(user, token=token)
    records = [await bridge.submit(user, hinted=hinted) for hinted in (False, True)]
    await peer.next(frames.Job)
    other = await bridge.stack.add_worker()
    bridge.worker.kill()
    assert (await peer.closed())[0] == 1006
    peer = await bridge.machine(user, token=token, worker=other)
    for record in records:
        job = await peer.next(frames.Job, within_s=5)
        assert job.job == record.job
        await peer.answer(job)
        assert (await bridge.ended(record.job)).state == "completed"


async def test_presence_of_a_killed_worker_lapses(cut: Cut, user: UserId) -> None:
    """Nobody says goodbye for it; its time to live does."""
    peer = await cut.bridge.machine(user)
    assert await state(cut.bridge, user) == "online"
    cut.bridge.worker.kill()
    await peer.closed()
    await eventually(lambda: has_state(cut.bridge, user, "absent"), 5)


async def test_a_frozen_worker_takes_nothing_and_writes_nothing_once_outranked(cut: Cut, user: UserId) -> None:
    """It wakes after its machine went elsewhere: no second delivery, no presence, and the old socket is told."""
    bridge, token = cut.bridge, await cut.bridge.token(user)
    old = await bridge.machine(user, token=token)
    other = await bridge.stack.add_worker()
    bridge.worker.freeze()
    # A note to the frozen worker: it must not find the entry when it wakes.
    record = await bridge.submit(user, hinted=False, name="fill_form")
    new = await bridge.machine(user, token=token, worker=other)
    job = await new.next(frames.Job)
    assert (job.job, job.attempt) == (record.job, 1)
    bridge.worker.thaw()
    code, _ = await old.closed()
    assert code in (4503, 4001)  # whichever it notices first: replaced, or nothing heard while it was frozen
    assert old.jobs() == []
    presence = await bridge.held(user).presence()
    assert (presence["state"], presence["session"]) == ("online", new.received[0].session)  # type: ignore[union-attr]
    await new.answer(job)
    assert (await bridge.ended(record.job)).attempts == 1


async def test_after_a_flush_machines_are_present_and_jobs_delivered_again(cut: Cut, user: UserId) -> None:
    """Sockets stay; what runs is not sent twice; what was accepted comes back from Postgres."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    running = await bridge.submit(user, hinted=False, name="fill_form")
    job = await peer.next(frames.Job)
    waiting = await bridge.submit(user)
    await bridge.client.flushdb()
    await eventually(lambda: has_state(bridge, user, "online"))
    await eventually(lambda: _has_tools(bridge, user, {"echo": "h", "fill_form": "u"}))
    await eventually(lambda: _entries(bridge, user, 2))
    assert peer.jobs() == [running.job]
    await peer.answer(job)
    assert (await bridge.ended(running.job)).attempts == 1
    job = await peer.next(frames.Job)
    assert job.job == waiting.job
    await peer.answer(job)
    assert (await bridge.ended(waiting.job)).state == "completed"
    assert peer.jobs() == [running.job, waiting.job]
    assert peer.socket.close_code is None


async def _entries(bridge: Bridge, user: UserId, count: int) -> bool:
    return len(await bridge.held(user).entries()) == count


async def test_an_outcome_waits_while_postgres_is_away(cut: Cut, user: UserId) -> None:
    """Nothing is acknowledged before it is durable; the socket stays, and the job ends once."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    record = await bridge.submit(user, hinted=False, name="fill_form")
    job = await peer.next(frames.Job)
    cut.postgres.refuse()
    cut.postgres.cut()
    await peer.answer(job, '"kept"')
    await bridge.fence(user, peer)
    held_here = 'towline_queue_depth{queue="outcomes"}'
    assert await bridge.metric(held_here) == 1
    assert await bridge.held(user).pending() == 1
    assert not any(isinstance(frame, frames.JobResultAck) for frame in peer.received)
    await cut.postgres.heal()
    await peer.acknowledgement(record.job, within_s=30)
    ended = await bridge.record(record.job)
    assert (ended.outcome, ended.attempts) == ('{"result":"kept"}', 1)
    await eventually(lambda: _entries(bridge, user, 0))
    assert await bridge.metric(held_here) == 0


async def test_machines_that_come_while_postgres_is_away_are_sent_to_come_later(cut: Cut, user: UserId) -> None:
    """Whose token cannot be checked: 503. Whose hello cannot be kept: 1013; nobody becomes present."""
    bridge = cut.bridge
    token = await bridge.token(user)
    peer = await bridge.dial(token)
    cut.postgres.refuse()
    cut.postgres.cut()
    await peer.send(hello())
    with pytest.raises(InvalidStatus) as caught:
        await bridge.dial(token)
    response = caught.value.response
    assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
    assert b'"/problems/store-unavailable"' in response.body
    assert await peer.closed(within_s=20) == (1013, "the machine cannot be recorded now")
    assert await bridge.held(user).exist() == set()


async def test_a_mark_waits_while_postgres_is_away(cut: Cut, user: UserId) -> None:
    """And the frame waits with it."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    record = await accepted(bridge.requests, user, hinted=False, name="fill_form")
    cut.postgres.refuse()
    cut.postgres.cut()
    await bridge.jobs.enqueue(record, "{}", None)
    await eventually(lambda: _is_taken(bridge, user))
    await bridge.fence(user, peer)
    assert peer.jobs() == []
    await cut.postgres.heal()
    assert (await peer.next(frames.Job, within_s=20)).job == record.job


async def _is_taken(bridge: Bridge, user: UserId) -> bool:
    return await bridge.held(user).pending() == 1


async def test_machines_stay_present_while_postgres_says_nothing(cut: Cut, user: UserId) -> None:
    """Its link is dead without a word, so whoever asks it waits; presence does not wait with them."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    cut.postgres.stall()
    since = int((await bridge.held(user).presence())["seen"])

    async def was_seen_later() -> bool:
        presence = await bridge.held(user).presence()
        if presence.get("state") != "online":
            raise RuntimeError(f"presence is {presence}")
        return int(presence["seen"]) >= since + 4000  # longer than its time to live

    await eventually(was_seen_later, 10)
    assert peer.socket.close_code is None
    await cut.postgres.heal()


async def test_a_changed_catalogue_while_postgres_is_away_does_not_end_the_session(cut: Cut, user: UserId) -> None:
    """The door has it from Redis; its record follows when Postgres is back."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    cut.postgres.refuse()
    cut.postgres.cut()
    await peer.send(frames.Tools(tools=[READ]))
    await eventually(lambda: _has_tools(bridge, user, {"echo": "h"}))
    await eventually(lambda: "catalogue_waits" in bridge.worker.read_log(), 20)
    await cut.postgres.heal()

    async def is_recorded() -> bool:
        catalogue = await bridge.tokens.catalogue(user)
        return catalogue is not None and len(msgspec.json.decode(catalogue.tools)) == 1

    await eventually(is_recorded, 20)
    assert peer.socket.close_code is None


async def _has_tools(bridge: Bridge, user: UserId, tools: dict[str, str]) -> bool:
    return await bridge.held(user).tools() == tools


async def test_a_catalogue_that_changes_while_it_is_written_is_written_again(cut: Cut, user: UserId) -> None:
    """The answer to the older one must not pass for the newer one's."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    cut.redis.delay(0.15)
    for number in range(10):
        await peer.send(frames.Tools(tools=[frames.Tool(f"tool-{number}")]))
        await peer.send(frames.Ping(n=number))
        await peer.next(frames.Pong)
        await asyncio.sleep(0.05)  # the point: they arrive while an assertion is on its way
    await eventually(lambda: _has_tools(bridge, user, {"tool-9": "u"}))


async def test_machines_stay_connected_while_redis_is_away(cut: Cut, user: UserId) -> None:
    """Their jobs go on and end in Postgres; what Redis held is settled when it is back."""
    bridge = cut.bridge
    peer = await bridge.machine(user)
    record = await bridge.submit(user, hinted=False, name="fill_form")
    job = await peer.next(frames.Job)
    cut.redis.refuse()
    cut.redis.cut()
    await peer.answer(job)
    assert (await bridge.ended(record.job)).state == "completed"
    await eventually(lambda: has_state(bridge, user, "absent"), 6)  # nobody can refresh it
    await cut.redis.heal()
    await eventually(lambda: has_state(bridge, user, "online"))
    await eventually(lambda: _entries(bridge, user, 0))
    next_record = await bridge.submit(user)
    assert (await peer.next(frames.Job)).job == next_record.job


@pytest.mark.parametrize("what", ["out of memory", "one user's key is broken"])
async def test_a_redis_that_refuses_is_asked_again_at_leisure(cut: Cut, user: UserId, what: str) -> None:
    """A worker whose scripts fail must not ask without a pause: the others need Redis and its processor too."""
    bridge = cut.bridge
    neighbour = new_user()
    peer, neighbours_peer = await bridge.machine(user), await bridge.machine(neighbour)
    if what == "out of memory":
        await bridge.client.config_set("maxmemory", "1mb")
    else:
        await bridge.client.delete(keys.presence(user))
        await bridge.client.set(keys.presence(user), "not a hash")
    process = psutil.Process(bridge.worker.pid)
    try:
        before = await bridge.script_calls(), process.cpu_times()
        await asyncio.sleep(1.5)  # a stretch of time to count in: heartbeats, and repetitions
        calls = await bridge.script_calls() - before[0]
        busy_s = sum(process.cpu_times()[:2]) - sum(before[1][:2])
        assert calls < 60
        assert busy_s < 0.75
    finally:
        await bridge.client.config_set("maxmemory", "0")
    if what != "out of memory":
        record = await bridge.submit(neighbour)
        assert (await neighbours_peer.next(frames.Job)).job == record.job
        await bridge.client.delete(keys.presence(user))
    record = await bridge.submit(user)
    assert (await peer.next(frames.Job)).job == record.job


async def test_a_worker_waits_for_stores_that_are_not_there_yet(
    servers: Servers, state_directory: Path, postgres_url: str, redis_url: str
) -> None:
    """It starts before them in many a cluster, says what it waits for, and is ready when they are."""
    proxy = TcpProxy(redis_url)
    parts = urlsplit(redis_url)
    away = urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{proxy.port}"))
    directory = state_directory / f"bridge-{new_id()}"

    async def start_proxy(bridge_log: Path) -> None:
        await eventually(lambda: bridge_log.exists() and "waiting_for_stores" in bridge_log.read_text(), 20)
        await proxy.start()

    starting = asyncio.create_task(start_proxy(directory / "worker-1.log"))
    try:
        async with open_bridge(
            directory, postgres_url=postgres_url, redis_url=redis_url, env={"REDIS_URL": away}
        ) as bridge:
            await starting
            await bridge.machine(new_user())
    finally:
        await proxy.stop()
