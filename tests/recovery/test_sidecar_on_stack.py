"""The sidecar's truth on the whole product: real gateways, workers, stores and sidecars, and a cut in mid-job."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import redis.asyncio
import sidecar_tools
from job_stores import new_user
from support import eventually

from common.ids import UserId
from harness.servers import Servers
from harness.sidecars import Sidecar
from harness.stack import Stack, Worker
from towline.client import Client, outcome_of
from towline.wire import api

# Presence, tokens and acknowledgements are looked after this often.
HEARTBEAT_S = 1.0


class World:
    """A stack with one gateway and two workers, and what its machines did."""

    def __init__(self, stack: Stack, client: Client, directory: Path, postgres_url: str) -> None:
        self.stack = stack
        self.client = client
        self.directory = directory
        self.postgres_url = postgres_url
        self.executions = directory / "executions"
        self.executions.touch(mode=0o666)

    async def machine(self, user: str, *, connected: bool = True, **env: str) -> Sidecar:
        """A sidecar with the tools of these tests."""
        env = {"EXECUTIONS": str(self.executions), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env}
        return await self.stack.add_sidecar(user, tools=[sidecar_tools.__file__], env=env, connected=connected)

    async def submit(self, user: str, tool: str, what: str, **how: object) -> api.Job:
        """A job whose execution is noted as `{tool} {what}`; the key is the same."""
        args = {"button" if tool == "click" else "at": what, "seconds": how.pop("seconds", 0)}
        return await self.client.submit(user, tool, args, idempotency_key=f"{user}-{what}", **how)  # type: ignore[arg-type]

    def runs(self, line: str) -> int:
        """How often that was done."""
        return Counter(self.executions.read_text().splitlines())[line]

    async def began(self, line: str) -> None:
        await eventually(lambda: self.runs(line) == 1)

    async def ended(self, job: api.Job, within_s: float = 20) -> tuple[str, str]:
        """How the job ended, and with which code."""

        async def terminal() -> api.Job | None:
            # The wait of one call ends when the machine goes offline; the job goes on.
            now = await self.client.read_job(job.job)
            return now if now.terminal else None

        ended = await eventually(terminal, within_s)
        outcome = outcome_of(ended)
        code = "" if outcome is None or not isinstance(outcome.error, api.Failure) else outcome.error.code
        return ended.state, code

    async def holder(self, machine: Sidecar) -> Worker:
        """The worker that has the machine's socket."""
        session = str(events(machine, "connected")[-1]["session"])
        return await eventually(lambda: next((each for each in self.stack.workers if session in each.read_log()), None))

    async def has_state(self, user: str, state: str) -> bool:
        return (await self.client.presence(user)).state == state


def events(sidecar: Sidecar, name: str, **fields: object) -> list[dict[str, object]]:
    """Lines of a sidecar's log."""
    lines = [json.loads(line) for line in sidecar.read_log().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name and fields.items() <= line.items()]


