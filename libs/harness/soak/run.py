"""One soak, from its plan to its whole history.

    load + following + nemesis + witness ─▶ all faults undone ─▶ every job has ended, every watcher been told the end
         ─▶ every key asked once more ─▶ queues empty ─▶ machines say goodbye ─▶ nothing left of them ─▶ records, logs

Promises: every wait after the plan is bounded, and what is not so by then is left to the checker to name; a soak leaves
          nothing running, and its history on disk.
"""

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import psycopg

from common.errors import StoreUnavailable
from common.store.redis import open_redis
from harness.drills.caller import Caller
from harness.drills.local import LocalTarget, open_target
from harness.runner import hold_directory
from harness.soak.following import Following
from harness.soak.history import Answered, Asked, History, KeysLeft, Left, Noted, Planned, Recorded, now_ms
from harness.soak.load import PRESENCE_EVERY_S, Load
from harness.soak.nemesis import Nemesis
from harness.soak.plan import DEADLINE_S, GATEWAYS, RELAYS, WORKERS, Plan, Request
from harness.soak.witness import Witness

T = TypeVar("T")

HISTORY = "history.jsonl"
# A job's deadline, the sweeper's round, and a store that was just back.
ENDS_WITHIN_S = DEADLINE_S + 15.0
# The last of what a source says, after it was refused for half a minute and its run was taken over.
RUNS_END_WITHIN_S = 60.0
# The longest pause between two dials of a sidecar, and the dial.
ONLINE_WITHIN_S = 40.0
# All that follows the end of a job: settled, its entries removed, its machine's keys gone.
TIDY_WITHIN_S = 15.0
POLL_EVERY_S = 0.1
ASKED_AT_ONCE = 8

Say = Callable[[str], None]


async def run_soak(plan: Plan, directory: Path, say: Say) -> History:
    """Carry a plan out in a state directory, which loses what an earlier soak left there.

    Args:
        say: takes a line about where the run stands, again and again.

    Returns:
        The whole history, ready for `checker.check`; also on disk as `HISTORY` in the directory.

    Raises:
        DirectoryBusy: another soak uses the directory.
        ProcessFailed, DrillFailed: something did not start (again), or did not leave.
    """
    with _emptied(directory), contextlib.closing(History(directory / HISTORY)) as history:
        history.add(Planned(at_ms=now_ms(), plan=plan))
        say("starting the installation")
        async with (
            open_target(
                directory, heartbeat_s=plan.heartbeat_s, gateways=GATEWAYS, workers=WORKERS, relays=RELAYS
            ) as target,
            open_redis(target.redis_url) as redis,
            contextlib.AsyncExitStack() as cleanup,
        ):
            machines = []
            for user in plan.users:
                machine = await target.add_machine(user)
                cleanup.push_async_callback(target.remove_machine, machine)
                machines.append(machine)
            witness = Witness(target, machines, redis, history)
            await _carry_out(plan, target, witness, history, say)
            say("looking at what is left")
            await _look_back(plan, witness, history)
    return history


@contextlib.contextmanager
def _emptied(directory: Path) -> Iterator[None]:
    with hold_directory(directory):
        for old in directory.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        yield


