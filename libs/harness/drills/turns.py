"""Drills of turns that nothing cuts: slow, failing, many at once, cancelled."""

import asyncio
import time

from harness.drills.conversations import Asked, Thread, use
from harness.drills.scene import Scene
from harness.model.behaviour import WORDS_PER_S
from towline.wire import events, threads

# The door answers in milliseconds.
POSTED_WITHIN_S = 0.25
# From the answer at the door to the worker's first word.
STARTED_WITHIN_S = 1.0
FAST_WITHIN_S = 2.0
MANY = 16
# Long enough to post three entries meanwhile, on a machine that does other things.
BUSY_S = 3
# The shortest cap there is: silence ends within it.
CAP_S = 10.0
# Two repetitions at most, after at most a second and at most two.
RETRIED_WITHIN_S = 10.0
CANCELLED_WITHIN_S = 3.0
# A drill goes on this long for what is late, so that it can be said how late it was.
LATE_S = 15.0

# What turns that failed are said to have failed of.
AGENT_REFUSED = "agent-refused"
TIMED_OUT = "turn-timeout"


async def turn_slow(scene: Scene) -> None:
    """A model takes longer than any web request lives; early, late and reconnecting watchers see one turn."""
    thread = await scene.threads.open(f"slow-{scene.slow_s:g}")
    early = scene.threads.watch(thread)
    reconnecting = scene.threads.watch(thread, first=1)
    asked = await scene.threads.say(thread, "Write a long story.")
    posted_at = time.monotonic()
    scene.recovered("posted", posted_at - asked.took_s, posted_at, within_s=POSTED_WITHIN_S)
    await _started(scene, thread, asked, posted_at)
    await scene.threads.speaks(reconnecting, asked)
    await scene.threads.leave(reconnecting)
    scene.say("the model speaks; one watcher has left")
    pieces = len([heard for heard in early.seen if heard.type == events.MESSAGE_DELTA])

    async def has_gone_on() -> bool:
        return len([heard for heard in early.seen if heard.type == events.MESSAGE_DELTA]) > pieces + WORDS_PER_S

    await scene.eventually("the model goes on", has_gone_on)
    scene.threads.watch(thread, first=1)
    scene.threads.come_back(reconnecting)
    scene.say("it is back, and another one begins in the middle")
    turn = await scene.threads.expect(asked, "completed", within_s=scene.slow_s + STARTED_WITHIN_S + 10)
    scene.say(f"answered after {time.monotonic() - posted_at:.1f} s")
    last_word = str(int(scene.slow_s * WORDS_PER_S))
    text = str(turn.outcome.text) if turn.outcome else ""
    scene.check("the answer's last word", last_word, text.rpartition(" ")[2])
    await scene.threads.expect_told(thread)
    opened = reconnecting.opened
    scene.check("streams of the one who came back", ">= 2", opened, is_met=opened >= 2)
    scene.check_same("the pieces say the answer", text, scene.threads.told(thread, asked).text)
    scene.check("model calls", 1, len(await scene.target.model.about(asked.key + ".")))


async def _started(scene: Scene, thread: Thread, asked: Asked, posted_at: float) -> None:
    started_at = await scene.threads.seen(
        thread.watchers[0],
        lambda heard: heard.type == events.TURN_STARTED and heard.turn == asked.turn,
        f"the start of {asked.key}",
    )
    scene.recovered("started", posted_at, started_at, within_s=STARTED_WITHIN_S)


async def turn_failure(scene: Scene) -> None:
    """Agents refuse, fail for a while, break off, answer nonsense and never answer; each turn ends, and says why."""
    await asyncio.gather(
        _fails(scene, "openai", "nobody", AGENT_REFUSED),
        _fails(scene, "openai", "fail-400", AGENT_REFUSED),
        _fails(scene, "http", "fail-422", AGENT_REFUSED),
        _fails(scene, "openai", "hang", TIMED_OUT, within_s=CAP_S + 5),
        _fails(scene, "http", "hang", TIMED_OUT, within_s=CAP_S + 5),
        _recovers(scene, "openai", "fail-500-2", calls=3),
        _recovers(scene, "http", "fail-503-2", calls=3),
        _recovers(scene, "openai", "cut-1", calls=2),
        _recovers(scene, "openai", "malformed-1", calls=2),
        _recovers(scene, "http", "cut-1+sse", calls=2),
    )
    await scene.threads.expect_told()