@pytest.fixture(scope="module")
async def world(servers: Servers, state_directory: Path, postgres_url: str) -> AsyncIterator[World]:
    redis_url = urlunsplit(urlsplit(servers.redis_url)._replace(path="/13"))
    async with redis.asyncio.Redis.from_url(redis_url) as store:
        await store.flushdb()
    directory = state_directory / "sidecar-world"
    async with Stack(
        directory / "stack", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as stack:
        gateway, *_ = await asyncio.gather(stack.add_gateway(), stack.add_worker(), stack.add_worker())
        async with Client(gateway.url, stack.api_key) as client:
            yield World(stack, client, directory, postgres_url)


@pytest.fixture
def user() -> UserId:
    return new_user()


# ---- cuts in mid-job


async def test_the_worker_that_holds_the_socket_is_killed_in_mid_job(world: World, user: UserId) -> None:
    """Not sent again: the next hello lists the job, and it is answered by job on the next socket. It ran once."""
    machine = await world.machine(user)
    job = await world.submit(user, "click", "survives", seconds=2.5)
    await world.began("click survives")
    worker = await world.holder(machine)
    worker.kill()
    try:
        assert await world.ended(job) == ("completed", "")
    finally:
        await worker.start_ready()
    assert world.runs("click survives") == 1
    assert len(events(machine, "job_delivered", job=job.job)) == 1
    assert len(events(machine, "connected")) == 2
    await machine.stop()


async def test_the_sidecar_is_killed_in_mid_action(world: World, user: UserId) -> None:
    """Hinted runs again; of any other nobody knows how far it came, and it does not."""
    other = new_user()
    acting, looking = await asyncio.gather(world.machine(user), world.machine(other))
    action = await world.submit(user, "click", "cut-off", seconds=30)
    look = await world.submit(other, "look", "again", seconds=1)
    await asyncio.gather(world.began("click cut-off"), world.began("look again"))
    for machine in (acting, looking):
        machine.kill()
    await asyncio.gather(acting.start(), looking.start())
    assert await world.ended(action) == ("unknown", "interrupted")
    assert await world.ended(look) == ("completed", "")
    assert (world.runs("click cut-off"), world.runs("look again")) == (1, 2)
    again = await world.submit(user, "click", "cut-off", seconds=30)
    assert (again.state, again.replayed) == ("unknown", True)
    await asyncio.gather(acting.stop(), looking.stop())


@pytest.mark.parametrize("policy", ["unknown", "wait"])
async def test_a_job_begun_on_one_machine_is_never_sent_to_another(world: World, user: UserId, policy: str) -> None:
    """The laptop dies in mid-action and the user turns to another one: told at once, or when the first one is back."""
    first = await world.machine(user)
    what = f"begun-{policy}"
    job = await world.submit(user, "click", what, seconds=60, on_machine_change=policy)
    await world.began(f"click {what}")
    first.kill()
    await eventually(lambda: world.has_state(user, "offline"), 15)
    second = await world.machine(user)
    if policy == "unknown":
        assert await world.ended(job) == ("unknown", "machine-changed")
    else:
        # It waits, and holds up nobody.
        after = await world.submit(user, "click", "after-it", wait_s=15)
        assert after.state == "completed"
        assert not (await world.client.read_job(job.job)).terminal
        await second.stop()
        await eventually(lambda: world.has_state(user, "offline"), 15)
        await first.start()
        assert await world.ended(job) == ("unknown", "interrupted")
        await first.stop()
    assert events(second, "job_delivered", job=job.job) == []
    assert world.runs(f"click {what}") == 1
    await second.stop()


async def test_a_job_for_an_offline_machine_waits_for_it(world: World, user: UserId) -> None:
    """`if_offline=queue`: accepted, queued, and run once the machine is there. (It must have been there before.)"""
    machine = await world.machine(user)
    await machine.stop()
    await eventually(lambda: world.has_state(user, "offline"), 15)
    job = await world.submit(user, "click", "queued", if_offline="queue")
    assert (job.state, job.terminal) == ("queued", False)
    await machine.start()
    assert await world.ended(job) == ("completed", "")
    assert world.runs("click queued") == 1
    await machine.stop()


# ---- tokens


async def _token_file(world: World, user: UserId, ttl_s: float | None) -> tuple[Path, str]:
    """A token in a file of the user's own, and its id."""
    minted = await world.client.mint_machine_token(user, ttl_s=ttl_s)
    file = world.directory / f"token-{user}"
    file.touch(mode=0o600)
    file.write_text(minted.token)
    return file, minted.token_id


async def test_a_token_is_renewed_in_mid_session_and_used_at_the_next_dial(world: World, user: UserId) -> None:
    """After four fifths of its life; long after its end the machine is still welcome, under the new one alone."""
    file, _ = await _token_file(world, user, ttl_s=6)
    first = file.read_text()
    machine = await world.machine(user, TOWLINE_TOKEN_FILE=str(file))
    await eventually(lambda: file.read_text() != first, 12)
    assert file.stat().st_mode & 0o777 == 0o600
    # The old one ends; meanwhile the new one is renewed in turn.
    second = file.read_text()
    await eventually(lambda: file.read_text() != second, 12)
    assert await world.has_state(user, "online")
    worker = await world.holder(machine)
    worker.kill()
    try:
        job = await world.submit(user, "click", "renewed", if_offline="queue")
        assert await world.ended(job) == ("completed", "")
    finally:
        await worker.start_ready()
    assert not events(machine, "needs_token")
    log = machine.read_log()
    assert not any(token.strip() in log for token in (first, second, file.read_text()))
    await machine.stop()


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_token_that_ends_in_mid_session_asks_for_another_and_needs_no_restart(
    world: World, user: UserId, how: str
) -> None:
    """The socket is closed within a heartbeat or so; the running job goes on, and is answered under the new token."""
    file, token_id = await _token_file(world, user, ttl_s=3600)
    machine = await world.machine(user, TOWLINE_TOKEN_FILE=str(file))
    job = await world.submit(user, "click", f"outlives-{how}", seconds=3)
    await world.began(f"click outlives-{how}")
    if how == "revoked":
        await world.client.revoke_machine_token(user, token_id)
    else:
        async with await psycopg.AsyncConnection.connect(world.postgres_url, autocommit=True) as connection:
            await connection.execute("update machine_tokens set expires_at = now() where token_id = %s", [token_id])
    await eventually(lambda: events(machine, "needs_token"), 5 * HEARTBEAT_S)
    assert events(machine, "disconnected")[0]["code"] == 4500
    await eventually(lambda: world.has_state(user, "offline"), 15)
    assert len(events(machine, "connected")) == 1

    fresh = await world.client.mint_machine_token(user)
    file.write_text(fresh.token)
    assert await world.ended(job) == ("completed", "")
    assert world.runs(f"click outlives-{how}") == 1
    await machine.stop()
