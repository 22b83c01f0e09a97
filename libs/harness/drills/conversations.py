"""The conversations of a drill: agents for which a stand-in answers, threads, entries, and whoever watches them.

Owns:     the threads and watchers of one run of a drill.
Promises: as the stage does.
Used by:  `threads`, which adds what is expected of them.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import msgspec

from harness.drills.caller import Caller, refusal
from harness.drills.dialogue import Heard, Told, read_story
from harness.drills.evidence import Evidence
from harness.drills.stage import Stage
from harness.drills.target import DrillFailed, Replica, Target
from harness.drills.watching import StreamWatcher
from harness.endpoint import SECRET
from towline.wire import events, json, sse, thread_events, threads
from towline.wire.runs import EventData

# A worker hears of a turn within milliseconds; what is left is a machine that does other things.
STARTS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """An entry that was posted. `took_s`: until the door answered."""

    thread: str
    entry: str
    turn: str
    key: str
    text: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of a drill.

    Attributes:
        user: whose machine its agent's tools run on; empty: nobody's.
        asked: what was posted, in order.
        watchers: whoever watches it.
    """

    thread: str
    user: str
    asked: list[Asked] = field(default_factory=list)
    watchers: list["ThreadWatcher"] = field(default_factory=list)


class ThreadWatcher(StreamWatcher[Heard]):
    """A watcher of a thread, whose stream has no end."""

    def note(self, event: sse.Event, now: float) -> Heard:
        if event.type in (events.GAP, events.END):
            return Heard(event.type, "", "", now, None)
        body = msgspec.json.decode(event.data, type=EventData)
        return Heard(event.type, body.source, event.id or "", now, thread_events.read(event.type, body.data))


