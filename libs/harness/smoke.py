"""Smoke: one job, one run and one turn through an installation that is up, seen from outside.

    python -m harness.smoke        TOWLINE_URL, TOWLINE_API_KEY (all scopes), TOWLINE_BRIDGE_URL, SMOKE_AGENT_URL and
                                   SMOKE_MODEL_URL say where everything is; all but the key may be arguments

It brings a machine of its own: a sidecar for a user of this run alone, whose one tool counts how often it ran. The
stand-ins must be where the installation and this program both reach them, under the same names, and the installation
must allow that (TOWLINE_EGRESS_ALLOW).

Promises: a line for each thing that was as promised; the first one that was not ends it with exit code 1 and its
          reason. What it made is removed; what it asked for under its own keys expires by itself. May be run any number
          of times, also side by side and while replicas die.
Used by:  make compose-smoke, make kind-smoke, CI.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import structlog
from rich.console import Console

from harness.agent.stream import Script
from harness.demo_timeline import StepFailed, Timeline, expect
from towline.client import (
    DEFAULT_URL,
    AgentPut,
    ApiProblem,
    Client,
    End,
    Gap,
    GatewayUnreachable,
    InvalidRequest,
    RunEvent,
    SourceFollow,
    outcome_of,
)
from towline.sidecar import ConfigurationError, Sidecar, tool
from towline.wire import events

# A worker or relay may be killed meanwhile: its work goes on elsewhere within 15 s.
STEP_WITHIN_S = 60.0
CONNECTED_WITHIN_S = 30.0
POLL_EVERY_S = 0.1
# Two seconds of a stream, so that there is a middle to be cut in.
RUN_EVENTS = 200
RUN_EVENTS_PER_S = 100.0
# A model that asks for one tool and then answers.
MODEL = "tools-1"
EXIT_FAILED = 1
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything is.

    Attributes:
        gateway: the API.
        bridge: what sidecars dial.
        agent, model: the stand-ins, as this program and the installation reach them.
    """

    gateway: str
    bridge: str
    agent: str
    model: str


@dataclass(slots=True)
class Machine:
    """The user of this run and what ran on the machine. `marks`: one for each execution, in order."""

    user: str
    marks: list[str] = field(default_factory=list)

    def ran(self, mark: str) -> int:
        """How often."""
        return self.marks.count(mark)


async def run_smoke(addresses: Addresses, api_key: str, timeline: Timeline) -> None:
    """Go through all steps.

    Raises:
        StepFailed: something was not as promised.
        ApiProblem, GatewayUnreachable, InvalidRequest: as the client raises them.
        ConfigurationError: no sidecar can dial that address.
    """
    name = f"smoke-{secrets.token_hex(4)}"
    async with Client(addresses.gateway, api_key) as client:
        timeline.say(f"gateway {addresses.gateway}, user {name}")
        async with _connected_machine(client, addresses.bridge, name, timeline) as machine:
            async with _step("job"):
                await _job(client, machine, timeline)
            async with _step("run"):
                await _run(client, addresses.agent, name, timeline)
            async with _step("turn"):
                await _echo_turn(client, name, timeline)
                await _model_turn(client, addresses.model, machine, timeline)
            presence = await client.presence(machine.user)
            expect(presence.queued == 0, f"{presence.queued} jobs are left in the machine's queue")
            timeline.say("machine: nothing is left in its queue")
    timeline.say("[bold green]ok[/bold green]")