async def _carry_out(
    plan: Plan,
    target: LocalTarget,
    witness: Witness,
    history: History,
    say: Say,
) -> None:
    """The plan, and then, with everything whole again, the rest of what it set going."""
    load = Load(target.api_key, target.gateways, history)
    caller = Caller(target.api_key, target.gateways)
    following = Following(plan, target.agent, caller, target.gateways, target.api_key)
    nemesis = Nemesis(target, witness.machines, following, history)
    async with asyncio.TaskGroup() as onlookers:
        tasks = [
            onlookers.create_task(load.watch(plan.users), name="presence"),
            onlookers.create_task(witness.run(), name="witness"),
            onlookers.create_task(_report(plan, history, nemesis, say), name="report"),
        ]
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(plan), name="load")
            group.create_task(following.run(history), name="following")
            group.create_task(nemesis.run(plan), name="nemesis")
        await target.heal()
        await _settled(witness.count_open, lambda jobs: jobs == 0, within_s=ENDS_WITHIN_S)
        await _settled(witness.users_away, lambda users: not users, within_s=ONLINE_WITHIN_S)
        await _settled(following.count_watching, lambda watchers: watchers == 0, within_s=RUNS_END_WITHIN_S)
        await _settled(lambda: following.leases(witness.evidence), lambda leases: not leases, within_s=TIDY_WITHIN_S)
        await following.write_down(history, witness.evidence)
        await _ask_all_again(load, await witness.records())
        # What was just seen in Redis is also to be told by every gateway.
        await asyncio.sleep(PRESENCE_EVERY_S)
        for task in tasks:
            task.cancel()
    await following.close()
    await caller.close()
    await load.close()


async def _look_back(plan: Plan, witness: Witness, history: History) -> None:
    """What is left while the machines are connected, what is left once they have gone, records and logs."""
    for user in plan.users:
        queue = await _settled(lambda user=user: witness.queue(user), _is_empty, within_s=TIDY_WITHIN_S)  # type: ignore[misc]
        history.add(queue)
    for machine in witness.machines:
        await machine.stop()
    for user in plan.users:
        names = await _settled(lambda user=user: witness.keys(user), _has_none, within_s=TIDY_WITHIN_S)  # type: ignore[misc]
        history.add(names)
    witness.read_notes()
    for record in await witness.records():
        history.add(record)
    await witness.read_logs()


def _is_empty(queue: Left) -> bool:
    return queue.entries == queue.pending == queue.indexed == 0


def _has_none(left: KeysLeft) -> bool:
    return not left.names


async def _settled(look: Callable[[], Awaitable[T]], is_settled: Callable[[T], bool], *, within_s: float) -> T:
    """What `look` sees once that is as it should be, or at the end of the time. The stores must be up then."""
    deadline = time.monotonic() + within_s
    while True:
        last = time.monotonic() > deadline
        try:
            seen = await look()
        except (StoreUnavailable, psycopg.OperationalError):
            if last:
                raise
        else:
            if last or is_settled(seen):
                return seen
        await asyncio.sleep(POLL_EVERY_S)


async def _ask_all_again(load: Load, records: Sequence[Recorded]) -> None:
    """Submit every key that has a record once more: each must be answered from it."""
    places = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(number: int, record: Recorded) -> None:
        async with places:
            seconds = msgspec.json.decode(record.args)["seconds"]
            await load.carry_out(
                Request(
                    at_s=0.0,
                    verb="submit",
                    user=record.user,
                    key=record.key,
                    gateway=number,
                    tool=record.tool,  # type: ignore[arg-type]  # it was submitted by us
                    seconds=seconds,
                )
            )

    async with asyncio.TaskGroup() as group:
        for number, record in enumerate(records):
            group.create_task(ask(number, record))


async def _report(plan: Plan, history: History, nemesis: Nemesis, say: Say) -> None:
    """A line a second, until cancelled."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    read = 0
    while True:
        for event in history.events[read:]:
            match event:
                case Asked():
                    counts["asked"] += 1
                case Answered():
                    counts["ended" if event.ended_at else "accepted" if event.job else "refused or broken"] += 1
                case Noted(what="began"):
                    counts["executions"] += 1
        read = len(history.events)
        elapsed_s = time.monotonic() - began
        where = f"{elapsed_s:.0f} of {plan.seconds:.0f} s" if elapsed_s < plan.seconds else "waiting for the last jobs"
        shown = ", ".join(f"{name} {times}" for name, times in counts.items())
        say(f"{where}: {shown}; now {', '.join(nemesis.under_way) or 'no fault'}")
        await asyncio.sleep(1.0)
