"""Workers that run turns, inside the test's own loop: the service as `python -m worker` composes it, on real stores."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from bridge import Peer, hello
from support import eventually
from turn_stores import Stores, new_agent
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from common.ids import AgentId, ThreadId, UserId, new_id
from common.process.lifecycle import Lifecycle
from common.process.metrics import new_registry
from common.process.secrets import Secrets, new_key
from common.store import keys
from common.store.eventlog import EventLog, Gap, LogEvent
from common.store.postgres import Postgres
from common.store.records import Record
from common.store.redis import Redis
from common.store.requests import Requests
from common.store.threadlog import START
from common.store.threads import NewEntry, OnBusy, fingerprint
from common.store.tokens import Tokens
from common.store.turns import Turn
from common.store.usage import UsageRow
from harness.drills.dialogue import Heard, Story, read_story
from harness.model import Model
from harness.ports import free_port
from towline.wire import events, frames, thread_events
from worker.app import run
from worker.settings import WorkerSettings

SECRET_KEY = new_key()
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class TurnWorker:
    """One worker. `registry`: its metrics; `bridge_url`: where machines connect to it, if it has that role."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.registry = new_registry()
        self.lifecycle = Lifecycle()
        self.bridge_url = f"ws://127.0.0.1:{settings.bridge_port}"
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run it, and wait until it is ready."""
        self.task = asyncio.create_task(run(self.settings, self.lifecycle, self.registry), name="worker")

        def is_ready() -> bool:
            assert self.task is not None
            if self.task.done():
                self.task.result()
            return self.lifecycle.state.value == "ready"

        await eventually(is_ready, within_s=30)

    async def drain(self) -> None:
        """Have it leave, as SIGTERM does."""
        assert self.task is not None
        self.lifecycle.begin_drain("test")
        async with asyncio.timeout(30):
            await self.task

    async def cut(self) -> None:
        """End it without a goodbye: its claims stay, and lapse."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait({self.task})

    def metric(self, name: str, **labels: str) -> float:
        """A sample."""
        return self.registry.get_sample_value(name, labels) or 0.0


