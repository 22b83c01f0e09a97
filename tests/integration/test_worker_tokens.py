"""Tokens over the socket: a machine that missed its new one is offered another; none is offered twice for nothing."""

from bridge import Bridge
from support import eventually
from token_ages import grow_old

from common.ids import UserId
from towline.wire import frames

LIFE_S = 1000.0


async def test_a_machine_that_missed_its_new_token_is_offered_another(brisk_bridge: Bridge, user: UserId) -> None:
    """The socket is cut as the first one is on its way; the second one outlives the value that the machine had.

    What was missed is good as well. A session that has been sent one is left alone: a second heartbeat brings nothing.
    """
    bridge = brisk_bridge
    row, value = await bridge.tokens.add_machine_token(user, "test", LIFE_S)
    await grow_old(bridge.postgres_url, row.token_id, 0.9 * LIFE_S)
    peer = await bridge.machine(user, token=value)
    missed = await peer.next(frames.Token)
    peer.break_off()

    again = await bridge.machine(user, token=value)
    offered = await again.next(frames.Token)
    assert offered.token != missed.token
    pings = len(again.received)
    await eventually(lambda: len(again.received) >= pings + 3)  # a heartbeat each
    assert sum(isinstance(frame, frames.Token) for frame in again.received) == 1

    await grow_old(bridge.postgres_url, row.token_id, 0.2 * LIFE_S)
    for good in (offered.token, missed.token):
        assert await bridge.tokens.mint_session(good) is not None
    assert await bridge.tokens.mint_session(value) is None
    newest = await bridge.machine(user, token=offered.token)
    await bridge.fence(user, newest)
    assert not any(isinstance(frame, frames.Token) for frame in newest.received)
    assert not {offered.token, missed.token} & set(bridge.worker.read_log().replace('"', " ").split())
