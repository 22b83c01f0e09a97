"""Following runs with the client and the command, through a real gateway and relay, from a stand-in agent."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from command import towline
from support import eventually

from common.ids import new_id
from harness.agent.server import Agent
from harness.agent.stream import Script
from harness.stack import Stack
from towline.client import Break, Client, End, RunEvent, RunItem, SourceFollow
from towline.wire import events

FAR_S = 60.0
EVENTS = 150


@pytest.fixture
async def stack(tmp_path: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway and a relay."""
    async with Stack(tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url) as stack:
        await stack.add_gateway()
        await stack.add_relay()
        yield stack


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    """An agent whose streams are paced: a hundred events a second, then `result`."""
    async with Agent() as agent:
        yield agent


async def start(client: Client, agent: Agent, run: str) -> None:
    agent.add(run, Script(rate=100, total=EVENTS))
    await client.follow_run(run, [SourceFollow("agent", agent.url(run), "ids")])


def uids(items: list[RunItem], run: str) -> list[int]:
    """Of the agent's events, the last of which has one id more than it was asked for."""
    return [int(item.uid) for item in items if isinstance(item, RunEvent) and item.run == run and item.uid]


@pytest.mark.parametrize("several", [False, True], ids=["one run", "several on one connection"])
async def test_nothing_is_missed_and_nothing_comes_twice_while_the_gateway_is_killed(
    stack: Stack, agent: Agent, several: bool
) -> None:
    gateway = stack.gateways[0]
    runs = [new_id() for _ in range(2 if several else 1)]
    items: list[RunItem] = []
    breaks: list[Break] = []
    async with asyncio.timeout(FAR_S), Client(gateway.url, stack.api_key) as client, asyncio.TaskGroup() as group:
        for run in runs:
            await start(client, agent, run)

        async def follow() -> None:
            async for item in client.events(runs if several else runs[0], on_break=breaks.append):
                items.append(item)  # noqa: PERF401 (the other task watches it grow)

        group.create_task(follow())
        await eventually(lambda: len(items) > 20, FAR_S)
        gateway.kill()
        await gateway.stop()
        await eventually(lambda: breaks, FAR_S)
        await gateway.start_ready()

    for run in runs:
        assert uids(items, run) == list(range(1, EVENTS + 2))
    assert {item.run: item.state for item in items if isinstance(item, End)} == dict.fromkeys(runs, "completed")
    own = [item.type for item in items if isinstance(item, RunEvent) and events.is_own(item.type)]
    assert own.count(events.RUN_ENDED) == len(runs)


async def test_a_run_by_the_command(stack: Stack, agent: Agent) -> None:
    shell = {"TOWLINE_URL": stack.gateways[0].url, "TOWLINE_API_KEY": stack.api_key}
    a, b = new_id(), new_id()
    agent.add(a, Script(rate=100, total=30))
    agent.add(b, Script(rate=0))
    for run in (a, b):
        started = await towline(
            "runs", "start", run, "--source", f"agent={agent.url(run)}", "--resume", "ids", "--json", **shell
        )
        assert started.code == 0, started.err
        assert started.document()["run"] == run

    followed = await towline("runs", "follow", a, "--json", **shell)
    assert followed.code == 0, followed.err
    lines = followed.lines()
    assert [line["uid"] for line in lines if line.get("source")][:31] == [str(n) for n in range(1, 32)]
    assert lines[-1] == {"end": {"run": a, "state": "completed"}}
    last_id = lines[-2]["id"]
    again = await towline("runs", "follow", a, "--last-event-id", last_id, **shell)
    assert (again.code, again.out) == (0, "")

    shown = await towline("runs", "show", b, **shell)
    assert shown.code == 0
    assert agent.url(b) in shown.out
    stopped = await towline("runs", "stop", b, **shell)
    assert stopped.code == 0
    ended = await towline("runs", "follow", b, **shell)
    assert ended.code == 1
    assert ended.out.splitlines()[-1] == "the run has ended: stopped"
    listed = await towline("runs", "list", "--limit", "500", "--json", **shell)
    assert {line["run"]: line["state"] for line in listed.lines()}.items() >= {a: "completed", b: "stopped"}.items()
    missing = await towline("runs", "show", new_id(), **shell)
    assert missing.code == 3