@dataclass
class TurnWorld:
    """Stores, and the workers that a test starts."""

    stores: Stores
    redis: Redis
    redis_url: str
    cleanup: contextlib.AsyncExitStack
    workers: list[TurnWorker] = field(default_factory=list)

    @property
    def requests(self) -> Requests:
        return Requests(self.stores.postgres, retention_s=3600)

    async def worker(
        self, *, roles: str = "turns", postgres_url: str = "", redis_url: str = "", **members: Any
    ) -> TurnWorker:
        """One more worker, ready; with URLs of proxies, if given."""
        settings = WorkerSettings(
            REDIS_URL=redis_url or self.redis_url,
            DATABASE_URL=postgres_url or self.stores.postgres.url,
            roles=roles,
            admin_host="127.0.0.1",
            admin_port=0,
            bridge_host="127.0.0.1",
            bridge_port=free_port(),
            egress_allow="127.0.0.1,localhost",
            secret_keys=SECRET_KEY,
            drain_s=1,
            **members,
        )
        worker = TurnWorker(settings)
        self.workers.append(worker)
        await worker.start()
        self.cleanup.push_async_callback(worker.cut)
        return worker

    async def thread(self, kind: str = "echo", *, user: UserId | None = None, **members: Any) -> ThreadId:
        """A thread of an agent of its own; `members` as of `NewAgent`, secrets as text."""
        secrets = Secrets([SECRET_KEY])
        for name in ("api_key", "signing_secret"):
            if name in members:
                members[name] = secrets.encrypt({name: members[name]})
        agent, _ = await self.stores.agents.put(new_agent(kind=kind, **members))
        thread = await self.stores.threads.create(AgentId(agent.agent), user=user, model=None)
        assert thread is not None
        return thread.thread

    async def post(self, thread: ThreadId, text: str = "hello", *, on_busy: OnBusy = "queue") -> Turn:
        """Post an entry; returns its turn."""
        posted = await self.stores.threads.post(
            NewEntry(thread, text, f"key-{new_id()}", fingerprint(text), on_busy, TRACEPARENT)
        )
        assert posted.verdict == "created"
        assert posted.turn is not None
        return posted.turn

    async def ended(self, turn: Turn, within_s: float = 20) -> Turn:
        """The turn's record, once it has ended and its end was announced."""

        async def terminal() -> Turn | None:
            record = await self.stores.record(turn)
            story = await self.story(turn.thread)
            told = story.turns.get(turn.turn)
            return record if record.terminal and told is not None and told.end else None

        return await eventually(terminal, within_s)

    async def ask(self, model: Model, behaviour: str, **members: Any) -> Turn:
        """Post a question that nobody else asks to a model that behaves so; `members` as of `NewAgent`."""
        thread = await self.thread("openai", url=model.url, model=behaviour, api_key="sk-test", **members)
        return await self.post(thread, f"hi {new_id()}")

    async def ended_once(self, turn: Turn, state: str = "completed", within_s: float = 20) -> Turn:
        """The turn's end: one terminal, one reply, one usage row, told coherently."""
        ended = await self.ended(turn, within_s)
        assert ended.state == state
        await self.coherent(turn.thread)
        entries = [entry for entry in await self.stores.entries(turn.thread) if entry.turn == turn.turn]
        assert [entry.role for entry in entries] == (["user", "agent"] if state == "completed" else ["user"])
        assert len(await self.usage(turn)) == 1
        return ended

    async def has_ended(self, turn: Turn) -> bool:
        """Whether the record says so, announced or not."""
        return (await self.stores.record(turn)).terminal

    async def is_completed(self, turn: Turn) -> bool:
        """Whether its task is, and there is no other one."""
        return await self.stores.tasks(turn) == ["completed"]

    async def runs(self, turn: Turn) -> int:
        """How often its task was run."""
        query = "select count(*)::int from absurd.r_turns where task_id = (select task from turns where turn = %s)"
        ((count,),) = await self.stores.ask(query, turn.turn)
        return int(count)

    async def heard(self, thread: ThreadId) -> list[LogEvent]:
        """All that the thread's log holds."""
        log, position, found = EventLog(self.redis, keys.thread_events), START, []
        while True:
            page = await log.read_after(thread, position)
            found += [item for item in page.items if not isinstance(item, Gap)]
            position = page.position
            if not page.more:
                return found

    async def story(self, thread: ThreadId) -> Story:
        """What a watcher makes of it."""
        return read_story(
            Heard(event.type, event.source, str(event.id), time.monotonic(), thread_events.read(event.type, event.data))
            for event in await self.heard(thread)
        )

    async def coherent(self, thread: ThreadId) -> Story:
        """The same, without a fault."""
        story = await self.story(thread)
        assert story.faults == []
        return story

    async def begun(self, turn: Turn, attempt: int = 1, within_s: float = 20) -> None:
        """Wait until an attempt of a turn has said that it is at work."""

        async def is_begun() -> bool:
            told = (await self.story(turn.thread)).turns.get(turn.turn)
            return told is not None and told.attempt >= attempt

        await eventually(is_begun, within_s)

    async def heard_text(self, turn: Turn, text: str, within_s: float = 20) -> None:
        """Wait until a piece of the answer was heard."""

        async def is_heard() -> bool:
            told = (await self.story(turn.thread)).turns.get(turn.turn)
            return told is not None and text in told.text

        await eventually(is_heard, within_s)

    async def usage(self, turn: Turn) -> list[UsageRow]:
        """The turn's usage rows."""
        rows = await self.stores.usage.list_page(
            users=None, thread=turn.thread, agent=None, day=None, before=None, limit=100
        )
        return [row for row in rows if row.turn == turn.turn]

    async def calls(self, turn: Turn) -> list[Record]:
        """The jobs that a turn's tool calls became."""
        rows = await self.stores.ask("select id::text from requests where scope = %s order by id", f"turn:{turn.turn}")
        records = await self.requests.read([job for (job,) in rows])
        return [records[job] for (job,) in rows]

    async def lapse(self, turn: Turn) -> None:
        """The claim of whoever runs a turn is over; nobody has noticed yet."""
        await self.stores.ask(
            "update absurd.r_turns set claim_expires_at = now()"
            " where state = 'running' and task_id = (select task from turns where turn = %s)",
            turn.turn,
        )

    async def machine(self, user: UserId, worker: TurnWorker, **members: Any) -> Peer:
        """A machine of a user that was welcomed by a worker with sockets; `members` as of `hello`."""
        token = (await Tokens(self.stores.postgres).add_machine_token(user, "test", None))[1]
        socket = await connect(
            f"{worker.bridge_url}{frames.PATH}",
            subprotocols=[Subprotocol(frames.SUBPROTOCOL)],
            additional_headers={"Authorization": f"Bearer {token}"},
            compression=None,
            max_size=None,
            ping_interval=None,
            close_timeout=1,
            proxy=None,
        )
        peer = Peer(socket)
        self.cleanup.push_async_callback(peer.stop)
        await peer.send(hello(**members))
        await peer.next(frames.Welcome)
        return peer


@contextlib.asynccontextmanager
async def open_world(postgres: Postgres, redis: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    """Stores without a worker; whatever is started ends with the block."""
    async with contextlib.AsyncExitStack() as cleanup:
        yield TurnWorld(Stores(postgres), redis, redis_url, cleanup)


def kinds(heard: list[LogEvent], turn: Turn) -> list[str]:
    """Types of what was said of a turn, in order; pieces of an answer that follow each other count as one."""
    found: list[str] = []
    for event in heard:
        if event.source == turn.turn and not (event.type == events.MESSAGE_DELTA and found[-1:] == [event.type]):
            found.append(event.type)
    return found
