"""The client against a real gateway: every call, and what it makes of the answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import UNSET
from played_machine import PlayedMachine
from support import eventually

from harness.stack import Stack
from towline import transport
from towline.client import ApiProblem, Client, outcome_of

HEARTBEAT_S = 0.5


@pytest.fixture
async def stack(tmp_path: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Stack]:
    async with Stack(
        tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as stack:
        await stack.add_gateway()
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.gateways[0].url, stack.api_key, timeout_s=10) as client:
        yield client


@pytest.fixture
async def machine(stack: Stack, postgres_url: str, redis_url: str) -> AsyncIterator[PlayedMachine]:
    """Alice's machine: `echo` gives its argument back, `fail` fails, `hang` never ends."""
    tools = {
        "echo": lambda entry: ("completed", {"result": entry.args}),
        "fail": lambda _: ("failed", {"error": {"code": "tool-error", "message": "no", "retryable": True}}),
        "hang": lambda _: None,
    }
    async with PlayedMachine(
        "alice", tools, postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as machine:
        yield machine


@pytest.fixture
def key() -> str:
    """An idempotency key of this test alone: the tests of a module share a database."""
    return str(uuid.uuid4())


async def test_a_job_from_submission_to_outcome_and_again(client: Client, machine: PlayedMachine, key: str) -> None:
    """The second submission of a key is answered with the first one's outcome, and says so."""
    job = await client.submit("alice", "echo", {"value": "é"}, idempotency_key=key, wait_s=10)
    assert (job.user, job.name, job.state, job.replayed) == ("alice", "echo", "completed", False)
    assert outcome_of(job).result == {"value": "é"}

    again = await client.submit("alice", "echo", {"value": "other"}, idempotency_key=key)
    assert (again.job, again.replayed, again.payload_matches) == (job.job, True, False)
    assert bytes(again.outcome) == bytes(job.outcome)
    assert len(machine.entries) == 1
    read = await client.read_job(job.job)
    assert (read.outcome, read.ended_at) == (job.outcome, job.ended_at)


async def test_a_failed_job_is_no_error_of_the_call(client: Client, machine: PlayedMachine, key: str) -> None:
    job = await client.submit("alice", "fail", {"value": 1}, idempotency_key=key, wait_s=10)
    outcome = outcome_of(job)
    assert (job.state, outcome.error.code, outcome.error.retryable) == ("failed", "tool-error", True)


async def test_a_queued_job_is_cancelled_at_once(client: Client, key: str) -> None:
    job = await client.submit("nobody", "echo", idempotency_key=key, if_offline="queue")
    assert (await client.cancel_job(job.job)).state == "cancelled"


async def test_a_wait_ends_by_itself(client: Client, machine: PlayedMachine, key: str) -> None:
    job = await client.submit("alice", "hang", {"value": 1}, idempotency_key=key, wait_s=0.3)
    assert not job.terminal
    assert not (await client.read_job(job.job, wait_s=0.3)).terminal


async def test_a_wait_ends_when_the_machine_goes(client: Client, machine: PlayedMachine, key: str) -> None:
    """Long before the time that the caller is ready to wait."""
    async with asyncio.timeout(30):
        submission = asyncio.create_task(client.submit("alice", "hang", {"value": 1}, idempotency_key=key, wait_s=60))
        await eventually(lambda: machine.entries)
        await machine.go()
        assert (await submission).machine == "offline"


async def test_an_offline_machine_is_a_refusal(client: Client, key: str) -> None:
    async def is_refused() -> ApiProblem | None:
        try:
            await client.submit("nobody", "echo", idempotency_key=key)
        except ApiProblem as problem:
            return problem if problem.status == 409 else None
        return None

    problem = await eventually(is_refused)
    assert problem is not None
    assert problem.slug == "machine-offline"
    assert "no machine" in problem.detail


async def test_lists_go_on_from_page_to_page(client: Client) -> None:
    for n in range(60):
        await client.submit("bob", "echo", idempotency_key=f"k{n}", if_offline="queue")
    all_jobs = [job.job async for job in client.list_jobs("bob")]
    assert len(all_jobs) == 60
    assert all_jobs == sorted(all_jobs, reverse=True)
    assert [job.job async for job in client.list_jobs("bob", limit=55)] == all_jobs[:55]
    assert [job.job async for job in client.list_jobs("bob", limit=3)] == all_jobs[:3]
    assert [job async for job in client.list_jobs("bob", state="completed")] == []
    assert len([job async for job in client.list_jobs("bob", idempotency_key="k7")]) == 1


async def test_presence_probe_and_catalogue(client: Client, machine: PlayedMachine) -> None:
    presence = await client.presence("alice")
    assert (presence.state, presence.machine, presence.probed) == ("online", "played", UNSET)
    probed = await client.presence("alice", probe=True)
    assert (probed.probed, isinstance(probed.rtt_ms, float)) == (True, True)
    catalogue = await client.tools("alice")
    assert [tool.name for tool in catalogue.tools] == ["echo", "fail", "hang"]
    assert catalogue.tools[0].hints.read_only
    assert (await client.tools("nobody")).machine is None
    assert (await client.presence("nobody", probe=True)).probed is False


async def test_machine_tokens_are_minted_listed_and_revoked(client: Client) -> None:
    minted = await client.mint_machine_token("carol", name="laptop", ttl_s=3600)
    assert minted.token.startswith("tlm_")
    (listed,) = [token async for token in client.list_machine_tokens("carol")]
    assert (listed.token_id, listed.name, listed.revoked_at) == (minted.token_id, "laptop", None)
    await client.revoke_machine_token("carol", minted.token_id)
    (listed,) = [token async for token in client.list_machine_tokens("carol")]
    assert listed.revoked_at is not None
    with pytest.raises(ApiProblem) as raised:
        await client.revoke_machine_token("dave", minted.token_id)
    assert raised.value.status == 404


async def test_a_wrong_key_is_a_refusal(stack: Stack) -> None:
    async with Client(stack.gateways[0].url, "tlk_wrong") as client:
        with pytest.raises(ApiProblem) as raised:
            await client.presence("alice")
    assert raised.value.status == 401


async def test_a_wait_outlives_the_gateway_that_was_asked(
    stack: Stack, client: Client, postgres_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """It is killed while the caller waits and comes back on its port: the same key gets the one outcome."""
    monkeypatch.setattr(transport, "ATTEMPTS_MAX", 100)
    monkeypatch.setattr(transport, "PAUSE_MAX_S", 0.2)
    (gateway,) = stack.gateways
    submission = asyncio.create_task(
        client.submit("erin", "echo", {"value": 1}, idempotency_key=key, if_offline="queue", wait_s=60)
    )

    async def is_accepted() -> bool:
        async with Client(gateway.url, stack.api_key) as other:
            return bool([job async for job in other.list_jobs("erin")])

    await eventually(is_accepted)
    gateway.kill()
    await gateway.wait(within_s=5)
    await gateway.start_ready()
    tools = {"echo": lambda entry: ("completed", {"result": entry.args})}
    async with PlayedMachine(
        "erin", tools, postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as machine:
        job = await submission
    assert (job.state, job.replayed) == ("completed", True)
    assert len(machine.entries) == 1
