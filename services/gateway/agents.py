"""Agents over HTTP: define, read, list, forget.

Promises: a URL that may not be called is refused before anything is recorded; secrets are encrypted before they are
          stored, and never shown.
"""

import structlog

from common.ids import AgentId
from common.process.egress import Allowlist, EgressRefused
from common.process.secrets import Secrets
from common.store.agents import Agent, Agents, NewAgent
from gateway import paging, problems
from gateway.auth import Auth
from gateway.http import Answer
from gateway.problems import Refusal
from gateway.request import Request
from towline.wire import json
from towline.wire import threads as wire
from towline.wire.api import timestamp

logger = structlog.get_logger(__name__)


class AgentRoutes:
    """The handlers of everything about agents; they belong to no user."""

    def __init__(self, *, auth: Auth, agents: Agents, egress: Allowlist, secrets: Secrets) -> None:
        self._auth = auth
        self._agents = agents
        self._egress = egress
        self._secrets = secrets

    async def put_agent(self, request: Request) -> Answer:
        """`PUT /v1/agents/{agent}`."""
        await self._auth.require_unbound(request, "threads")
        agent = AgentId(request.id("agent"))
        body = await request.read(wire.AgentPut)
        record, created = await self._agents.put(self._new_agent(agent, body))
        logger.info("agent_defined", agent=agent, kind=record.kind, created=created)
        return Answer(201 if created else 200, json.dumps(_view(record)))

    async def read_agent(self, request: Request) -> Answer:
        """`GET /v1/agents/{agent}`."""
        await self._auth.require_unbound(request, "threads")
        record = await self._agents.read(AgentId(request.id("agent")))
        if record is None:
            raise problems.not_found("agent")
        return Answer(200, json.dumps(_view(record)))

    async def list_agents(self, request: Request) -> Answer:
        """`GET /v1/agents`."""
        await self._auth.require_unbound(request, "threads")
        size = paging.limit(request)
        records = await self._agents.list_page(after=paging.after_agent(request), limit=size + 1)
        return Answer(200, json.dumps(paging.page_of_agents(records, size, _view)))

    async def delete_agent(self, request: Request) -> Answer:
        """`DELETE /v1/agents/{agent}`."""
        await self._auth.require_unbound(request, "threads")
        agent = AgentId(request.id("agent"))
        if not await self._agents.delete(agent):
            raise problems.not_found("agent")
        logger.info("agent_deleted", agent=agent)
        return Answer(204)

    def _new_agent(self, agent: AgentId, body: wire.AgentPut) -> NewAgent:
        if body.url is not None:
            try:
                self._egress.check_url(body.url)
            except EgressRefused as error:
                raise Refusal(problems.EGRESS_REFUSED, f"{error}", place="$.url") from None
        return NewAgent(
            agent,
            body.kind,
            body.url,
            body.model,
            body.instructions,
            body.tools,
            self._encrypted("api_key", body.api_key),
            self._encrypted("signing_secret", body.signing_secret),
            body.turn_cap_s,
        )

    def _encrypted(self, name: str, value: str | None) -> bytes | None:
        """A secret as it is stored: encrypted under its own name."""
        if value is None:
            return None
        if not self._secrets.is_usable:
            raise Refusal(
                problems.NOT_CONFIGURED,
                f"`{name}` cannot be kept: this installation has no TOWLINE_SECRET_KEYS",
                place=f"$.{name}",
            )
        return self._secrets.encrypt({name: value})


def _view(record: Agent) -> wire.Agent:
    return wire.Agent(
        agent=record.agent,
        kind=record.kind,
        url=record.url,
        model=record.model,
        instructions=record.instructions,
        tools=None if record.tools is None else list(record.tools),
        has_api_key=record.api_key is not None,
        has_signing_secret=record.signing_secret is not None,
        turn_cap_s=record.turn_cap_s,
        created_at=timestamp(record.created_ms),
    )
