"""What tests of threads over HTTP share: a product that posts, and a worker that is played with the store functions."""

from typing import Any

import httpx
from gateway_door import Door
from gateway_streams import Watcher
from turn_stores import Stores, Worker

from common.ids import TurnId, new_id
from common.store import turn_events
from common.store.threadlog import Fence, ThreadLog, ThreadWriter
from common.store.turns import Claim, End, Turn, completed
from harness.stack import Gateway


class Product:
    """A caller of one gateway, and the worker that answers what it posts."""

    def __init__(self, door: Door, gateway: Gateway | None = None, *, key: str | None = None) -> None:
        self.door = door
        self.client = door.client(gateway, key=key)
        self.stores = Stores(door.postgres)
        self.worker = Worker(self.stores)
        self.log = ThreadLog(door.redis)

    async def __aenter__(self) -> "Product":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def new_agent(self, **members: Any) -> str:
        """An agent of its own, which echoes unless it is told otherwise."""
        agent = f"agent-{new_id()}"
        answer = await self.client.put(f"/v1/agents/{agent}", json={"kind": "echo"} | members)
        assert answer.status_code == 201, answer.text
        return agent

    async def new_thread(self, **members: Any) -> str:
        """An empty thread."""
        body = {"agent": await self.new_agent()} | members
        answer = await self.client.post("/v1/threads", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["thread"])

    async def try_post(self, thread: str, text: str = "hello", *, key: str = "", **members: Any) -> httpx.Response:
        """Post an entry, under a fresh key unless one is given."""
        headers = {"idempotency-key": key or f"key-{new_id()}"}
        return await self.client.post(f"/v1/threads/{thread}/entries", json={"text": text} | members, headers=headers)

    async def post(self, thread: str, text: str = "hello", **members: Any) -> dict[str, Any]:
        """Post an entry that is taken; returns its turn."""
        answer = await self.try_post(thread, text, **members)
        assert answer.status_code == 201, answer.text
        return dict(answer.json()["turn"])

    async def record(self, turn: str) -> Turn:
        """A turn's record."""
        found = await self.stores.turns.read(TurnId(turn))
        assert found is not None
        return found

    async def begin(self, turn: str) -> Claim:
        """Claim it and begin it, as a worker does."""
        return await self.worker.begin(await self.record(turn))

    async def end(self, claim: Claim, end: End | None = None, *, announce: bool = True) -> Turn:
        """End it and, unless told otherwise, announce that, as a worker does."""
        turn = await self.stores.turns.end(claim, end or completed("answer"), [])
        if announce:
            await self.log.say(*turn_events.ended(turn))
        await self.stores.claims.complete(claim)
        self.worker.held.remove(claim)
        return turn

    async def answer(self, turn: str, text: str = "answer") -> Turn:
        """Have it answered."""
        return await self.end(await self.begin(turn), completed(text))

    def writer(self, turn: Turn, attempt: int = 1) -> ThreadWriter:
        """What an attempt speaks with."""
        return self.log.writer(turn.thread, f"turn:{turn.turn}:{attempt}:{new_id()}", Fence(turn.number, attempt))

    def watch(self, thread: str, last_event_id: str | None = None, **params: str) -> Watcher:
        """Follow a thread."""
        return Watcher(self.client, f"/v1/threads/{thread}/events", last_event_id=last_event_id, params=params)

    async def api_key(self, **members: Any) -> str:
        """An API key with the scope `threads`, unless told otherwise."""
        body = {"name": "test", "scopes": ["threads"]} | members
        async with self.door.client() as client:
            answer = await client.post("/v1/api-keys", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["api_key"])
