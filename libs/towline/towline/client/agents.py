"""Agents: who answers threads."""

from collections.abc import AsyncIterator

from towline.client.calls import Calls, in_path
from towline.wire.api import Page
from towline.wire.threads import Agent, AgentPut


class AgentCalls(Calls):
    """The calls about agents; see `towline.client.Client`."""

    async def put_agent(self, agent: str, definition: AgentPut) -> Agent:
        """Define an agent, or define it anew; turns that are under way go on as they were."""
        return await self._call(Agent, "PUT", f"/v1/agents/{in_path(agent, 'agent')}", body=definition)

    async def read_agent(self, agent: str) -> Agent:
        """Read how an agent is defined, without its secrets."""
        return await self._call(Agent, "GET", f"/v1/agents/{in_path(agent, 'agent')}")

    async def delete_agent(self, agent: str) -> None:
        """Forget an agent. Its threads can still be read, but nothing more is answered there."""
        await self._transport.request("DELETE", f"/v1/agents/{in_path(agent, 'agent')}")

    async def list_agents(self, *, limit: int | None = None) -> AsyncIterator[Agent]:
        """Go through all agents, by name; at most `limit` of them."""
        async for agent in self._list(Page[Agent], "/v1/agents", {}, limit):
            yield agent
