"""Drills of the clients: their gateway dies, one of them never reads, one of them comes too late."""

import asyncio
import json
import time

from harness.agent import Script
from harness.drills.scene import Scene
from harness.drills.watching import Watcher

# The pause that the gateway names, a new connection and the history, for everybody at once.
RESUMED_WITHIN_S = 15.0
CROWD_EVENTS_PER_S = 5.0
# Five hundred connections at once, and a busy machine.
CROWD_COMES_WITHIN_S = 60.0

# More than a gateway's buffer for one client and both socket buffers hold; less than a run's log keeps.
LARGE_EVENTS = 300
LARGE_EVENT_BYTES = 60_000
HISTORY_S = 1.0
# What a client takes into its socket while it does not read.
NARROW_BYTES = 16 * 1024
# A client that does not read costs its buffer, not what it was sent.
MEMORY_GROWTH_MAX_BYTES = 64 * 1024 * 1024
RESIDENT = "process_resident_memory_bytes"
CLOSED_SLOW = 'towline_sse_closed_total{reason="slow"}'

# A run's log keeps ten thousand events, and trims in whole nodes.
TRIMMED_EVENTS = 12_000
TRIMMED_WITHIN_S = 60.0


async def gateway_kill_under_sse(scene: Scene) -> None:
    """A gateway dies (SIGKILL) with all clients of a run on it; they resume at another one."""
    gateway = scene.target.gateways[0]
    run = await scene.streams.follow(rate=CROWD_EVENTS_PER_S)
    watchers = [scene.streams.watch(run) for _ in range(scene.clients)]
    await scene.streams.flows(run, within_s=CROWD_COMES_WITHIN_S)
    scene.check(f"clients at {gateway.name} alone", scene.clients, sum(watcher.opened == 1 for watcher in watchers))
    scene.say(f"{scene.clients} clients follow the run at {gateway.name}; killing it (SIGKILL)")
    cut_at = time.monotonic()
    await gateway.kill()

    async def have_moved() -> bool:
        return all(watcher.opened > 1 for watcher in watchers)

    # What a client still reads after the kill may have been in its socket before.
    await scene.eventually("every client has opened another stream", have_moved, within_s=CROWD_COMES_WITHIN_S)
    good_at = await scene.streams.flows(run, within_s=CROWD_COMES_WITHIN_S)
    scene.say(f"the last one sees events again {good_at - cut_at:.2f} s after the kill")
    scene.recovered("gateway killed under its clients", cut_at, good_at, within_s=RESUMED_WITHIN_S)
    scene.check("clients whose stream broke off", scene.clients, sum(watcher.broken > 0 for watcher in watchers))
    await gateway.start()
    scene.say(f"{gateway.name} is back")
    await scene.streams.end(run)
    await scene.streams.expect(run)


async def slow_client(scene: Scene) -> None:
    """One client of four reads nothing more; it alone is closed, and resumes when it reads again."""
    gateway = scene.target.gateways[0]
    run = await scene.streams.follow({"large": Script()})
    slow = scene.streams.watch(run, receives_bytes=NARROW_BYTES)
    others = [scene.streams.watch(run, first=first) for first in (0, 0, 1)]
    await _say_large(scene, run.sources["large"], 1, 1)
    await scene.streams.flows(run, after=0.0)
    # Nothing shows when a client has come to the end of the history; while it reads that, it is served at its own pace.
    await asyncio.sleep(HISTORY_S)
    before = await gateway.metrics()
    slow.stall()
    scene.say(f"one client reads nothing more; {LARGE_EVENTS} events of {LARGE_EVENT_BYTES} bytes are on their way")
    await _say_large(scene, run.sources["large"], 2, LARGE_EVENTS)

    async def have_all() -> bool:
        return all(_newest(watcher) == LARGE_EVENTS for watcher in others)

    await scene.eventually("the others have all of it", have_all, within_s=TRIMMED_WITHIN_S)

    async def is_closed() -> bool:
        return (await gateway.metrics()).get(CLOSED_SLOW, 0.0) > before.get(CLOSED_SLOW, 0.0)

    await scene.eventually(f"{gateway.name} has closed the slow client", is_closed, within_s=TRIMMED_WITHIN_S)
    after = await gateway.metrics()
    scene.check("clients closed as slow", 1, round(after[CLOSED_SLOW] - before.get(CLOSED_SLOW, 0.0)))
    scene.check("streams of the others", [1, 1, 1], [watcher.opened for watcher in others])
    growth = round(after[RESIDENT] - before[RESIDENT])
    limit = MEMORY_GROWTH_MAX_BYTES
    scene.check(f"{gateway.name}: bytes of memory more", f"<= {limit}", growth, is_met=growth <= limit)
    has_read = _newest(slow)
    scene.check("events that the slow one has read", f"< {LARGE_EVENTS}", has_read, is_met=has_read < LARGE_EVENTS)
    scene.say("it reads again")
    slow.go_on()
    await scene.streams.end(run)
    await scene.streams.expect(run)
    scene.check("streams of the slow one", ">= 2", slow.opened, is_met=slow.opened >= 2)


async def trimmed_cursor(scene: Scene) -> None:
    """A client comes back after more events than a run's log keeps; what is no longer there is announced as a gap."""
    run = await scene.streams.follow({"many": Script()})
    stream = run.sources["many"]
    faithful = scene.streams.watch(run)
    late = scene.streams.watch(run, first=1)
    await scene.target.agent.act(stream, "emit", count=10)
    await scene.streams.seen_by_all(run, lambda seen: seen.number == 10, "ten events")
    await scene.streams.leave(late)
    scene.say(f"a client leaves after event 10, id {late.last_id}; {TRIMMED_EVENTS} more are said")
    await scene.target.agent.act(stream, "emit", count=TRIMMED_EVENTS)

    async def has_all() -> bool:
        return _newest(faithful) == TRIMMED_EVENTS + 10

    await scene.eventually("the client that stayed has all of them", has_all, within_s=TRIMMED_WITHIN_S)
    oldest = await scene.evidence.oldest_event(run.run)
    is_gone = _order(oldest) > _order(late.last_id)
    scene.check("oldest event in the log", f"after {late.last_id}", oldest, is_met=is_gone)
    kept = [seen.number for seen in faithful.seen if seen.number and _order(seen.id) >= _order(oldest)]
    scene.say(f"the log begins at {oldest} and holds {len(kept)} events; the client comes back")
    scene.streams.come_back(late)
    await scene.streams.end(run)
    await scene.streams.expect(run, gaps=1, excused=TRIMMED_EVENTS - len(kept))
    scene.check("the first event after the gap", kept[0], next(s.number for s in late.seen[10:] if s.number))


async def _say_large(scene: Scene, stream: str, first: int, last: int) -> None:
    for number in range(first, last + 1):
        data = json.dumps({"n": number, "stream": stream, "padding": "x" * LARGE_EVENT_BYTES})
        await scene.target.agent.act(stream, "emit", data=data)
        await asyncio.sleep(0)


def _newest(watcher: Watcher) -> int:
    return max((seen.number for seen in watcher.seen), default=0)


def _order(event_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in event_id.split("-"))
