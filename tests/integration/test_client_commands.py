"""`towline jobs`, `machines` and `tokens` against a real gateway: what people and scripts get, and the exit codes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from command import towline
from played_machine import PlayedMachine

from common.ids import new_id
from common.store.postgres import open_postgres
from common.store.tokens import Tokens
from harness.stack import Stack

HEARTBEAT_S = 0.5
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def gateway(tmp_path: Path, postgres_url: str, redis_url: str) -> AsyncIterator[dict[str, str]]:
    """The variables of a shell that may use a running gateway."""
    async with Stack(
        tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as stack:
        await stack.add_gateway()
        yield {"TOWLINE_URL": stack.gateways[0].url, "TOWLINE_API_KEY": stack.api_key}


@pytest.fixture
async def machine(gateway: dict[str, str], postgres_url: str, redis_url: str) -> AsyncIterator[PlayedMachine]:
    tools = {
        "echo": lambda entry: ("completed", {"result": entry.args}),
        "fail": lambda _: ("failed", {"error": {"code": "tool-error", "message": "no", "retryable": False}}),
        "hang": lambda _: None,
    }
    async with PlayedMachine(
        "alice", tools, postgres_url=postgres_url, redis_url=redis_url, heartbeat_s=HEARTBEAT_S
    ) as machine:
        yield machine


async def test_jobs_for_people(gateway: dict[str, str], machine: PlayedMachine) -> None:
    """The result on standard output, the key that would get it again on standard error."""
    submitted = await towline("jobs", "submit", "alice", "echo", "--arg", "value=hello", "--arg", "n=5", **gateway)
    assert (submitted.code, submitted.err.split()[0]) == (0, "key")
    assert "completed" in submitted.out
    assert '"value": "hello"' in submitted.out
    assert '"n": 5' in submitted.out
    listed = await towline("jobs", "list", "alice", **gateway)
    assert listed.code == 0
    assert machine.entries[0].job in listed.out


async def test_jobs_for_programs(gateway: dict[str, str], machine: PlayedMachine) -> None:
    """One JSON document; the same key again is a replay with the same outcome."""
    arguments = ("jobs", "submit", "alice", "echo", "--args", '{"value": [1]}', "--key", "order-17", "--json")
    first, again = [(await towline(*arguments, **gateway)) for _ in range(2)]
    assert (first.code, first.err, again.code) == (0, "", 0)
    assert first.document()["idempotency_key"] == "order-17"
    assert (first.document()["replayed"], again.document()["replayed"]) == (False, True)
    assert first.document()["outcome"] == again.document()["outcome"] == {"result": {"value": [1]}}
    job = first.document()["job"]
    assert (await towline("jobs", "get", job, "--json", **gateway)).document()["state"] == "completed"
    listed = await towline("jobs", "list", "alice", "--key", "order-17", "--json", **gateway)
    assert [item["job"] for item in listed.lines()] == [job]


async def test_exit_codes_say_how_a_job_ended(gateway: dict[str, str], machine: PlayedMachine) -> None:
    failed = await towline("jobs", "submit", "alice", "fail", **gateway)
    assert (failed.code, "tool-error: no" in failed.out) == (1, True)
    open_still = await towline("jobs", "submit", "alice", "hang", "--wait", "0.2", "--json", **gateway)
    assert open_still.code == 5
    job = open_still.document()["job"]
    assert (await towline("jobs", "get", job, **gateway)).code == 0
    assert (await towline("jobs", "get", job, "--wait", "0.2", **gateway)).code == 5
    cancelled = await towline("jobs", "cancel", job, "--json", **gateway)
    assert (cancelled.code, cancelled.document()["state"]) == (0, "cancelled")
    assert (await towline("jobs", "get", job, **gateway)).code == 1


async def test_exit_codes_say_who_is_to_blame(gateway: dict[str, str]) -> None:
    """Each failure is one line on standard error and nothing on standard output."""

    async def code(*arguments: str, **variables: str) -> int:
        ended = await towline(*arguments, **{**gateway, **variables})
        assert (ended.out, len(ended.err.splitlines())) == ("", 1), ended
        assert gateway["TOWLINE_API_KEY"] not in ended.err
        return ended.code

    assert await code("jobs", "get", "../x") == 2
    assert await code("jobs", "get", "x", TOWLINE_API_KEY="") == 2
    assert await code("jobs", "get", "x", TOWLINE_URL="ws://127.0.0.1:1") == 2
    assert await code("jobs", "get", new_id()) == 3
    assert await code("jobs", "get", "x", TOWLINE_API_KEY="tlk_wrong") == 3
    assert await code("tokens", "revoke", "alice", new_id()) == 3
    assert await code("machines", "show", "alice", TOWLINE_URL=NOWHERE) == 4
    assert (await towline("jobs", "submit", "alice", "echo", "--arg", "novalue", **gateway)).code == 2
    assert (await towline("jobs", "no-such-command", **gateway)).code == 2


async def test_a_proxy_that_has_no_gateway_behind_it_is_unavailable(gateway: dict[str, str]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        ended = await towline("jobs", "list", "alice", **{**gateway, "TOWLINE_URL": url})
    assert (ended.code, ended.out, ended.err) == (4, "", "towline: Bad Gateway (502)\n")


async def test_the_key_is_in_no_output(gateway: dict[str, str]) -> None:
    for ended in (
        await towline("machines", "show", "alice", **gateway),
        await towline("machines", "show", "alice", "--json", **gateway),
        await towline("machines", "show", "alice", "--help", **gateway),
    ):
        assert gateway["TOWLINE_API_KEY"] not in ended.out + ended.err


async def test_machines(gateway: dict[str, str], machine: PlayedMachine) -> None:
    shown = await towline("machines", "show", "alice", **gateway)
    assert (shown.code, "online" in shown.out, "played" in shown.out) == (0, True, True)
    tools = await towline("machines", "tools", "alice", **gateway)
    assert (tools.code, "value, loud?" in tools.out, "read-only" in tools.out) == (0, True, True)
    assert (await towline("machines", "tools", "alice", "--json", **gateway)).document()["machine"] == "played"
    probed = await towline("machines", "probe", "alice", **gateway)
    assert (probed.code, "answered in" in probed.out) == (0, True)
    absent = await towline("machines", "probe", "nobody", "--json", **gateway)
    assert (absent.code, absent.document()["probed"]) == (1, False)


async def test_tokens(gateway: dict[str, str], postgres_url: str) -> None:
    """The value alone is on standard output, so that it can go into a file."""
    created = await towline("tokens", "create", "bob", "--name", "laptop", "--ttl-s", "3600", **gateway)
    assert created.code == 0
    async with open_postgres(postgres_url) as postgres:
        session = await Tokens(postgres).mint_session(created.out.removesuffix("\n"))
    assert session is not None
    assert session.user == "bob"
    assert (await towline("tokens", "revoke", "bob", session.token_id, **gateway)).code == 0
    (listed,) = (await towline("tokens", "list", "bob", "--json", **gateway)).lines()
    assert (listed["token_id"], listed["name"], bool(listed["revoked_at"])) == (session.token_id, "laptop", True)
    assert "token" not in listed