class Conversations:
    """See the module.

    Attributes:
        opened: every thread so far.
    """

    def __init__(self, stage: Stage, target: Target, caller: Caller, evidence: Evidence) -> None:
        self.opened: list[Thread] = []
        self.stage = stage
        self.target = target
        self._caller = caller
        self.evidence = evidence
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._agents = 0
        self._entries = 0

    # ---- what happens

    async def open(
        self, model: str, *, user: str = "", kind: threads.AgentKind = "openai", turn_cap_s: float = 600.0
    ) -> Thread:
        """Open a thread with an agent of its own.

        Args:
            model: how the stand-in behaves, as `harness.model.behaviour` has it.
            user: whose machine the agent's tools run on.
        """
        self._agents += 1
        agent = f"{self.stage.report.drill}-{self.stage.run}-{self._agents}"
        body: dict[str, object] = {"kind": kind, "turn_cap_s": turn_cap_s}
        match kind:
            case "openai":
                body |= {"url": self.target.model.url, "model": model, "api_key": "any", "instructions": "Be brief."}
            case "http":
                body |= {"url": self.target.endpoint.url(model), "signing_secret": SECRET}
        await self.ask("PUT", f"/v1/agents/{agent}", body)
        created = await self.ask("POST", "/v1/threads", {"agent": agent} | ({"user": user} if user else {}))
        thread = Thread(msgspec.json.decode(created.content, type=threads.Thread).thread, user)
        self.opened.append(thread)
        return thread

    async def say(self, thread: Thread, text: str, *, on_busy: threads.OnBusy = "queue", first: int = 0) -> Asked:
        """Post an entry, and go on with its key until it is accepted. Raises: DrillFailed: it was refused."""
        self._entries += 1
        key = f"{self.stage.run}-entry-{self._entries}"
        # The mark tells this question from all others wherever it is counted.
        text = f"[{key}.]\n{text}"
        began = time.monotonic()
        posted = await self.post(thread.thread, text, key, on_busy=on_busy, first=first)
        asked = Asked(thread.thread, posted.entry.entry, posted.turn.turn, key, text, time.monotonic() - began)
        thread.asked.append(asked)
        return asked

    async def is_busy(self, thread: Thread) -> bool:
        """Whether an entry that is not to wait is refused now."""
        body = json.dumps({"text": "busy?", "on_busy": "reject"})
        response = await self._caller.ask_any(
            "POST", f"/v1/threads/{thread.thread}/entries", body, headers={"Idempotency-Key": '"busy"'}
        )
        return refusal(response) == "409 thread-busy"

    async def cancel(self, asked: Asked) -> None:
        """Cancel a turn."""
        await self.ask("DELETE", f"/v1/turns/{asked.turn}")

    def watch(self, thread: Thread, *, first: int = 0) -> ThreadWatcher:
        """Let one more watcher begin at the thread's beginning, at the gateway of that index."""
        name = f"{thread.thread}/{len(thread.watchers) + 1}"
        path = f"/v1/threads/{thread.thread}/events"
        watcher = ThreadWatcher(name, path, self.target.api_key, self.target.gateways, first=first)
        thread.watchers.append(watcher)
        self.come_back(watcher)
        return watcher

    async def leave(self, watcher: ThreadWatcher) -> None:
        """Let a watcher go, as one who closes the tab; it keeps what it has seen."""
        task = self._watching.pop(watcher.name)
        task.cancel()
        await asyncio.wait([task])

    def come_back(self, watcher: ThreadWatcher) -> None:
        """Let a watcher who left watch on from where it was."""
        self._watching[watcher.name] = asyncio.create_task(watcher.watch(), name=f"watcher:{watcher.name}")

    # ---- waiting

    async def turn(self, asked: Asked, *, first: int = 0) -> threads.Turn:
        """The turn as a gateway shows it."""
        response = await self.ask("GET", f"/v1/turns/{asked.turn}", first=first)
        return msgspec.json.decode(response.content, type=threads.Turn)

    async def ended(self, asked: Asked, *, within_s: float) -> threads.Turn:
        """Wait until a turn has ended."""

        async def look() -> threads.Turn | None:
            turn = await self.turn(asked)
            return turn if turn.terminal else None

        return await self.stage.eventually(f"turn {asked.key} ends", look, within_s=within_s, every_s=0.1)

    async def seen(
        self, watcher: ThreadWatcher, is_it: Callable[[Heard], bool], what: str, *, within_s: float = STARTS_WITHIN_S
    ) -> float:
        """Wait until a watcher has seen such an item; returns when it first did (monotonic)."""

        async def when() -> float | None:
            return next((heard.at for heard in watcher.seen if is_it(heard)), None)

        return await self.stage.eventually(f"{watcher.name} sees {what}", when, within_s=within_s)

    async def speaks(self, watcher: ThreadWatcher, asked: Asked, *, within_s: float = STARTS_WITHIN_S) -> float:
        """Wait until a watcher sees a piece of a turn's answer."""
        return await self.seen(
            watcher,
            lambda heard: heard.type == events.MESSAGE_DELTA and heard.turn == asked.turn,
            f"a piece of {asked.key}",
            within_s=within_s,
        )

    async def agent_calls(self, asked: Asked) -> int:
        """How often a model, or an endpoint, was asked for a turn's sake."""
        at_model = await self.target.model.about(asked.key + ".")
        return len(at_model) + len(await self.target.endpoint.of(asked.turn))

    async def runner(self, asked: Asked) -> Replica:
        """The worker that runs a turn: the one that holds its claim, by its log."""

        async def find() -> Replica | None:
            worker = await self.evidence.claimed_by(asked.turn)
            for replica in self.target.workers:
                if worker and worker in await replica.logs():
                    return replica
            return None

        return await self.stage.eventually(f"a worker runs {asked.key}", find)

    # ---- reading

    def told(self, thread: Thread, asked: Asked) -> Told:
        """What the thread's first watcher was told of a turn."""
        return read_story(thread.watchers[0].seen).turns.get(asked.turn, Told())

    async def entries(self, thread: Thread) -> list[threads.Entry]:
        """All entries of a thread (as many as fit in one page)."""
        response = await self.ask("GET", f"/v1/threads/{thread.thread}/entries?limit=100")
        return msgspec.json.decode(msgspec.json.encode(response.json()["items"]), type=list[threads.Entry])

    # ---- the end

    async def close(self) -> None:
        """Let every watcher go, and cancel what is still under way: it must not disturb the next drill."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        for asked in [asked for thread in self.opened for asked in thread.asked]:
            await self._caller.ask_any("DELETE", f"/v1/turns/{asked.turn}")

    async def post(
        self, thread: str, text: str, key: str, *, on_busy: threads.OnBusy = "queue", first: int = 0
    ) -> threads.Posted:
        """Post an entry under a key until a gateway answers. Raises: DrillFailed: it was refused."""
        body = {"text": text, "on_busy": on_busy}
        headers = {"Idempotency-Key": f'"{key}"'}
        response = await self.ask("POST", f"/v1/threads/{thread}/entries", body, headers=headers, first=first)
        return msgspec.json.decode(response.content, type=threads.Posted)

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        first: int = 0,
    ) -> httpx.Response:
        """Ask one gateway after another, as `Caller.ask_any`. Raises: DrillFailed: refused, too."""
        encoded = b"" if body is None else json.dumps(body)
        response = await self._caller.ask_any(method, path, encoded, headers=headers or {}, first=first)
        if not response.is_success:
            raise DrillFailed(f"{method} {path}: {refusal(response)}")
        return response


def use(tool: str, mark: str, *, seconds: float = 0) -> str:
    """The line of a question by which the stand-in model is to call one of `harness.drills.tools`."""
    return f'call {tool} {{"mark": "{mark}", "seconds": {seconds:g}}}'
