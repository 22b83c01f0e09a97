"""Agents: who answers threads.

Owns:     the table `agents`.
Promises: one definition per name, the newest; a secret is stored encrypted and goes to no other URL than the one that
          it was given for. Every call is safe to repeat.
Used by:  the gateway (put, read, list, delete), the worker (read, as an attempt begins).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from common.ids import AgentId
from common.store.postgres import Postgres
from towline.wire.threads import AgentKind


class NewAgent(NamedTuple):
    """An agent as the caller gives it.

    Attributes:
        tools: names of the machine's tools that it is offered; None: all of them.
        api_key, signing_secret: encrypted by `process.secrets`; None: the ones that are stored stay, if the URL does.
    """

    agent: AgentId
    kind: AgentKind
    url: str | None
    model: str | None
    instructions: str | None
    tools: Sequence[str] | None
    api_key: bytes | None
    signing_secret: bytes | None
    turn_cap_s: float


class Agent(msgspec.Struct, frozen=True):
    """An agent's record; see `NewAgent`. `created_ms`: milliseconds of Postgres's clock."""

    agent: AgentId
    kind: AgentKind
    url: str | None
    model: str | None
    instructions: str | None
    tools: Sequence[str] | None
    api_key: bytes | None
    signing_secret: bytes | None
    turn_cap_s: float
    created_ms: int


class Agents:
    """The table."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def put(self, new: NewAgent) -> tuple[Agent, bool]:
        """Define an agent, or define it anew; returns its record, and whether its name was new.

        Attempts that have begun go on as they were; what begins afterwards follows the new definition.

        Raises:
            StoreUnavailable: it may be defined; repeat it.
        """
        params = new._asdict() | {"tools": None if new.tools is None else list(new.tools)}
        (row,) = await self._postgres.fetch("put_agent", params)
        return _agent(row), row.created

    async def read(self, agent: AgentId) -> Agent | None:
        """An agent's record. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("read_agent", {"agent": agent})
        return _agent(rows[0]) if rows else None

    async def list_page(self, *, after: AgentId | None, limit: int) -> list[Agent]:
        """Agents in the order of their names, after one. Raises: StoreUnavailable."""
        return [_agent(row) for row in await self._postgres.fetch("list_agents", {"after": after, "limit": limit})]

    async def delete(self, agent: AgentId) -> bool:
        """Forget an agent; False when there is none. Its threads stay, and nothing more is answered there.

        Raises: StoreUnavailable (repeat it).
        """
        return bool(await self._postgres.fetch("delete_agent", {"agent": agent}))


def _agent(row: Any) -> Agent:
    return Agent(
        agent=row.agent,
        kind=row.kind,
        url=row.url,
        model=row.model,
        instructions=row.instructions,
        tools=row.tools,
        api_key=row.api_key,
        signing_secret=row.signing_secret,
        turn_cap_s=row.turn_cap_s,
        created_ms=row.created_ms,
    )
