"""What tests of the turn path's stores share: agents, threads, entries, and a worker's side of a turn."""

from dataclasses import dataclass, field
from typing import Any

import psycopg
from support import eventually

from common.ids import AgentId, ThreadId, UserId, WorkerId, new_id
from common.store.agents import Agents, NewAgent
from common.store.claims import Begun, Claims
from common.store.postgres import Postgres
from common.store.threads import Entry, NewEntry, OnBusy, Posted, Thread, Threads, fingerprint
from common.store.turns import Claim, End, Turn, Turns, completed
from common.store.usage import Usage, Used

KEY_RETENTION_S = 3600.0
USED = Used("reply", "model-1", 10, 20, 1, 0, 0.5)


def new_agent(**members: object) -> NewAgent:
    """An echo agent with a name of its own."""
    defaults: dict[str, object] = {
        "agent": AgentId(f"agent-{new_id()}"),
        "kind": "echo",
        "url": None,
        "model": None,
        "instructions": None,
        "tools": None,
        "api_key": None,
        "signing_secret": None,
        "turn_cap_s": 600.0,
    }
    return NewAgent(**(defaults | members))  # type: ignore[arg-type]


@dataclass
class Stores:
    """The stores of one database, which a test module shares: tests use threads of their own."""

    postgres: Postgres
    agents: Agents = field(init=False)
    threads: Threads = field(init=False)
    turns: Turns = field(init=False)
    claims: Claims = field(init=False)
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.agents = Agents(self.postgres)
        self.threads = Threads(self.postgres, key_retention_s=KEY_RETENTION_S)
        self.turns = Turns(self.postgres)
        self.claims = Claims(self.postgres)
        self.usage = Usage(self.postgres)

    async def new_thread(self, *, user: UserId | None = None, turn_cap_s: float = 600.0) -> Thread:
        """An empty thread of an agent of its own."""
        agent, _ = await self.agents.put(new_agent(turn_cap_s=turn_cap_s))
        thread = await self.threads.create(agent.agent, user=user, model=None)
        assert thread is not None
        return thread

    async def try_post(
        self, thread: ThreadId, text: str = "hello", *, key: str = "", on_busy: OnBusy = "queue"
    ) -> Posted:
        """Post an entry; under a fresh key unless one is given."""
        return await self.threads.post(NewEntry(thread, text, key or f"key-{new_id()}", fingerprint(text), on_busy, ""))

    async def post(self, thread: ThreadId, text: str = "hello", *, on_busy: OnBusy = "queue") -> Turn:
        """Post an entry that is taken; returns its turn."""
        posted = await self.try_post(thread, text, on_busy=on_busy)
        assert (posted.verdict, posted.turn is not None) == ("created", True)
        assert posted.turn is not None
        return posted.turn

    async def lapse(self, claim: Claim) -> None:
        """The time of a claim is over; nobody has noticed yet."""
        await self.ask("update absurd.r_turns set claim_expires_at = now() where run_id = %s", claim.run)

    async def ask(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        """Look at, or into, the database."""
        async with await psycopg.AsyncConnection.connect(self.postgres.url, autocommit=True) as connection:
            cursor = await connection.execute(query, params)  # type: ignore[arg-type]
            return await cursor.fetchall() if cursor.description else []

    async def tasks(self, turn: Turn) -> list[str]:
        """States of the tasks that were spawned for a turn."""
        query = "select state from absurd.t_turns where params->>'turn' = %s"
        return [state for (state,) in await self.ask(query, turn.turn)]

    async def record(self, turn: Turn) -> Turn:
        """The turn as it stands now."""
        found = await self.turns.read(turn.turn)
        assert found is not None
        return found

    async def entries(self, thread: ThreadId) -> list[Entry]:
        """All entries of a thread."""
        return await self.threads.entries_after(thread, 0, limit=1000)


@dataclass
class Worker:
    """A worker that knows its claims."""

    stores: Stores
    name: WorkerId = field(default_factory=lambda: WorkerId(f"worker-{new_id()}"))
    held: list[Claim] = field(default_factory=list)

    async def claim(self, places: int = 10) -> list[Claim]:
        """Claim what is there."""
        claims = await self.stores.claims.claim(self.name, places, self.held)
        self.held += claims
        return claims

    async def claim_turn(self, turn: Turn) -> Claim:
        """Claim until it has this turn; other tests of the module leave turns behind."""

        async def found() -> list[Claim]:
            await self.claim()
            return [claim for claim in self.held if claim.turn == turn.turn]

        return (await eventually(found))[0]

    async def begin(self, turn: Turn) -> Claim:
        """Claim a turn and begin it."""
        claim = await self.claim_turn(turn)
        begun: Begun = await self.stores.claims.begin(claim)
        assert begun.verdict == "begun", begun
        return claim

    async def end(self, claim: Claim, end: End | None = None) -> Turn:
        """End a turn and complete its task."""
        turn = await self.stores.turns.end(claim, end or completed("answer"), [USED])
        await self.stores.claims.complete(claim)
        self.held.remove(claim)
        return turn
