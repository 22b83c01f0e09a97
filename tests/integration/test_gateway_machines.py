"""Machines over HTTP: presence as a fact, probes, catalogues, and tokens."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from gateway_door import HEARTBEAT_S, Door, open_door
from support import eventually

from common.store.tokens import Tokens
from harness.servers import Servers
from towline.wire.frames import Hints


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """Two gateways."""
    async with open_door(servers, postgres_url, state_directory / "machines", gateways=2) as opened:
        yield opened


async def presence(door: Door, user: str, *, gateway: int = 0, probe: bool = False) -> dict[str, Any]:
    """What one gateway says of a user's machine."""
    async with door.client(door.stack.gateways[gateway]) as client:
        answer = await client.get(f"/v1/users/{user}/presence{'?probe=true' if probe else ''}")
    assert answer.status_code == 200
    said: dict[str, Any] = answer.json()
    return said


async def test_presence_is_the_same_on_every_replica_through_a_machines_life(door: Door) -> None:
    """Offline, online, reconnecting, online again, gone without a word, gone with one."""

    async def both(state: str) -> bool:
        said = [await presence(door, "life", gateway=n) for n in (0, 1)]
        return said[0] == said[1] and said[0]["state"] == state

    assert await both("offline")
    machine = door.machine("life")
    async with machine:
        said = await presence(door, "life")
        assert (said["state"], said["machine"], said["worker"]) == ("online", machine.machine, machine.worker)
        assert (said["busy"], said["queued"]) == (False, 0)
        assert datetime.now(UTC) - datetime.fromisoformat(said["last_seen_at"]) < timedelta(seconds=5)
        assert said["since"] <= said["last_seen_at"]
        async with door.client() as client:
            await client.post("/v1/users/life/jobs", json={"name": "read"}, headers={"idempotency-key": "k"})
        assert (await presence(door, "life"))["queued"] == 1
        await machine.leave(grace_ms=60_000)
        assert await both("reconnecting")
    async with door.machine("life") as machine:
        assert await both("online")
        await machine.vanish()
        vanished_at = time.monotonic()
        await eventually(lambda: both("offline"), within_s=4 * HEARTBEAT_S + 2)
        assert time.monotonic() - vanished_at > HEARTBEAT_S  # a blip is not a disconnect
    async with door.machine("life") as machine:
        await machine.leave(grace_ms=None)
        assert await both("offline")


async def test_nobody_is_told_offline_by_a_redis_that_began_anew(door: Door) -> None:
    """Two heartbeats long, on every replica, it is `unknown`; and at the door 503, unless the caller queues."""
    async with door.machine("anew"):
        await door.commands.flushdb()
        said = [await presence(door, "anew", gateway=n) for n in (0, 1)]
        assert {each["state"] for each in said} <= {"unknown", "online"}
        assert {(await presence(door, "absent"))["state"]} == {"unknown"}
        async with door.client() as client:
            answer = await client.post("/v1/users/absent/jobs", json={"name": "read"}, headers={"idempotency-key": "k"})
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/presence-unknown")
            assert int(answer.headers["retry-after"]) >= 1
            answer = await client.post(
                "/v1/users/absent/jobs", json={"name": "read", "if_offline": "queue"}, headers={"idempotency-key": "k"}
            )
            assert answer.status_code == 202

        async def settled() -> bool:
            return [(await presence(door, user))["state"] for user in ("anew", "absent")] == ["online", "offline"]

        await eventually(settled, within_s=4 * HEARTBEAT_S + 2)


async def test_a_probe_is_a_round_trip(door: Door) -> None:
    """Asked over one gateway, answered to that one; with what the machine says of itself right now."""
    async with door.machine("probe") as machine:
        machine.serve()
        for gateway in (0, 1):
            said = await presence(door, "probe", gateway=gateway, probe=True)
            assert (said["state"], said["probed"], said["busy"]) == ("online", True, True)
            assert 0 < said["rtt_ms"] < 1000
        assert "probed" not in await presence(door, "probe")


async def test_a_probe_of_a_machine_that_does_not_answer_ends_in_time(door: Door) -> None:
    """Presence is what is known, corroborated by nothing; many at once wait no longer than one."""
    async with door.machine("mute") as machine:
        began = time.monotonic()
        said = await asyncio.gather(*(presence(door, "mute", probe=True) for _ in range(20)))
        assert 2.9 < time.monotonic() - began < 10  # one after the other they would take a minute
        assert {(each["state"], each["probed"], each["rtt_ms"]) for each in said} == {("online", False, None)}
        await eventually(lambda: len([note for note in machine.notes if note["note"] == "probe"]) == 20)
    absent = await presence(door, "nobody", probe=True)
    assert (absent["state"], absent["probed"], absent["rtt_ms"]) == ("offline", False, None)


async def test_the_catalogue_outlives_the_connection(door: Door) -> None:
    """As the machine announced it last."""
    hints = {"look": Hints(read_only=True), "click": Hints(destructive=True)}
    async with door.client() as client:
        empty = (await client.get("/v1/users/tools/tools")).json()
        assert empty == {"machine": None, "name": None, "version": None, "announced_at": None, "tools": []}
        async with door.machine("tools", **hints) as machine:
            await machine.leave(grace_ms=None)
        said = (await client.get("/v1/users/tools/tools")).json()
    assert (said["machine"], said["name"], said["version"]) == (machine.machine, "laptop", "1")
    assert {tool["name"]: tool["hints"] for tool in said["tools"]} == {
        "look": {"read_only": True},
        "click": {"destructive": True},
    }


async def test_machine_tokens_are_minted_listed_and_revoked(door: Door) -> None:
    """The value is shown once and good for one user's sessions until it is revoked; its worker is told to close."""
    tokens = Tokens(door.postgres)
    async with door.client() as client, door.machine("owner") as machine:
        path = "/v1/users/owner/machine-tokens"
        minted = (await client.post(path, json={"name": "work laptop", "ttl_s": 3600})).json()
        value = minted.pop("token")
        lasts = datetime.fromisoformat(minted["expires_at"]) - datetime.fromisoformat(minted["created_at"])
        assert lasts == timedelta(seconds=3600)
        session = await tokens.mint_session(value)
        assert session is not None
        assert session.user == "owner"
        page = (await client.get(f"{path}?limit=1")).json()
        assert page["items"] == [minted]
        rest = (await client.get(f"{path}?cursor={page['next_cursor']}")).json()
        assert ([item["token_id"] for item in rest["items"]], rest["next_cursor"]) == ([machine.token_id], None)
        for _ in range(2):
            revoked = await client.delete(f"{path}/{minted['token_id']}")
            assert (revoked.status_code, revoked.content) == (204, b"")
        assert await tokens.mint_session(value) is None
        await eventually(lambda: [note for note in machine.notes if note["note"] == "close"])
        closed = next(note for note in machine.notes if note["note"] == "close")
        assert (closed["user"], closed["token_id"]) == ("owner", minted["token_id"])
        assert (await client.get(f"{path}?limit=1")).json()["items"][0]["revoked_at"]
