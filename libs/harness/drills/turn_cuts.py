"""Drills of turns under way: their worker killed or frozen, Postgres restarted, their tools cut off."""

import asyncio
import time
from typing import NamedTuple

from harness.drills.conversations import Asked, Thread, ThreadWatcher, use
from harness.drills.scene import Scene
from harness.drills.target import Machine, Replica
from towline.wire import events

# A claim (8 s), one look of the net behind it (2 s), and some.
REDELIVERED_WITHIN_S = 15.0
# Long enough to be cut in the middle, when whoever cuts is slow as well.
SPEAKS_S = 6
THINKS_S = 2
RESTART_TAKES_S = 3.0
# So many that some are on their way when the gateway dies.
POSTS = 24
# A drill goes on this long for what is late, so that it can be said how late it was.
LATE_S = 15.0


class _Cut(NamedTuple):
    """A turn in the middle of its answer, and the worker that runs it."""

    thread: Thread
    asked: Asked
    worker: Replica
    machine: Machine
    speaks_s: float


async def turn_crash(scene: Scene) -> None:
    """A worker dies (SIGKILL) while the model speaks, after a tool has run; another worker goes on from there."""
    cut = await _speaking(scene)
    scene.say(f"the model speaks; killing {cut.worker.name} (SIGKILL)")
    cut_at = time.monotonic()
    await cut.worker.kill()
    behind = await scene.threads.say(cut.thread, "And then?")
    scene.say("another entry is posted meanwhile")
    await _expect_redelivery(scene, cut, "worker killed", cut_at, second_call="left")
    await cut.worker.start()
    scene.say(f"{cut.worker.name} is back")
    await scene.threads.expect(behind, "completed", within_s=cut.speaks_s + LATE_S)
    await scene.threads.expect_told(cut.thread)


async def turn_freeze(scene: Scene) -> None:
    """A worker freezes past its claim while the model speaks, and wakes once another worker has the turn."""
    cut = await _speaking(scene)
    scene.say(f"the model speaks; freezing {cut.worker.name} (SIGSTOP)")
    cut_at = time.monotonic()
    await cut.worker.freeze()
    await scene.threads.seen(
        cut.thread.watchers[0],
        lambda heard: heard.type == events.TURN_RESTARTED,
        "another worker begin again",
        within_s=REDELIVERED_WITHIN_S + LATE_S,
    )

    async def has_said_all() -> bool:
        requests = await scene.target.model.about(cut.asked.key + ".")
        return [request.end for request in requests[:2]] == ["answered", "answered"]

    await scene.eventually("the model has said all of it to the one that stands still", has_said_all)
    await cut.worker.thaw()
    scene.say(f"another worker has the turn; {cut.worker.name} wakes in the middle of its answer")
    await scene.logged(cut.worker, "turn_dropped", turn=cut.asked.turn, reason="lost")
    await _expect_redelivery(scene, cut, "worker frozen", cut_at, second_call="answered")
    await scene.threads.expect_told(cut.thread)


async def _speaking(scene: Scene) -> _Cut:
    """A turn that has called a tool and now speaks; one watcher sees all of it, one comes back, and one comes late."""
    machine = await scene.new_machine()
    speaks_s = scene.outlasting(SPEAKS_S)
    thread = await scene.threads.open(f"tools-1+slow-{speaks_s:g}", user=machine.user)
    early, reconnecting = scene.threads.watch(thread), scene.threads.watch(thread, first=1)
    asked = await scene.threads.say(thread, use("work", "before"))
    await scene.threads.speaks(early, asked)
    await scene.threads.speaks(reconnecting, asked)
    await scene.threads.leave(reconnecting)
    return _Cut(thread, asked, await scene.threads.runner(asked), machine, speaks_s)


