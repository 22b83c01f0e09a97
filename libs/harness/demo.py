"""The demonstration: the product on real processes, one timeline of what it promises, then yours to play with.

Each step does what a user would do and says what came back, with times; a step that does not get what it expects ends
the demonstration with an error.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from msgspec import UNSET
from rich.console import Console

from harness.agent import Agent, Script
from harness.demo_timeline import Returns, StepFailed, Timeline, expect, open_returns
from harness.demo_tools import EXECUTIONS_VARIABLE
from harness.demo_turns import show_killed_turn
from harness.runner import temporary_directory
from harness.servers import open_servers
from harness.stack import Service, Stack
from towline.client import AgentPut, Client, End, Gap, RunEvent, SourceFollow, outcome_of
from towline.wire import api, events

USER = "ada"
PAGE = b"<h1>intranet: lunch is at noon</h1>"
LONG_JOB_S = 1.0
KILLED_JOB_S = 2.0
KILLED_WITHIN_S = 20.0

# An agent that gives back what it is told, for whoever plays on.
SAYS_AGAIN = "parrot"
RUN = "lunch-7"
RUN_EVENTS_PER_S = 30.0
# How many events the watcher sees before the relay is killed, and again after that, before the agent is done.
RUN_EVENTS = 30
RUN_WITHIN_S = 40.0


async def run_demo(console: Console) -> None:
    """Play the timeline, then serve until cancelled."""
    say = Timeline(console).say
    with temporary_directory() as directory:
        executions = directory / "executions"
        executions.touch()
        executions.chmod(0o666)
        say("starting PostgreSQL and Valkey")
        async with open_servers(directory / "stores") as servers, contextlib.AsyncExitStack() as cleanup:
            page_url = await cleanup.enter_async_context(_intranet())
            stack = await cleanup.enter_async_context(
                Stack(directory / "stack", postgres_url=servers.postgres_url, redis_url=servers.redis_url)
            )
            say("starting two gateways, two workers and two relays")
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(stack.add_gateway())
                    group.create_task(stack.add_worker())
                    group.create_task(stack.add_relay())
            say(f"starting a sidecar: the laptop of {USER!r}, who dials out and can be dialled by nobody")
            await stack.add_sidecar(
                USER,
                tools=["harness.demo_tools"],
                env={
                    EXECUTIONS_VARIABLE: str(executions),
                    "TOWLINE_HTTP_GET_HOSTS": page_url.removeprefix("http://").partition("/")[0],
                },
            )
            one, two = [
                await cleanup.enter_async_context(Client(gateway.url, stack.api_key)) for gateway in stack.gateways
            ]
            await _echo(say, one, two)
            await _probe_while_busy(say, one, two)
            await _page(say, one, page_url)
            async with open_returns(say) as returns:
                await _killed_worker(say, stack, one, executions, returns)
                await _killed_turn_and_relay(say, stack, one, two, executions=executions, returns=returns)
                await returns.wait()
            await one.put_agent(SAYS_AGAIN, AgentPut("echo"))
            say("[bold green]the timeline is complete[/bold green]")
            _invite(console, stack)
            await asyncio.Event().wait()


async def _echo(say: Callable[[str], None], one: Client, two: Client) -> None:
    began = time.monotonic()
    job = await one.submit(USER, "echo", {"value": "hello"}, idempotency_key="demo-1", wait_s=10)
    took_ms = (time.monotonic() - began) * 1000
    expect(job.state == "completed", f"echo ended as {job.state}")
    say(f"gateway 1: job echo → {_result(job)!r} in {took_ms:.1f} ms")
    for number, client in enumerate((one, two), 1):
        presence = await client.presence(USER)
        say(f"gateway {number}: the machine is {presence.state}, held by {presence.worker}")
        expect(presence.state == "online", "both gateways must see the machine")
    again = await two.submit(USER, "echo", {"value": "hello"}, idempotency_key="demo-1")
    expect(again.replayed and again.job == job.job and again.outcome == job.outcome, "the key must be replayed")
    say("gateway 2: the same key again → the same answer, marked as a replay; nothing ran")


async def _probe_while_busy(say: Callable[[str], None], one: Client, two: Client) -> None:
    job = await one.submit(USER, "sleep", {"seconds": LONG_JOB_S}, idempotency_key="demo-2")
    say(f"gateway 1: a job of {LONG_JOB_S:g} s is running")
    presence = await two.presence(USER, probe=True)
    expect(presence.probed is True, "the probe must be answered")
    say(f"gateway 2: the machine was probed meanwhile and answered in {presence.rtt_ms:.1f} ms")
    job = await one.read_job(job.job, wait_s=LONG_JOB_S * 3)
    expect(job.state == "completed", f"the long job ended as {job.state}")
    say("gateway 1: the long job is done")


async def _page(say: Callable[[str], None], one: Client, url: str) -> None:
    job = await one.submit(USER, "http_get", {"url": url}, idempotency_key="demo-3", wait_s=10)
    expect(job.state == "completed" and PAGE.decode() in str(_result(job)), f"the page: {job.state} {_result(job)!r}")
    say(f"gateway 1: http_get of {url}, which only the laptop may reach → {PAGE.decode()!r}")


async def _killed_worker(
    say: Callable[[str], None], stack: Stack, one: Client, executions: Path, returns: Returns
) -> None:
    args = {"order": "order-17", "seconds": KILLED_JOB_S}
    job = await one.submit(USER, "fill_form", args, idempotency_key="order-17")
    deadline = time.monotonic() + KILLED_WITHIN_S
    while "order-17" not in executions.read_text():
        expect(time.monotonic() < deadline, "fill_form did not start")
        await asyncio.sleep(0.02)
    worker = await _holder(stack.workers, "towline_bridge_sockets")
    say(f"the laptop fills a form for {KILLED_JOB_S:g} s; killing {worker.name} (SIGKILL) in the middle of it")
    worker.kill()
    killed = time.monotonic()
    job = await one.read_job(job.job, wait_s=KILLED_WITHIN_S)
    took_s = time.monotonic() - killed
    count = executions.read_text().splitlines().count("order-17")
    expect(job.state == "completed", f"the form ended as {job.state}")
    expect(count == 1, f"the form was filled {count} times")
    say(f"answered through the other worker, {took_s:.1f} s after the kill: {_result(job)!r}")
    say(f"filled {count} time; the job's key has one answer, now and later")
    returns.begin(worker)


async def _killed_turn_and_relay(
    say: Callable[[str], None], stack: Stack, one: Client, two: Client, *, executions: Path, returns: Returns
) -> None:
    """Kill a turn's worker, and while nothing is to be seen of the turn, a run's relay."""
    silent = asyncio.Event()

    async def kill_relay_in_silence() -> None:
        await silent.wait()
        async with Agent() as agent:
            await _killed_relay(say, stack, one, two, agent=agent, returns=returns)

    meanwhile = asyncio.create_task(kill_relay_in_silence())
    try:
        await show_killed_turn(say, stack, one, two, user=USER, executions=executions, returns=returns, silent=silent)
        await meanwhile
    finally:
        meanwhile.cancel()


async def _killed_relay(
    say: Callable[[str], None], stack: Stack, one: Client, two: Client, *, agent: Agent, returns: Returns
) -> None:
    stream = agent.add("agent", Script(rate=RUN_EVENTS_PER_S))
    await one.follow_run(RUN, [SourceFollow("agent", agent.url("agent"), "ids")])
    say(f"gateway 1: meanwhile run {RUN!r} is followed: an agent in the cloud, {RUN_EVENTS_PER_S:g} events a second")
    seen: list[int] = []
    killed: Service | None = None
    said, killed_at = 0, 0.0  # the agent's newest number when the relay was killed, and when that was
    enough = 0  # the number with which the agent's work is done, once the other relay has taken over
    async with asyncio.timeout(RUN_WITHIN_S):
        async for item in two.events(RUN):
            expect(not isinstance(item, Gap), f"the watcher was told of a gap: {item}")
            if isinstance(item, End):
                say(f"gateway 2: the run has ended, {item.state}, and the watcher was told")
            if not isinstance(item, RunEvent) or events.is_own(item.type):
                continue
            seen.append(json.loads(item.data)["n"])
            if killed is None and len(seen) == RUN_EVENTS:
                killed = await _holder(stack.relays, "towline_relay_runs_owned")
                killed.kill()
                said, killed_at = stream.emitted, time.monotonic()
                say(f"gateway 2: a watcher has seen {len(seen)} events; killing {killed.name} (SIGKILL), which owns it")
            elif killed is not None and seen[-1] == said + 1:
                after_s = time.monotonic() - killed_at
                say(f"the other relay goes on; the watcher has news again {after_s:.1f} s after the kill")
                enough = stream.emitted + RUN_EVENTS
            elif seen[-1] == enough:
                stream.end()
    assert killed is not None, "a relay was killed on the way"
    expect(len(stream.requests) == 2, f"the agent was asked {len(stream.requests)} times, not once by each relay")
    everything = list(range(1, stream.emitted + 1))
    expect(set(seen) == set(everything), f"of {stream.emitted} events the watcher has seen {len(set(seen))}")
    expect(seen == everything, "events came twice, or out of order")
    say(f"the watcher has seen {len(seen)} events of {stream.emitted}: none missing, none twice, in order")
    returns.begin(killed)


async def _holder(services: Sequence[Service], metric: str) -> Service:
    """The first replica whose metric is 1: it holds what there is one of."""
    for service in services:
        with contextlib.suppress(OSError):
            if (await service.read_metrics()).get(metric) == 1:
                return service
    raise StepFailed(f"no replica shows {metric} 1")


def _result(job: api.Job) -> object:
    outcome = outcome_of(job)
    return None if outcome is None else outcome.result if outcome.error is UNSET else outcome.error


def _invite(console: Console, stack: Stack) -> None:
    first, second = stack.gateways
    console.print(
        f"""
Everything stays up until Ctrl-C. In another terminal:

  export TOWLINE_URL={first.url}
  export TOWLINE_API_KEY={stack.api_key}

  .venv/bin/towline jobs submit {USER} echo --arg value=hello --wait 10
  .venv/bin/towline machines probe {USER}
  .venv/bin/towline jobs list {USER}
  .venv/bin/towline runs follow {RUN}
  .venv/bin/towline threads create {SAYS_AGAIN}
  .venv/bin/towline threads say THREAD "hello"
  .venv/bin/towline usage

The other gateway: {second.url}. The API: {first.url}/openapi.json
""",
        highlight=False,
        soft_wrap=True,
    )


@contextlib.asynccontextmanager
async def _intranet() -> AsyncIterator[str]:
    """A page on this machine that stands for what only the user's network can reach."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(PAGE)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + PAGE)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/lunch"
