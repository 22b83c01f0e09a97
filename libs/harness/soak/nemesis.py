"""The nemesis of a run: makes the planned faults and undoes them.

Promises: one fault at a time on each target, several targets at once; each fault is in the history from before it is
          made until what it stopped serves again; when `run` returns nothing is left broken.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg
import redis.asyncio

from harness.drills.laptops import Laptop
from harness.drills.local import LocalTarget
from harness.drills.local_parts import LocalReplica, LocalStore
from harness.drills.tools import NOTES_VARIABLE
from harness.soak.following import Following
from harness.soak.history import FaultBegan, FaultEnded, History, now_ms
from harness.soak.plan import FAULTS, Fault, Plan

_TERMINATE = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() and usename = user"


def notes_of(machine: Laptop) -> Path:
    """Where a machine's tools note their executions; the nemesis notes `died` there when their process has gone."""
    return Path(machine.sidecar.env[NOTES_VARIABLE])


class Nemesis:
    """See the module.

    Attributes:
        under_way: kinds of the faults that are not undone yet.
    """

    def __init__(self, target: LocalTarget, machines: Sequence[Laptop], following: Following, history: History) -> None:
        self.under_way: list[str] = []
        self._target = target
        self._machines = machines
        self._following = following
        self._history = history
        self._locks: dict[str, asyncio.Lock] = {}

    async def run(self, plan: Plan) -> None:
        """Make a plan's faults, each at its time or as soon as its target is whole; returns when all are undone."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, fault in enumerate(plan.faults, 1):
                await asyncio.sleep(began + fault.at_s - time.monotonic())
                group.create_task(self._inflict(number, fault, plan), name=f"{fault.kind}:{number}")

    async def _inflict(self, number: int, fault: Fault, plan: Plan) -> None:
        name = self._name(fault, plan)
        async with self._locks.setdefault(name, asyncio.Lock()):
            self._history.add(FaultBegan(at_ms=now_ms(), fault=number, kind=fault.kind, target=name))
            self.under_way.append(fault.kind)
            match FAULTS[fault.kind].role:
                case "worker":
                    await self._hit_replica(self._target.workers[fault.target], fault)
                case "gateway":
                    await self._hit_replica(self._target.gateways[fault.target], fault)
                case "relay":
                    await self._hit_replica(self._target.relays[fault.target], fault)
                case "upstream":
                    await self._following.flap(fault.target, fault.kind)
                case "machine":
                    await self._hit_machine(self._machines[fault.target], fault)
                case "redis":
                    await self._hit_store(self._target.redis, fault)
                case "postgres":
                    await self._hit_store(self._target.postgres, fault)
            self.under_way.remove(fault.kind)
            self._history.add(FaultEnded(at_ms=now_ms(), fault=number))

    def _name(self, fault: Fault, plan: Plan) -> str:
        match FAULTS[fault.kind].role:
            case "worker":
                return self._target.workers[fault.target].name
            case "gateway":
                return self._target.gateways[fault.target].name
            case "relay":
                return self._target.relays[fault.target].name
            case "upstream":
                return plan.runs[fault.target].run
            case "machine":
                return self._machines[fault.target].user
            case role:
                return role

    async def _hit_replica(self, replica: LocalReplica, fault: Fault) -> None:
        match fault.kind:
            case "worker-kill" | "gateway-kill" | "relay-kill":
                await replica.kill()
                await asyncio.sleep(fault.lasts_s)
                await replica.start()
            case "worker-term" | "gateway-term" | "relay-term":
                await replica.term()
                await replica.start()
            case "worker-freeze" | "relay-freeze":
                await replica.freeze()
                await asyncio.sleep(fault.lasts_s)
                await replica.thaw()
            case kind:
                raise ValueError(f"no such fault: {kind}")

    async def _hit_machine(self, machine: Laptop, fault: Fault) -> None:
        match fault.kind:
            case "sidecar-kill" | "sidecar-term":
                await (machine.kill() if fault.kind == "sidecar-kill" else machine.stop())
                with notes_of(machine).open("a") as notes:
                    notes.write("died\n")
                await asyncio.sleep(fault.lasts_s)
                await machine.start(connected=False)
            case "sidecar-freeze":
                await machine.freeze()
                await asyncio.sleep(fault.lasts_s)
                await machine.thaw()
            case "socket-cut":
                await machine.cut()
            case "link-stall":
                machine.proxy.stall()
                await asyncio.sleep(fault.lasts_s)
                await machine.proxy.heal()
            case kind:
                raise ValueError(f"no such fault: {kind}")

    async def _hit_store(self, store: LocalStore, fault: Fault) -> None:
        match fault.kind:
            case "redis-restart" | "postgres-restart":
                await store.stop()
                await asyncio.sleep(fault.lasts_s)
                await store.start()
            case "redis-kill" | "postgres-kill":
                store.server.kill()
                await asyncio.sleep(fault.lasts_s)
                await store.start()
            case "redis-freeze" | "postgres-freeze":
                store.server.freeze()
                await asyncio.sleep(fault.lasts_s)
                store.server.thaw()
            case "redis-flush":
                await self._target.redis.flush()
            case "redis-script-flush":
                async with redis.asyncio.Redis.from_url(self._target.redis_url) as client:
                    await client.script_flush()
            case "postgres-terminate":
                url = self._target.postgres_url
                async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                    await connection.execute(_TERMINATE)
            case kind:
                raise ValueError(f"no such fault: {kind}")