async def _expect_redelivery(scene: Scene, cut: _Cut, label: str, cut_at: float, *, second_call: str) -> None:
    thread, asked = cut.thread, cut.asked
    restarted_at = await scene.threads.seen(
        thread.watchers[0],
        lambda heard: heard.type == events.TURN_RESTARTED and heard.turn == asked.turn,
        "another worker begin again",
        within_s=REDELIVERED_WITHIN_S + LATE_S,
    )
    scene.recovered(label, cut_at, restarted_at, within_s=REDELIVERED_WITHIN_S)
    scene.say(f"another worker has begun again {restarted_at - cut_at:.2f} s after the cut")
    scene.threads.come_back(thread.watchers[1])
    scene.threads.watch(thread)
    repeats = int(second_call == "answered")
    turn = await scene.threads.expect(asked, "completed", within_s=cut.speaks_s + LATE_S, attempts=2, repeats=repeats)
    # The answer that was cut off is asked for again, and nothing else: not the call before it, nor the tool.
    requests = await scene.target.model.about(asked.key + ".")
    scene.check("model calls", ["answered", second_call, "answered"], [request.end for request in requests])
    noted = (await scene.target.executions(cut.machine.user))["before"]
    scene.check("executions of the tool", 1, noted.began)
    told = scene.threads.told(thread, asked)
    scene.check("times begun again", 1, told.restarts)
    scene.check_same("the pieces say the answer", str(turn.outcome.text) if turn.outcome else "", told.text)


async def turn_postgres_restart(scene: Scene) -> None:
    """Postgres is restarted while the model speaks, and an entry is posted while it is away."""
    cut = await _speaking(scene)
    other = await scene.threads.open("fast")
    scene.threads.watch(other)
    scene.say(f"the model speaks; stopping Postgres for {RESTART_TAKES_S:g} s")
    await scene.target.postgres.stop()
    posting = asyncio.create_task(scene.threads.say(other, "Hello?"), name="posting")
    await asyncio.sleep(RESTART_TAKES_S)
    scene.check("posted while Postgres is away", False, posting.done())
    await scene.target.postgres.start()
    cut_at = time.monotonic()
    scene.say("Postgres is back")
    await scene.threads.expect(await posting, "completed", within_s=LATE_S)
    scene.threads.come_back(cut.thread.watchers[1])
    scene.threads.watch(cut.thread)
    # Either the attempt outlived it, or the next one goes on behind the tool.
    within_s = REDELIVERED_WITHIN_S + cut.speaks_s
    await scene.threads.expect(cut.asked, "completed", within_s=within_s + LATE_S, attempts=None)
    ended_at = await scene.threads.seen(cut.thread.watchers[0], lambda heard: heard.type in events.TURN_ENDS, "the end")
    scene.recovered("Postgres restarted", cut_at, ended_at, within_s=within_s)
    noted = (await scene.target.executions(cut.machine.user))["before"]
    scene.check("executions of the tool", 1, noted.began)
    await scene.threads.expect_told(cut.thread, other)


async def turn_gateway_kill(scene: Scene) -> None:
    """A gateway dies (SIGKILL) with entries on their way in; their keys are taken to the other one."""
    opened = [await scene.threads.open("fast") for _ in range(POSTS)]
    posting = [
        asyncio.create_task(scene.threads.say(thread, "What is 2 + 2?"), name=f"posting:{n}")
        for n, thread in enumerate(opened)
    ]
    await asyncio.wait(posting, return_when=asyncio.FIRST_COMPLETED)
    gateway = scene.target.gateways[0]
    done = sum(task.done() for task in posting)
    scene.say(f"{done} of {POSTS} entries are accepted; killing {gateway.name} (SIGKILL)")
    await gateway.kill()
    scene.check("entries on their way at the kill", "> 0", POSTS - done, is_met=done < POSTS)
    asked = await asyncio.gather(*posting)
    await gateway.start()
    scene.say(f"all are accepted; {gateway.name} is back")
    for thread in opened:
        scene.threads.watch(thread, first=1)
    await asyncio.gather(*(scene.threads.expect(each, "completed", within_s=LATE_S) for each in asked))
    # The thread whose first entry was committed and not told has a stream that nobody can vouch for from its beginning.
    await scene.threads.expect_told(gaps=None)