async def _fails(
    scene: Scene, kind: threads.AgentKind, model: str, code: str, *, within_s: float = FAST_WITHIN_S
) -> None:
    thread = await scene.threads.open(model, kind=kind, turn_cap_s=CAP_S)
    scene.threads.watch(thread)
    asked = await scene.threads.say(thread, "Please.")
    posted_at = time.monotonic()
    turn = await scene.threads.expect(asked, "failed", within_s=within_s + LATE_S, attempts=None, code=code)
    ended_at = await _end_seen(scene, thread, asked)
    scene.recovered(f"{kind} {model}", posted_at, ended_at, within_s=within_s)
    scene.say(f"{kind} {model}: {turn.outcome.error if turn.outcome else turn.outcome}")


async def _recovers(scene: Scene, kind: threads.AgentKind, model: str, *, calls: int) -> None:
    thread = await scene.threads.open(model, kind=kind)
    scene.threads.watch(thread)
    asked = await scene.threads.say(thread, "Please.")
    posted_at = time.monotonic()
    await scene.threads.expect(asked, "completed", within_s=RETRIED_WITHIN_S + LATE_S, attempts=None)
    ended_at = await _end_seen(scene, thread, asked)
    scene.recovered(f"{kind} {model}", posted_at, ended_at, within_s=RETRIED_WITHIN_S)
    scene.check(f"{kind} {model}: calls", calls, await scene.threads.agent_calls(asked))


async def _end_seen(scene: Scene, thread: Thread, asked: Asked) -> float:
    return await scene.threads.seen(
        thread.watchers[0],
        lambda heard: heard.type in events.TURN_ENDS and heard.turn == asked.turn,
        f"the end of {asked.key}",
    )


async def turn_fast(scene: Scene) -> None:
    """Short questions, one after another, many at once, and several to one thread that is busy."""
    for kind in ("echo", "openai", "http"):
        await _answered_fast(scene, kind)
    many = await asyncio.gather(*(scene.threads.open("fast") for _ in range(MANY)))
    for thread in many:
        scene.threads.watch(thread)
    asked = await asyncio.gather(*(scene.threads.say(thread, "What is 2 + 2?") for thread in many))
    await asyncio.gather(*(scene.threads.expect(each, "completed", within_s=LATE_S) for each in asked))
    scene.say(f"{MANY} threads at once are answered")
    await _busy(scene)
    await _interrupted(scene)
    await scene.threads.expect_told()


async def _answered_fast(scene: Scene, kind: threads.AgentKind) -> None:
    thread = await scene.threads.open("fast", kind=kind)
    scene.threads.watch(thread)
    for _ in range(3):
        asked = await scene.threads.say(thread, "What is 2 + 2?")
        posted_at = time.monotonic()
        await _started(scene, thread, asked, posted_at)
        ended_at = await _end_seen(scene, thread, asked)
        scene.recovered(f"{kind} answered", posted_at, ended_at, within_s=FAST_WITHIN_S)
        await scene.threads.expect(asked, "completed", within_s=LATE_S)


async def _busy(scene: Scene) -> None:
    """Two entries while a turn runs: each gets its answer, in order; one that is not to wait is refused."""
    thread = await scene.threads.open(f"slow-{BUSY_S}")
    watcher = scene.threads.watch(thread)
    first = await scene.threads.say(thread, "One.")
    await scene.threads.speaks(watcher, first)
    others = [await scene.threads.say(thread, text) for text in ("Two.", "Three.")]
    scene.check("an entry that is not to wait is refused", True, await scene.threads.is_busy(thread))
    scene.check("the second waits", "queued", (await scene.threads.turn(others[0])).state)
    for asked in (first, *others):
        await scene.threads.expect(asked, "completed", within_s=3 * BUSY_S + LATE_S)
    scene.say("three entries on one thread are answered in their order")