@contextlib.asynccontextmanager
async def _step(name: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(STEP_WITHIN_S):
            yield
    except TimeoutError:
        raise StepFailed(f"{name}: not done within {STEP_WITHIN_S:g} s") from None


@contextlib.asynccontextmanager
async def _connected_machine(client: Client, bridge_url: str, user: str, timeline: Timeline) -> AsyncIterator[Machine]:
    machine = Machine(user)

    @tool
    async def note(mark: str) -> str:
        """Note that this ran: a side effect, so it may happen once."""
        machine.marks.append(mark)
        return mark

    token = await client.mint_machine_token(user, name="smoke")
    try:
        with tempfile.TemporaryDirectory(prefix="towline-smoke-") as directory:
            sidecar = Sidecar(
                url=bridge_url,
                token=token.token,
                state_dir=Path(directory),
                tools=[note],
                name="smoke",
                # Inside a cluster the bridge is plain; outside, the address says wss://.
                allow_insecure=True,
            )
            serving = asyncio.create_task(sidecar.run(), name="sidecar")
            try:
                worker = await _online(client, user, bridge_url)
                timeline.say(f"machine: its sidecar is connected through {bridge_url}, held by {worker}")
                yield machine
            finally:
                sidecar.stop()
                await serving
    finally:
        await client.revoke_machine_token(user, token.token_id)


async def _online(client: Client, user: str, bridge_url: str) -> str:
    deadline = time.monotonic() + CONNECTED_WITHIN_S
    while (presence := await client.presence(user)).state != "online":
        expect(
            time.monotonic() < deadline,
            f"the sidecar is not connected through {bridge_url} within {CONNECTED_WITHIN_S:g} s; the user's presence is"
            f" {presence.state!r}",
        )
        await asyncio.sleep(POLL_EVERY_S)
    return presence.worker or "nobody"


async def _job(client: Client, machine: Machine, timeline: Timeline) -> None:
    key = f"{machine.user}-job"
    began = time.monotonic()
    job = await client.submit(machine.user, "note", {"mark": key}, idempotency_key=key, wait_s=STEP_WITHIN_S)
    took_ms = (time.monotonic() - began) * 1000
    outcome = outcome_of(job)
    expect(job.state == "completed", f"job: it ended as {job.state}: {outcome and outcome.error}")
    expect(outcome is not None and outcome.result == key, f"job: the answer is {outcome and outcome.result!r}")
    expect(not job.replayed, "job: the first answer of a key is marked as a replay")
    timeline.say(f"job: answered in {took_ms:.0f} ms")
    again = await client.submit(machine.user, "note", {"mark": key}, idempotency_key=key, wait_s=STEP_WITHIN_S)
    expect(again.job == job.job and again.outcome == job.outcome, "job: the same key has another answer")
    expect(again.replayed, "job: the same key's answer is not marked as a replay")
    expect(machine.ran(key) == 1, f"job: it ran {machine.ran(key)} times")
    timeline.say("job: the same key again → the same answer, marked as a replay; it ran once")


async def _run(client: Client, agent_url: str, run: str, timeline: Timeline) -> None:
    script = Script(rate=RUN_EVENTS_PER_S, total=RUN_EVENTS)
    try:
        async with httpx.AsyncClient(base_url=agent_url) as agent:
            (await agent.put(f"/control/{run}", content=msgspec.json.encode(script))).raise_for_status()
    except httpx.HTTPError as error:
        raise StepFailed(f"run: the stand-in agent at {agent_url} does not answer: {error!r}") from error
    await client.follow_run(run, [SourceFollow("agent", f"{agent_url}/streams/{run}", "ids")])
    seen: list[int] = []
    state = ""
    async with contextlib.aclosing(client.events(run)) as stream:
        async for item in stream:
            if isinstance(item, Gap):
                raise StepFailed(f"run: a gap after {len(seen)} events: {item}")
            if isinstance(item, End):
                state = item.state
            elif isinstance(item, RunEvent) and not events.is_own(item.type):
                seen.append(json.loads(item.data)["n"])
    expect(state == "completed", f"run: it ended as {state or 'nothing'}")
    # One more than was asked for: the terminal event.
    expected = list(range(1, RUN_EVENTS + 2))
    expect(set(seen) == set(expected), f"run: {len(set(seen))} events of {len(expected)} came")
    expect(seen == expected, "run: events came twice, or out of order")
    timeline.say(f"run: {len(seen)} events of {len(expected)}, in order, none missing, none twice; it ended {state}")


async def _echo_turn(client: Client, name: str, timeline: Timeline) -> None:
    async with _agent(client, f"{name}-echo", AgentPut("echo")) as agent:
        thread = await client.create_thread(agent)
        text = f"hello from {name}"
        began = time.monotonic()
        said = await _answer(client, thread.thread, text)
        took_ms = (time.monotonic() - began) * 1000
        expect(said == text, f"turn: the echo agent answered {said!r}")
        timeline.say(f"turn: the echo agent answered in {took_ms:.0f} ms")


async def _model_turn(client: Client, model_url: str, machine: Machine, timeline: Timeline) -> None:
    mark = f"{machine.user}-turn"
    definition = AgentPut("openai", url=model_url, model=MODEL, api_key="any", tools=["note"])
    async with _agent(client, f"{machine.user}-model", definition) as agent:
        thread = await client.create_thread(agent, user=machine.user)
        said = await _answer(client, thread.thread, f'Note this, please.\ncall note {{"mark": "{mark}"}}')
        expect(mark in said, f"turn: the answer does not say what the tool told the model: {said!r}")
        expect(machine.ran(mark) == 1, f"turn: its tool ran {machine.ran(mark)} times")
        rows = [row async for row in client.usage(thread=thread.thread)]
        expect(len(rows) == 1, f"turn: it has {len(rows)} usage rows")
        expect(
            (rows[0].model_calls, rows[0].tool_calls) == (2, 1),
            f"turn: {rows[0].model_calls} model calls and {rows[0].tool_calls} tool calls are on its usage row",
        )
        timeline.say("turn: the model's tool ran once on the machine, the answer says so; one usage row")


@contextlib.asynccontextmanager
async def _agent(client: Client, agent: str, definition: AgentPut) -> AsyncIterator[str]:
    await client.put_agent(agent, definition)
    try:
        yield agent
    finally:
        await client.delete_agent(agent)


async def _answer(client: Client, thread: str, text: str) -> str:
    posted = await client.post_entry(thread, text, idempotency_key="smoke")
    turn = await client.read_turn(posted.turn.turn, wait_s=STEP_WITHIN_S)
    outcome = turn.outcome
    expect(turn.state == "completed" and bool(outcome), f"turn: it ended as {turn.state}: {outcome}")
    return (outcome.text or "") if outcome else ""


def _read_arguments() -> Addresses:
    parser = argparse.ArgumentParser(
        prog="python -m harness.smoke",
        description="One job, one run and one turn through an installation. The API key is read from TOWLINE_API_KEY.",
    )
    for option, variable, default, what in (
        ("--url", "TOWLINE_URL", DEFAULT_URL, "the gateway"),
        ("--bridge-url", "TOWLINE_BRIDGE_URL", "ws://127.0.0.1:8081", "what sidecars dial"),
        ("--agent-url", "SMOKE_AGENT_URL", "http://127.0.0.1:9100", "the stand-in agent"),
        ("--model-url", "SMOKE_MODEL_URL", "http://127.0.0.1:9101/v1", "the stand-in model"),
    ):
        value = os.environ.get(variable) or default
        parser.add_argument(option, default=value, metavar="URL", help=f"{what}; {variable}, or {default}")
    given = parser.parse_args()
    for url in (given.url, given.bridge_url, given.agent_url, given.model_url):
        if not urlsplit(url).hostname:
            parser.error(f"{url!r} is no URL")
    return Addresses(given.url, given.bridge_url, given.agent_url.rstrip("/"), given.model_url)


def main() -> int:
    """Be the program. Returns its exit code."""
    addresses = _read_arguments()
    api_key = os.environ.get("TOWLINE_API_KEY", "")
    if not api_key:
        print("smoke: TOWLINE_API_KEY is not set", file=sys.stderr)
        return EXIT_USAGE
    # Of the sidecar only what is wrong with it, and beside the timeline.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        asyncio.run(run_smoke(addresses, api_key, Timeline(Console())))
    except (StepFailed, ApiProblem, GatewayUnreachable) as error:
        print(f"smoke failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (InvalidRequest, ConfigurationError) as error:
        print(f"smoke: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
