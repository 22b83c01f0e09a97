"""Agents: the newest definition counts, and secrets go nowhere else than where they were given for."""

import asyncio

import pytest
from turn_stores import new_agent

from common.ids import AgentId, new_id
from common.store.agents import Agents
from common.store.postgres import Postgres


@pytest.fixture
async def agents(postgres: Postgres) -> Agents:
    return Agents(postgres)


async def test_an_agent_is_what_was_given_last(agents: Agents) -> None:
    """All of it; no tools are not all tools."""
    first = new_agent(kind="http", url="https://a.example/answer", tools=["echo"], instructions="be brief")
    agent, created = await agents.put(first)
    assert created
    assert agent == await agents.read(first.agent)
    assert (agent.kind, agent.url, agent.tools, agent.instructions) == (
        "http",
        "https://a.example/answer",
        ["echo"],
        "be brief",
    )
    second = new_agent(agent=first.agent, kind="openai", model="large", tools=[], turn_cap_s=30)
    changed, created = await agents.put(second)
    assert not created
    assert (changed.kind, changed.url, changed.model, changed.tools, changed.turn_cap_s) == (
        "openai",
        None,
        "large",
        [],
        30,
    )
    assert (changed.instructions, changed.created_ms) == (None, agent.created_ms)
    assert await agents.read(AgentId("nobody")) is None


async def test_ten_at_once_make_one(agents: Agents) -> None:
    """One of them was first."""
    new = new_agent()
    answers = await asyncio.gather(*(agents.put(new) for _ in range(10)))
    assert sorted(created for _, created in answers) == [False] * 9 + [True]


async def test_a_secret_stays_until_it_or_the_url_is_replaced(agents: Agents) -> None:
    """Whoever may change an agent cannot have its secret sent elsewhere."""
    given = new_agent(kind="openai", url="https://a.example/v1", api_key=b"sealed", signing_secret=b"sealed too")
    await agents.put(given)
    without = given._replace(api_key=None, signing_secret=None, model="large")
    agent, _ = await agents.put(without)
    assert (agent.api_key, agent.signing_secret) == (b"sealed", b"sealed too")
    agent, _ = await agents.put(without._replace(api_key=b"renewed"))
    assert (agent.api_key, agent.signing_secret) == (b"renewed", b"sealed too")
    agent, _ = await agents.put(without._replace(url="https://elsewhere.example/v1"))
    assert (agent.api_key, agent.signing_secret) == (None, None)


async def test_agents_are_listed_by_name_in_pages(agents: Agents) -> None:
    """And deleted once."""
    prefix = f"list-{new_id()}"
    names = [AgentId(f"{prefix}-{n}") for n in range(5)]
    for name in reversed(names):
        await agents.put(new_agent(agent=name))
    page = await agents.list_page(after=AgentId(prefix), limit=3)
    assert [agent.agent for agent in page] == names[:3]
    rest = await agents.list_page(after=names[2], limit=2)
    assert [agent.agent for agent in rest] == names[3:]
    assert len(await agents.list_page(after=None, limit=2)) == 2
    assert await agents.delete(names[0])
    assert not await agents.delete(names[0])
    assert await agents.read(names[0]) is None