async def _interrupted(scene: Scene) -> None:
    """An entry that interrupts: the turn under way is cancelled, and the new one answered."""
    thread = await scene.threads.open("slow-30")
    watcher = scene.threads.watch(thread)
    first = await scene.threads.say(thread, "A long story.")
    await scene.threads.speaks(watcher, first)
    cut_at = time.monotonic()
    second = await scene.threads.say(thread, "No, wait.", on_busy="interrupt")
    await scene.threads.expect(first, "cancelled", within_s=LATE_S)
    scene.recovered("interrupted", cut_at, await _end_seen(scene, thread, first), within_s=CANCELLED_WITHIN_S)
    await scene.threads.speaks(watcher, second)
    await scene.threads.cancel(second)
    await scene.threads.expect(second, "cancelled", within_s=LATE_S)


async def turn_cancel(scene: Scene) -> None:
    """Turns are cancelled while a tool runs, while the model speaks, and before they began."""
    await _cancelled_in_a_tool(scene)
    await _cancelled_while_speaking(scene)
    await scene.threads.expect_told()


async def _cancelled_in_a_tool(scene: Scene) -> None:
    machine = await scene.new_machine()
    thread = await scene.threads.open("tools-1", user=machine.user)
    scene.threads.watch(thread)
    asked = await scene.threads.say(thread, use("work", "cancelled", seconds=60))
    await scene.tool_noted(machine.user, "cancelled", lambda noted: noted.began > 0, "began")
    scene.say("the tool runs; cancelling the turn")
    cut_at = time.monotonic()
    await scene.threads.cancel(asked)
    await scene.threads.expect(asked, "cancelled", within_s=CANCELLED_WITHIN_S + LATE_S)
    scene.recovered("cancelled in a tool", cut_at, await _end_seen(scene, thread, asked), within_s=CANCELLED_WITHIN_S)
    # The tool was stopped: its lane is free for what comes, long before its sixty seconds are over.
    after = scene.submit(machine.user, "look", "after")
    answer = await scene.expect(after, "completed", executions=1)
    scene.recovered("the lane is free", cut_at, answer.at, within_s=CANCELLED_WITHIN_S)
    noted = (await scene.target.executions(machine.user))["cancelled"]
    scene.check("the tool began and ended", (1, 0), (noted.began, noted.ended))
    scene.check("model calls", 1, await scene.threads.agent_calls(asked))
    await scene.expect_nothing_left(machine.user)


async def _cancelled_while_speaking(scene: Scene) -> None:
    thread = await scene.threads.open("slow-30")
    watcher = scene.threads.watch(thread)
    asked = await scene.threads.say(thread, "A long story.")
    waiting = await scene.threads.say(thread, "And then?")
    await scene.threads.speaks(watcher, asked)
    await scene.threads.cancel(waiting)
    # Nobody ran it: there is nothing that it could have used.
    await scene.threads.expect(waiting, "cancelled", within_s=LATE_S, attempts=0, usage=0)
    scene.say("one that waited is cancelled; cancelling the one that speaks")
    cut_at = time.monotonic()
    await scene.threads.cancel(asked)
    await scene.threads.cancel(asked)
    await scene.threads.expect(asked, "cancelled", within_s=LATE_S)
    scene.recovered("cancelled", cut_at, await _end_seen(scene, thread, asked), within_s=CANCELLED_WITHIN_S)

    async def has_left() -> bool:
        return [request.end for request in await scene.target.model.about(asked.key + ".")] == ["left"]

    await scene.eventually("the model is not asked any longer", has_left)
