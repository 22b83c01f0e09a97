"""Load for a cluster that is being disturbed: jobs, runs and turns for so many seconds, and what came of each.

usage: kubectl -n towline exec -i deploy/stand-in -- env TOWLINE_API_KEY=... python - --seconds 30 < kind/load.py

It runs inside the cluster, beside the stand-ins, and plays a product's backend, its users' machines and its watchers.
A request for a job that is refused or breaks is counted, and sent again under the same key; so what is lost in the end
was lost by the product.

Owns:     its users' machines (sidecars of this process, whose tool counts its executions), its runs and threads; all of
          them are new in each process.
Promises: it ends by itself, `ENDS_WITHIN_S` after the last request at the latest. Each count is printed beside what was
          expected; the exit code is 1 if one differs.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import structlog

from towline.client import AgentPut, ApiProblem, Client, End, Gap, GatewayUnreachable, RunEvent, SourceFollow
from towline.sidecar import Sidecar, tool
from towline.wire import events

T = TypeVar("T")

AGENT_URL = os.environ.get("SMOKE_AGENT_URL", "http://stand-in:9100")
MODEL_URL = os.environ.get("SMOKE_MODEL_URL", "http://stand-in:9101/v1")
# Over all of it, whatever is done to the cluster meanwhile.
ENDS_WITHIN_S = 180.0
# A caller that waits asks again this often, so that it notices a node that has vanished without a word.
WAIT_S = 5
ANSWERS_WITHIN_S = WAIT_S + 10.0
PAUSE_S = 0.2
TELL_EVERY_S = 5.0
CALLERS_MAX = 150

QUICK_MACHINES = 3
QUICK_JOBS_PER_S = 6.0
QUICK_JOB_S = 0.05
# One machine more does long jobs one after another, so that any cut comes in the middle of one.
LONG_JOB_S = 3.0
RUNS = 2
EVENTS_PER_S = 20.0
# The agent of the turns: one tool call, and then an answer that it speaks for two seconds.
MODEL = "tools-1+slow-2"


class Submitted(NamedTuple):
    """A job that was asked for. `ended`: its state and outcome, as its caller was told; None: never told."""

    user: str
    key: str
    body: dict[str, Any]
    ended: tuple[str, str] | None


class Load:
    """See the module."""

    def __init__(self, client: Client, http: httpx.AsyncClient, *, seconds: float) -> None:
        self.name = f"load-{uuid.uuid4().hex[:8]}"
        self.jobs: list[Submitted] = []
        self.refusals: Counter[str] = Counter()
        self.executions: Counter[str] = Counter()
        self.told: dict[str, list[int]] = {}
        self.said: dict[str, int] = {}
        self.gaps = 0
        self.turns: Counter[str] = Counter()
        self.turn_marks: list[str] = []
        self.second_answers = 0
        # A caller more would only slow the others down, and the machines beside them: the next one waits.
        self._places = asyncio.Semaphore(CALLERS_MAX)
        self.worst_s = dict.fromkeys(("a job's answer", "news of a run", "a turn's end"), 0.0)
        self._client = client
        self._http = http
        self._seconds = seconds
        self._until = 0.0

    async def play(self) -> None:
        """Let the machines come, make the load, read every answer again, and let the machines leave."""
        users = [f"{self.name}-{n}" for n in range(QUICK_MACHINES + 1)]
        async with contextlib.AsyncExitStack() as machines:
            for user in users:
                await machines.enter_async_context(self._machine(user))
            await self._client.put_agent(
                self.name, AgentPut("openai", url=MODEL_URL, model=MODEL, api_key="any", tools=["work"])
            )
            print(f"{len(users)} machines are online; load for {self._seconds:g} s", flush=True)
            self._until = time.monotonic() + self._seconds
            async with asyncio.timeout(self._seconds + ENDS_WITHIN_S):
                teller = asyncio.create_task(self._tell(), name="teller")
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._submit_long(users[0]), name="long jobs")
                    group.create_task(self._submit_quick(users[1:], group), name="quick jobs")
                    group.create_task(self._talk(users[1]), name="turns")
                    for n in range(RUNS):
                        group.create_task(self._watch(f"{self.name}-run-{n}"), name=f"run {n}")
                teller.cancel()
                await self._ask_all_again()
            await self._client.delete_agent(self.name)

    @contextlib.asynccontextmanager
    async def _machine(self, user: str) -> AsyncIterator[None]:
        @tool
        async def work(mark: str, seconds: float) -> str:
            """Have a side effect, which takes a while: runs at most once."""
            self.executions[mark] += 1
            await asyncio.sleep(seconds)
            return mark

        token = (await self._client.mint_machine_token(user)).token
        with tempfile.TemporaryDirectory() as directory:
            url = os.environ.get("TOWLINE_BRIDGE_URL", "ws://worker:8081")
            sidecar = Sidecar(url=url, state_dir=Path(directory), tools=[work], token=token, allow_insecure=True)
            running = asyncio.create_task(sidecar.run(), name=user)
            async with asyncio.timeout(30):
                while (await self._client.presence(user)).state != "online":  # noqa: ASYNC110  (no event tells)
                    await asyncio.sleep(PAUSE_S)
            try:
                yield
            finally:
                sidecar.stop()
                await running

    # ---- jobs

    async def _submit_long(self, user: str) -> None:
        number = 0
        while time.monotonic() < self._until:
            number += 1
            await self._submit(user, f"long-{number}", LONG_JOB_S)

    async def _submit_quick(self, users: list[str], group: asyncio.TaskGroup) -> None:
        began = time.monotonic()
        for number in range(int(self._seconds * QUICK_JOBS_PER_S)):
            await asyncio.sleep(began + number / QUICK_JOBS_PER_S - time.monotonic())
            await self._places.acquire()
            if time.monotonic() > self._until:
                break
            group.create_task(self._submit_one(users[number % len(users)], f"quick-{number}"))

    async def _submit_one(self, user: str, key: str) -> None:
        try:
            await self._submit(user, key, QUICK_JOB_S)
        finally:
            self._places.release()

    async def _submit(self, user: str, key: str, seconds: float) -> None:
        began = time.monotonic()
        args = {"mark": f"{user}/{key}", "seconds": seconds}
        # Queued: a machine whose worker's node has vanished may be offline for a while.
        body = {"name": "work", "args": args, "if_offline": "queue"}
        job: dict[str, Any] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDS_WITHIN_S):
                while not job.get("ended_at"):
                    job = await self._ask(user, key, body) or job
        ended = (job["state"], json.dumps(job.get("outcome"))) if job.get("ended_at") else None
        self.jobs.append(Submitted(user, key, body, ended))
        self._waited("a job's answer", time.monotonic() - began - seconds)

    async def _ask(self, user: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request, and a pause if it was not answered with the job; that is counted."""
        headers = {"Idempotency-Key": f'"{key}"', "Prefer": f"wait={WAIT_S}"}
        try:
            response = await self._http.post(f"/v1/users/{user}/jobs", json=body, headers=headers)
        except httpx.TransportError as error:
            self.refusals[type(error).__name__] += 1
        else:
            if response.is_success:
                job: dict[str, Any] = response.json()
                return job
            self.refusals[f"{response.status_code} {response.text[:80]}"] += 1
        await asyncio.sleep(PAUSE_S)
        return {}

    async def _ask_all_again(self) -> None:
        """Every key once more: the answer must be the same, and be marked as a replay."""
        for job in self.jobs:
            again: dict[str, Any] = {}
            while not again:
                again = await self._ask(job.user, job.key, job.body)
            told = (again["state"], json.dumps(again.get("outcome")))
            self.second_answers += job.ended is not None and (told != job.ended or not again["replayed"])

    # ---- runs

    async def _watch(self, run: str) -> None:
        """Have a run followed and watch it to its end, which comes when the load is over."""
        (await self._http.put(f"{AGENT_URL}/control/{run}", json={"rate": EVENTS_PER_S})).raise_for_status()
        source = SourceFollow("agent", f"{AGENT_URL}/streams/{run}", "ids")
        await self._persist(partial(self._client.follow_run, run, [source]))
        ending = asyncio.create_task(self._end(run), name=f"end of {run}")
        seen = self.told[run] = []
        last = time.monotonic()
        async with contextlib.aclosing(self._client.events(run)) as stream:
            async for item in stream:
                now = time.monotonic()
                if isinstance(item, RunEvent) and not events.is_own(item.type):
                    seen.append(json.loads(item.data)["n"])
                    self._waited("news of a run", now - last)
                    last = now
                self.gaps += isinstance(item, Gap)
                if isinstance(item, End):
                    break
        await ending

    async def _end(self, run: str) -> None:
        await asyncio.sleep(self._until - time.monotonic())
        answer = await self._http.post(f"{AGENT_URL}/control/{run}/end", json={})
        self.said[run] = answer.raise_for_status().json()["emitted"]

    # ---- turns

    async def _talk(self, user: str) -> None:
        """One thread, one turn after another; each calls the machine's tool."""
        thread = (await self._persist(partial(self._client.create_thread, self.name, user=user))).thread
        number = 0
        while time.monotonic() < self._until:
            number += 1
            began = time.monotonic()
            key = f"turn-{number}"
            mark = f"{user}/{key}"
            text = f"Please work ({key}).\ncall work " + json.dumps({"mark": mark, "seconds": QUICK_JOB_S})
            self.turn_marks.append(mark)
            posted = await self._persist(partial(self._client.post_entry, thread, text, idempotency_key=key))
            turn = posted.turn
            while not turn.terminal:
                turn = await self._persist(partial(self._client.read_turn, turn.turn, wait_s=WAIT_S))
            self.turns[turn.state] += 1
            self._waited("a turn's end", time.monotonic() - began)

    # ---- all

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Do a call of the client again until it is answered; `play` has a limit for all of it."""
        while True:
            try:
                return await call()
            except GatewayUnreachable:
                pass
            except ApiProblem as problem:
                if problem.status < 500:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _tell(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            answered = sum(job.ended is not None for job in self.jobs)
            print(
                f"{time.monotonic() - began:5.0f} s  jobs {answered}, requests refused or broken"
                f" {self.refusals.total()}, events {sum(map(len, self.told.values()))}, turns {self.turns.total()}",
                flush=True,
            )

    def _waited(self, what: str, seconds: float) -> None:
        self.worst_s[what] = max(self.worst_s[what], seconds)

    def report(self, *, refusals_max: int | None) -> bool:
        """Print every count beside what was expected. Returns whether all are as they should be."""
        executions = [self.executions[f"{job.user}/{job.key}"] for job in self.jobs]
        tool_calls = [self.executions[mark] for mark in self.turn_marks]
        missing = [n for run, said in self.said.items() for n in set(range(1, said + 1)) - set(self.told[run])]
        rows: list[tuple[str, object, object]] = [
            ("callers never told", 0, sum(job.ended is None for job in self.jobs)),
            (
                "jobs completed",
                len(self.jobs),
                sum(job.ended is not None and job.ended[0] == "completed" for job in self.jobs),
            ),
            ("jobs executed once", len(self.jobs), executions.count(1)),
            ("second answers that differ", 0, self.second_answers),
            ("events missing", 0, len(missing)),
            ("events twice or out of order", 0, sum(seen != sorted(set(seen)) for seen in self.told.values())),
            ("gaps", 0, self.gaps),
            ("turns completed", self.turns.total(), self.turns["completed"]),
            ("tool calls of turns executed once", len(tool_calls), tool_calls.count(1)),
        ]
        if refusals_max is not None:
            rows.append(("requests refused or broken", refusals_max, self.refusals.total()))
        for what, expected, measured in rows:
            mark = "ok      " if expected == measured else "VIOLATED"
            print(f"  {mark}  {what}: expected {expected}, measured {measured}")
        for why, count in self.refusals.most_common(5):
            print(f"  refused or broken, and sent again: {count} x {why}")
        for what, seconds in self.worst_s.items():
            print(f"  longest wait for {what}: {seconds:.1f} s")
        is_kept = all(expected == measured for _, expected, measured in rows)
        print("all as promised" if is_kept else "not as promised")
        return is_kept


async def _main() -> int:
    parser = argparse.ArgumentParser(description="Jobs, runs and turns for a while, and what came of them.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--refusals-max", type=int, help="how many requests may be refused or break; default: any number"
    )
    options = parser.parse_args()
    # The machines' logs, of which only trouble is of interest here.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    url, api_key = os.environ.get("TOWLINE_URL", "http://gateway:8080"), os.environ["TOWLINE_API_KEY"]
    limits = httpx.Limits(max_connections=None, keepalive_expiry=4.0)
    headers = {"Authorization": f"Bearer {api_key}"}
    async with (
        Client(url, api_key) as client,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWERS_WITHIN_S, limits=limits) as http,
    ):
        load = Load(client, http, seconds=options.seconds)
        await load.play()
        return 0 if load.report(refusals_max=options.refusals_max) else 1


sys.exit(asyncio.run(_main()))
