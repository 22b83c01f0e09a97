"""The scene: what a scenario plays with. One per run of a drill, with users of its own.

Owns:     the run's machines, callers and streams.
Promises: as the stage does; waiting is for a condition, with a deadline.
Used by:  the scenarios; `play` opens and closes it.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.drills.caller import Answer, Caller
from harness.drills.evidence import Evidence, Row
from harness.drills.report import Report
from harness.drills.stage import SOON_S, Stage
from harness.drills.streams import Streams
from harness.drills.target import DrillFailed, Executions, Machine, Replica, Target, log_events
from harness.drills.threads import Threads
from towline.wire import api

PRESENCE_EVERY_S = 0.1
# A caller gives up after this; how long it did take is measured where it matters. The stores of a cluster, deleted one
# after the other, take more than a minute.
CALLERS_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A job with its caller, who waits for the end. `asked_at`: monotonic seconds."""

    user: str
    key: str
    body: dict[str, Any]
    asked_at: float
    caller: asyncio.Task[Answer]


class Scene(Stage):
    """See the module.

    Attributes:
        target: the installation.
        caller: asks its gateways.
        evidence: reads its stores.
        machines: those that were added and not removed.
        streams: the runs that are followed.
        threads: the threads that are answered.
        clients: how many watch one run where it is to be many.
        slow_s: how long an answer takes where it is to take long.
    """

    def __init__(
        self,
        target: Target,
        caller: Caller,
        evidence: Evidence,
        report: Report,
        *,
        run: str,
        tell: Callable[[str], None],
        patience: float,
        clients: int,
        slow_s: float,
    ) -> None:
        """Set a scene on a target; the rest is the stage's."""
        super().__init__(report, run=run, tell=tell, patience=patience, allowance_s=target.allowance_s)
        self.target = target
        self.caller = caller
        self.evidence = evidence
        self.clients = clients
        self.slow_s = slow_s
        self.machines: list[Machine] = []
        self.streams = Streams(self, target, caller, evidence)
        self.threads = Threads(self, target, caller, evidence)
        self._users = 0
        self._callers: list[asyncio.Task[Answer]] = []

    # ---- users and machines

    def new_user(self) -> str:
        """Name a user that nobody has seen before."""
        self._users += 1
        return f"{self.report.drill}-{self.run}-{self._users}"

    async def new_machine(self, user: str | None = None, *, connected: bool = True) -> Machine:
        """Start a machine, of a new user unless one is named."""
        machine = await self.target.add_machine(user or self.new_user(), connected=connected)
        self.machines.append(machine)
        return machine

    async def new_machines(self, count: int) -> list[Machine]:
        """Start machines of as many new users, at the same time."""
        return list(await asyncio.gather(*(self.new_machine() for _ in range(count))))

    async def holder(self, user: str) -> Replica:
        """The worker that presence names: the one whose log has its session."""

        async def find() -> Replica | None:
            session = (await self.evidence.presence(user)).get("session", "no session")
            for worker in self.target.workers:
                if session in await worker.logs():
                    return worker
            return None

        return await self.eventually(f"a worker holds the machine of {user}", find)

    async def new_session(self, user: str, old: str) -> None:
        """Wait until presence names another session than `old`."""

        async def has_changed() -> bool:
            return (await self.evidence.presence(user)).get("session", old) != old

        await self.eventually(f"a new session of {user}", has_changed)

    async def answered(self, user: str, *, began_ms: int) -> None:
        """Wait until the worker has the result of the job that began then; presence says so without Postgres, too."""

        async def is_idle() -> bool:
            presence = await self.evidence.presence(user)
            # Heard of since, and with nothing to do: what was heard is the result.
            return presence["busy"] == "0" and int(presence["seen"]) > began_ms

        await self.eventually(f"the machine of {user} has answered", is_idle)

    async def logged(self, replica: Replica, name: str, **fields: str) -> None:
        """Wait until a replica has logged an event of that name with these fields, since its last start."""

        wanted = {"event": name, **fields}.items()

        async def has_logged() -> bool:
            events = log_events(await replica.logs())
            return any(all(event.get(field) == value for field, value in wanted) for event in events)

        await self.eventually(f"{replica.name} logs {name}", has_logged)

    # ---- jobs

    def submit(
        self,
        user: str,
        tool: str,
        key: str,
        *,
        first: int = 0,
        heeds_offline: bool = False,
        deadline_s: float = 300.0,
        **args: Any,
    ) -> Asked:
        """Submit a job whose mark is its key, and let its caller wait for the end.

        Args:
            first: the gateway to ask first.
            heeds_offline: the caller waits no longer once told that the machine is offline.
            args: of the tool, beside its mark.
        """
        body = {"name": tool, "args": {"mark": key, **args}, "deadline_s": deadline_s}
        return self._ask(user, body, key, first=first, heeds_offline=heeds_offline)

    def again(self, asked: Asked) -> Asked:
        """Let another caller come with the same key and wait for the end."""
        return self._ask(asked.user, asked.body, asked.key, first=1, heeds_offline=False)

    def _ask(self, user: str, body: dict[str, Any], key: str, *, first: int, heeds_offline: bool) -> Asked:
        asked_at = time.monotonic()
        call = self.caller.submit(user, body, key, first=first, heeds_offline=heeds_offline, within_s=CALLERS_WAIT_S)
        caller = asyncio.create_task(call, name=f"caller:{user}:{key}")
        self._callers.append(caller)
        return Asked(user, key, body, asked_at, caller)

    def outlasting(self, seconds: float) -> float:
        """How long what is to be cut must take on this target, if so many seconds do where a cut is a signal."""
        return seconds + 2 * self.target.allowance_s

    async def began(self, asked: Asked) -> int:
        """Wait until the job's tool has begun; returns the time, milliseconds of the wall clock."""
        await self.noted(asked, lambda noted: noted.began > 0, "began")
        return int(time.time() * 1000)

    async def let_go(self, asked: Asked) -> None:
        """Let a job's tool that is held come to its end, and wait for that."""
        await self.target.let_go(asked.user, asked.key)
        await self.noted(asked, lambda noted: noted.ended > 0, "ended")

    async def noted(self, asked: Asked, is_it: Callable[[Executions], bool], what: str) -> None:
        """Wait until the tool's own notes of a job are as `is_it` wants them."""

        await self.tool_noted(asked.user, asked.key, is_it, what)

    async def tool_noted(
        self, user: str, mark: str, is_it: Callable[[Executions], bool], what: str, *, within_s: float = SOON_S
    ) -> None:
        """Wait until the tools' own notes under a mark are as `is_it` wants them."""

        async def look() -> bool:
            return is_it((await self.target.executions(user)).get(mark, Executions()))

        await self.eventually(f"{mark} of {user} {what}", look, within_s=within_s)

    async def deliveries(self, user: str) -> Counter[str]:
        """How often each job was delivered, over all of a user's machines."""
        return Counter(event["job"] for event in await self.events(user, "job_delivered"))

    async def events(self, user: str, *names: str) -> list[dict[str, Any]]:
        """Events of these names in the logs of a user's machines, machine by machine, in their order."""
        found = []
        for machine in self.machines:
            if machine.user == user:
                found += [event for event in log_events(await machine.logs()) if event.get("event") in names]
        return found

    async def record(self, asked: Asked) -> Row:
        """The job's record. Raises: DrillFailed: there is not exactly one."""
        rows = [row for row in await self.evidence.records(asked.user) if row.key == asked.key]
        if len(rows) != 1:
            raise DrillFailed(f"{asked.key} of {asked.user} has {len(rows)} records")
        return rows[0]

    async def expect(
        self,
        asked: Asked,
        state: str,
        *,
        executions: int,
        deliveries: int | None = None,
        attempts: int | None = None,
        code: str = "",
    ) -> Answer:
        """Wait for the caller's answer, and hold everything that can be counted against what is expected.

        Args:
            executions: how often the tool began, by its own notes.
            deliveries: frames that machines took for the job; None where the cut leaves that open.
            attempts: what the record says; None likewise.
            code: of the outcome's error.
        """
        answer = await asked.caller
        # Every gateway gives the same answer to the same key, now and later.
        again = [
            await self.caller.submit(asked.user, asked.body, asked.key, first=n, within_s=SOON_S)
            for n in range(len(self.target.gateways))
        ]
        record = await self.record(asked)
        noted = (await self.target.executions(asked.user)).get(asked.key, Executions())
        key = asked.key
        self.check(f"{key}: outcome", state, "none" if answer.job is None else answer.job.state)
        if code:
            self.check(f"{key}: error", code, _error_code(answer.outcome))
        self.check(f"{key}: executions", executions, noted.began)
        if deliveries is not None:
            self.check(f"{key}: deliveries", deliveries, (await self.deliveries(asked.user))[record.job])
        if attempts is not None:
            self.check(f"{key}: attempts", attempts, record.attempts)
        self.check(f"{key}: terminals", 1, len(_terminals([answer, *again], record)))
        return answer

    @contextlib.asynccontextmanager
    async def nobody_told_offline(self, user: str) -> AsyncIterator[None]:
        """Ask every gateway for the machine's presence all the while; afterwards, `offline` must not have been said."""
        told: Counter[str] = Counter()

        async def ask(gateway: int) -> None:
            while True:
                if presence := await self.caller.presence(user, at=gateway):
                    told[presence.state] += 1
                await asyncio.sleep(PRESENCE_EVERY_S)

        askers = [asyncio.create_task(ask(n), name=f"presence:{n}") for n in range(len(self.target.gateways))]
        try:
            yield
        finally:
            for asker in askers:
                asker.cancel()
            await asyncio.gather(*askers, return_exceptions=True)
        self.check("told `offline` while connected", 0, told["offline"])
        self.check("presence was asked", "> 0", sum(told.values()), is_met=sum(told.values()) > 0)

    # ---- the end

    async def expect_nothing_left(self, user: str) -> None:
        """Redis holds no job of the user any more, and at most the consumer of the present session."""
        with contextlib.suppress(DrillFailed):
            await self.eventually("nothing left", lambda: self._is_empty(user), within_s=SOON_S)
        left = await self.evidence.left(user)
        expected = "entries 0, pending 0, indexed 0, consumers <= 1"
        self.check(f"{user}: left in Redis", expected, left, is_met=await self._is_empty(user))

    async def _is_empty(self, user: str) -> bool:
        left = await self.evidence.left(user)
        return left[:3] == (0, 0, 0) and left.consumers <= 1

    async def expect_health(self) -> None:
        """Every replica runs, every machine that runs does a job, a run is followed, and a thread is answered."""
        for replica in (*self.target.gateways, *self.target.workers, *self.target.relays):
            self.check(f"{replica.name} runs", True, await replica.is_running())
        for user in {machine.user: None for machine in self.machines if await machine.is_running()}:
            health = self.submit(user, "look", "health")
            await self.expect(health, "completed", executions=1)
            await self.expect_nothing_left(user)
        await self.streams.expect_health()
        await self.threads.expect_health()

    async def expect_goodbyes(self) -> None:
        """Every machine leaves, and Redis knows nothing of its user then but the epoch."""
        await asyncio.gather(*(machine.stop() for machine in self.machines))
        for user in {machine.user: None for machine in self.machines}:

            async def is_clean(user: str = user) -> bool:
                return not await self.evidence.keys_left(user)

            with contextlib.suppress(DrillFailed):
                await self.eventually("no keys left", is_clean)
            self.check(f"{user}: keys after goodbye", [], await self.evidence.keys_left(user))

    async def close(self) -> None:
        """End what the scenario left running: callers, machines, runs and turns."""
        await self.threads.close()
        await self.streams.close()
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)
        await asyncio.gather(*(self.target.remove_machine(machine) for machine in self.machines))


def _terminals(answers: Sequence[Answer], record: Row) -> set[tuple[str, str, str]]:
    """Every different end that was told or recorded; there must be one."""
    told: set[tuple[str, str, str]] = {
        (answer.job.state, str(answer.job.ended_at), answer.outcome)
        for answer in answers
        if answer.job is not None and answer.job.terminal
    }
    if record.ended_ms is not None:
        told.add((record.state, api.timestamp(record.ended_ms), record.outcome or ""))
    return told


def _error_code(outcome: str) -> str:
    if not outcome:
        return "none"
    error = msgspec.json.decode(outcome, type=api.Outcome).error
    return "none" if isinstance(error, msgspec.UnsetType) else error.code