async def turn_redis_flush(scene: Scene) -> None:
    """Redis loses everything while the model speaks: watchers are told of a gap, and of the turn's end."""
    cut = await _speaking(scene)
    scene.say("the model speaks; flushing Redis")
    born = await scene.evidence.born()
    await scene.target.redis.flush()

    async def is_reborn() -> bool:
        return await scene.evidence.born() not in ("", born)

    await scene.eventually("Redis is used again", is_reborn)
    scene.threads.come_back(cut.thread.watchers[1])
    scene.threads.watch(cut.thread)
    await scene.threads.expect(cut.asked, "completed", within_s=cut.speaks_s + LATE_S)
    noted = (await scene.target.executions(cut.machine.user))["before"]
    scene.check("executions of the tool", 1, noted.began)
    await scene.threads.expect_told(cut.thread, gaps=True)
    behind = await scene.threads.say(cut.thread, use("look", "after"))
    await scene.threads.expect(behind, "completed", within_s=cut.speaks_s + LATE_S)
    scene.say("the thread goes on")


async def turn_tool_cut(scene: Scene) -> None:
    """A turn calls two tools: its worker dies between them, and the machine dies in the second one."""
    machine = await scene.new_machine()
    thinks_s = scene.outlasting(THINKS_S)
    thread = await scene.threads.open(f"tools-2+think-{thinks_s:g}", user=machine.user)
    watcher = scene.threads.watch(thread)
    question = "\n".join((use("work", "first", seconds=1), use("work", "second", seconds=30)))
    asked = await scene.threads.say(thread, question)
    # Known before the cut is due: then nothing is between the result and the kill.
    worker = await scene.threads.runner(asked)
    await _results(scene, watcher, asked, 1, within_s=thinks_s + LATE_S)
    scene.say(f"the first tool has ended, the model thinks; killing {worker.name} (SIGKILL)")
    cut_at = time.monotonic()
    await worker.kill()
    noted = await scene.target.executions(machine.user)
    scene.check("tools begun at the kill", {"first"}, set(noted))
    await worker.start()
    await scene.tool_noted(
        machine.user,
        "second",
        lambda noted: noted.began > 0,
        "began",
        within_s=REDELIVERED_WITHIN_S + thinks_s + LATE_S,
    )
    scene.recovered("worker killed", cut_at, time.monotonic(), within_s=REDELIVERED_WITHIN_S + thinks_s + 3)
    scene.say("another worker goes on, the second tool runs; killing the machine (SIGKILL)")
    await machine.kill()
    scene.threads.watch(thread, first=1)
    await machine.start()
    turn = await scene.threads.expect(asked, "completed", within_s=2 * thinks_s + LATE_S + 11, attempts=2)
    noted = await scene.target.executions(machine.user)
    scene.check("executions of the first tool", (1, 1), noted["first"])
    scene.check("executions of the second tool", (1, 0), noted["second"])
    text = turn.outcome.text if turn.outcome else ""
    scene.say(f"the turn says: {text}")
    scene.check("the model is told", "may or may not have run", text, is_met="may or may not have run" in str(text))
    requests = await scene.target.model.about(asked.key + ".")
    scene.check("model calls", ["answered", "left", "answered", "answered"], [request.end for request in requests])
    results = scene.threads.told(thread, asked).results
    scene.check("results told", ["completed", "unknown"], [result.state for result in results.values()])
    await scene.threads.expect_told(thread)
    await scene.expect_nothing_left(machine.user)


async def _results(scene: Scene, watcher: ThreadWatcher, asked: Asked, count: int, *, within_s: float) -> None:
    async def are_told() -> bool:
        found = [heard for heard in watcher.seen if heard.type == events.TOOL_RESULT and heard.turn == asked.turn]
        return len(found) >= count

    await scene.eventually(f"{count} results of tools are told", are_told, within_s=within_s)
