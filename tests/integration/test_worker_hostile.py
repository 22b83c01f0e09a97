"""Hostile machines: each harms itself alone, while a neighbour on the same worker goes on as if nothing was."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil
import pytest
from bridge import Bridge, Peer, hello
from job_stores import new_user
from support import eventually
from websockets.exceptions import ConnectionClosed

from common.ids import UserId, new_id
from towline.wire import frames
from worker.session import SEND_QUEUE_MAX


@pytest.fixture
async def neighbour(bridge: Bridge) -> AsyncIterator[UserId]:
    """A user whose machine answers every job; after the test it must still be connected, and working."""
    user = new_user()
    peer = await bridge.machine(user)

    async def work() -> None:
        while True:
            await peer.answer(await peer.next(frames.Job, within_s=600))

    async with asyncio.TaskGroup() as group:
        working = group.create_task(work())
        yield user
        assert peer.socket.close_code is None
        await a_job_is_done(bridge, user)
        working.cancel()


async def a_job_is_done(bridge: Bridge, user: UserId) -> None:
    """One job of the neighbour, there and back in time."""
    record = await bridge.submit(user)
    assert (await bridge.ended(record.job, within_s=20)).state == "completed"


async def send_until_closed(peer: Peer, said: str | bytes, times: int) -> None:
    """As fast as the worker takes them."""
    with contextlib.suppress(ConnectionClosed):
        for _ in range(times):
            await peer.send(said)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"\x00" * 10, 4501),
        ("nonsense", 4501),
        ("[]", 4501),
        ('{"type":1}', 4501),
        ('{"type":"job_result"}', 4501),
        ('{"type":"ping","n":"' + "ü" * 500 + '"}', 4501),
        ('{"type":"hello","machine":"m","journal":"j"}', 4501),
        ("[" * 200_000, 4501),
        ("x" * (frames.FRAME_BYTES_MAX + 1), 1009),
        (b"x" * (frames.FRAME_BYTES_MAX + 1), 1009),
    ],
    ids=["binary", "text", "array", "type", "no-outcome", "field", "second-hello", "nested", "huge", "huge-binary"],
)
async def test_a_bad_frame_ends_its_own_session_only(
    bridge: Bridge, user: UserId, neighbour: UserId, said: str | bytes, code: int
) -> None:
    """With a code that says so; the job it held is claimed by its next session."""
    token = await bridge.token(user)
    peer = await bridge.machine(user, token=token)
    record = await bridge.submit(user)
    await peer.next(frames.Job)
    await send_until_closed(peer, said, 1)
    assert (await peer.closed())[0] == code
    await a_job_is_done(bridge, neighbour)
    peer = await bridge.machine(user, token=token)
    assert (await peer.next(frames.Job)).job == record.job


async def test_a_frame_of_an_unknown_type_is_ignored_and_counted(bridge: Bridge, user: UserId) -> None:
    """A newer sidecar may say more than this worker understands."""
    peer = await bridge.machine(user)
    before = await bridge.metric("towline_bridge_unknown_frames_total")
    for said in ('{"type":"job_progress","id":"x","percent":3}', '{"type":"welcome","session":1}', '{"type":""}'):
        await peer.send(said)
    await bridge.fence(user, peer)
    assert peer.socket.close_code is None
    assert await bridge.metric("towline_bridge_unknown_frames_total") == before + 3


@pytest.mark.parametrize(
    "said",
    [
        '{"type":"ping"}',
        '{"type":"novelty"}',
        '{"type":"status_result","id":"x","busy":true,"queue":1,"uptime_s":1}',
        f'{{"type":"job_result","id":"{new_id()}","outcome":"completed","result":1}}',
        f'{{"type":"job_result","job":"{new_id()}","outcome":"completed","result":"{"x" * 1000}"}}',
        '{"type":"tools","tools":[{"name":"t"}]}',
    ],
    ids=["ping", "unknown", "status", "result-of-frame", "result-of-job", "tools"],
)
async def test_a_flood_of_frames_does_not_hold_up_a_neighbour(
    bridge: Bridge, user: UserId, neighbour: UserId, said: str
) -> None:
    """Thousands of frames as fast as they are taken; memory does not grow with them."""
    peer = await bridge.machine(user)
    process = psutil.Process(bridge.worker.pid)
    before = process.memory_info().rss
    flood = asyncio.create_task(send_until_closed(peer, said, 5000))
    for _ in range(5):
        await a_job_is_done(bridge, neighbour)
    async with asyncio.timeout(30):
        await flood
    assert process.memory_info().rss - before < 50 * 1024 * 1024


async def test_a_machine_that_never_reads_is_cut_off(bridge: Bridge, user: UserId, neighbour: UserId) -> None:
    """Its own socket's buffers fill, no more; its work is claimed by the next session."""
    token = await bridge.token(user)
    reader, writer = await asyncio.open_connection("127.0.0.1", bridge.worker.port, limit=1024)
    writer.write(
        f"GET {frames.PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        f"Sec-WebSocket-Protocol: {frames.SUBPROTOCOL}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    ping, mask = b'{"type":"ping","n":12345678}', b"\x00" * 4
    said = frames.encode(hello()).encode()
    writer.write(b"\x81\xfe" + len(said).to_bytes(2) + mask + said)
    with contextlib.suppress(ConnectionError):
        for _ in range(600):
            writer.write((b"\x81" + bytes([0x80 | len(ping)]) + mask + ping) * 1000)
            async with asyncio.timeout(30):
                await writer.drain()
            if writer.transport.is_closing():
                break
        await a_job_is_done(bridge, neighbour)

    async def is_closed() -> bool:
        writer.write(b"\x89\x80" + mask)  # a reset shows itself at the next write
        return writer.transport.is_closing()

    with contextlib.suppress(ConnectionError):
        await eventually(is_closed, 40)
    writer.close()
    # It reads no close code either, so the worker is asked for the reason.
    await eventually(lambda: bridge.logged("session_ended", user=user))
    assert [line["reason"] for line in bridge.logged("session_ended", user=user)] == ["too_slow"]
    await bridge.machine(user, token=token)


async def test_a_machine_that_asks_faster_than_it_is_answered_is_cut_off_and_told(bridge: Bridge, user: UserId) -> None:
    """Frames that wait are bounded: pings that come at once, more than may wait, end their own session."""
    peer = await bridge.machine(user)
    ping = b'{"type":"ping","n":12345678}'
    async with bridge.counts_close("too_slow"):
        masked = b"\x81" + bytes([0x80 | len(ping)]) + b"\x00" * 4 + ping
        peer.socket.transport.write(masked * 4 * SEND_QUEUE_MAX)
        assert await peer.closed() == (frames.Close.TOO_SLOW, "frames wait too long")


async def test_a_hundred_machines_that_vanish_at_once_leave_the_neighbour_alone(
    bridge: Bridge, neighbour: UserId
) -> None:
    """A network that breaks down; each of them ends as reconnecting."""
    users = [new_user() for _ in range(100)]
    peers = []
    for chunk in range(0, 100, 20):
        peers += await asyncio.gather(*(bridge.machine(user) for user in users[chunk : chunk + 20]))
    for peer in peers:
        peer.break_off()
    await a_job_is_done(bridge, neighbour)

    async def all_reconnecting() -> bool:
        states = [(await bridge.held(user).presence()).get("state") for user in users]
        return set(states) == {"reconnecting"}

    await eventually(all_reconnecting)
