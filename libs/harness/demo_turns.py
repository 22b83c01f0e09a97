"""The demonstration's turn: a thread whose agent uses the laptop and answers live, while its worker dies."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.demo_timeline import Returns, StepFailed, expect
from harness.model import Model, repeated
from harness.stack import Stack, Worker
from towline.client import AgentPut, Client, ThreadGap
from towline.wire import events
from towline.wire.thread_events import Attempt, Delta, ToolCall, ToolResult
from towline.wire.threads import Turn

AGENT = "clerk"
# Asks for one tool, and then speaks for as long.
MODEL = "tools-1+slow-3"
QUESTION = 'Please order lunch.\ncall fill_form {"order": "order-18", "seconds": 1}'
# How many pieces of the answer the watcher sees before the worker is killed.
PIECES = 10
TURN_WITHIN_S = 60.0


async def show_killed_turn(
    say: Callable[[str], None],
    stack: Stack,
    one: Client,
    two: Client,
    *,
    user: str,
    executions: Path,
    returns: Returns,
    silent: asyncio.Event,
) -> None:
    """Play it; the worker that was killed is on its way back then.

    Args:
        silent: set when the worker has been killed: nothing is to be seen until its claim lapses.

    Raises: StepFailed.
    """
    await returns.wait()
    async with Model() as model:
        agent = AgentPut("openai", url=model.url, model=MODEL, api_key="any", tools=["fill_form"])
        await one.put_agent(AGENT, agent)
        thread = await one.create_thread(AGENT, user=user)
        began = time.monotonic()
        posted = await one.post_entry(thread.thread, QUESTION, idempotency_key="lunch")
        took_ms = (time.monotonic() - began) * 1000
        say(f"gateway 1: an entry for the agent {AGENT!r} (a stand-in model) is accepted in {took_ms:.1f} ms")
        async with asyncio.timeout(TURN_WITHIN_S):
            pieces, ended = await _watch(say, stack, two, posted.turn, returns=returns, silent=silent)
        expect(ended.state == "completed", f"the turn ended as {ended.state}")
        expect("".join(pieces) == (ended.outcome.text if ended.outcome else ""), "the pieces must say the answer")
        filled = executions.read_text().splitlines().count("order-18")
        expect(filled == 1, f"the form was filled {filled} times")
        expect(repeated(model.requests) == 0, "a model call that had been answered was made again")
        usage = [row async for row in one.usage(thread=thread.thread)]
        expect(len(usage) == 1, f"the turn has {len(usage)} usage rows")
        say(
            f"the turn has ended once, after {ended.attempts} attempts: filled {filled} time, finished model calls"
            f" repeated 0, usage rows {len(usage)}"
        )


async def _watch(
    say: Callable[[str], None], stack: Stack, client: Client, turn: Turn, *, returns: Returns, silent: asyncio.Event
) -> tuple[Sequence[str], Turn]:
    """Watch a turn, and kill its worker on the way; returns the pieces since its last start, and how it ended."""
    pieces: list[str] = []
    killed: Worker | None = None
    killed_at = 0.0
    async with contextlib.aclosing(client.follow_turn(turn)) as stream:
        async for item in stream:
            if isinstance(item, ThreadGap):
                raise StepFailed(f"the watcher was told of a gap: {item}")
            if isinstance(item, Turn):
                if killed is None:
                    raise StepFailed("the turn had ended before its worker was killed")
                return pieces, item
            match item.data:
                case Attempt(attempt=attempt):
                    pieces.clear()
                    if item.type == events.TURN_RESTARTED and killed is not None:
                        after_s = time.monotonic() - killed_at
                        say(
                            f"the other worker goes on with the turn, {after_s:.1f} s after the kill; attempt {attempt}"
                        )
                        returns.begin(killed)
                case ToolCall(name=name):
                    say(f"gateway 2: the agent calls {name} on the laptop")
                case ToolResult(state=state):
                    say(f"gateway 2: {'it is' if killed is None else 'as it was told before, it is'} {state}")
                case Delta(text=text):
                    pieces.append(text)
                    if killed is None and len(pieces) == PIECES:
                        killed = _runner(stack, turn)
                        say(f"gateway 2: {''.join(pieces)!r} …")
                        say(f"the agent is speaking; killing {killed.name} (SIGKILL), which runs the turn")
                        killed.kill()
                        killed_at = time.monotonic()
                        silent.set()
    raise StepFailed("the turn's stream ended before the turn")


def _runner(stack: Stack, turn: Turn) -> Worker:
    """The worker that runs the turn: it has begun it, by its log."""
    for worker in stack.workers:
        if turn.turn in worker.read_log():
            return worker
    raise StepFailed("no worker runs the turn")
