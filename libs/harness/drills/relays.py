"""Drills of the relays: killed, told to leave, frozen past their leases, and scaled, with events on their way."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from harness.drills.evidence import Lease
from harness.drills.scene import Scene
from harness.drills.streams import Followed
from harness.drills.target import Replica

RUNS = 4
SOURCES = 2
KILLED_WITHIN_S = 5.0
LEFT_WITHIN_S = 1.0
# A drill goes on this long for what is late, so that it can be said how late it was.
LATE_S = 30.0

RECORDED_AFTER_S = 0.5

SCALED_RUNS = 12
SCALED_EVENTS_PER_S = 10.0
# Nobody is given a run while the membership still changes, and then each relay looks several times a second.
SPREAD_WITHIN_S = 15.0
# A new owner continues within a second of the old one's leaving; the pause of the source itself comes on top.
MOVED_WITHIN_S = LEFT_WITHIN_S + 1 / SCALED_EVENTS_PER_S


class _Cut(NamedTuple):
    """Runs that flow, and those among them whose relay is to be cut, with their epochs."""

    runs: list[Followed]
    relay: Replica
    held: list[Followed]
    leases: dict[str, Lease]


async def relay_kill(scene: Scene) -> None:
    """A relay dies (SIGKILL) with events on their way; another one takes its runs over once its leases have run out."""
    cut = await _flowing(scene)
    scene.say(f"{cut.relay.name} follows {len(cut.held)} of {len(cut.runs)} runs; killing it (SIGKILL)")
    cut_at = time.monotonic()
    await cut.relay.kill()
    await _expect_takeover(scene, cut, "relay killed", cut_at, within_s=KILLED_WITHIN_S)
    await cut.relay.start()
    scene.say(f"{cut.relay.name} is back")
    await scene.streams.end(*cut.runs)
    await scene.streams.expect(*cut.runs)


async def relay_kill_at_the_end(scene: Scene) -> None:
    """A relay dies (SIGKILL) while Redis stands still and the last events of its sources are in its memory alone."""
    cut = await _flowing(scene)
    scene.say(f"freezing Redis (SIGSTOP); the sources of all {len(cut.runs)} runs say their last events")
    await scene.target.redis.freeze()
    await scene.streams.end(*cut.runs)

    async def are_read() -> bool:
        return not any([await scene.streams.open_connections(run) for run in cut.held])

    await scene.eventually(f"{cut.relay.name} has read them", are_read)
    # What it would tell Postgres of the ends, it has told by then.
    await asyncio.sleep(RECORDED_AFTER_S)
    scene.say(f"{cut.relay.name} has read them; killing it (SIGKILL), and Redis goes on")
    await cut.relay.kill()
    await scene.target.redis.thaw()
    await scene.streams.expect(*cut.runs)
    # What was on its way to Redis is done when that goes on, so not every source need be asked again.
    openings = sum([await _openings(scene, run) for run in cut.held])
    asked = len(cut.held) * SOURCES
    scene.check("connections at the agent", f"> {asked}", openings, is_met=openings > asked)
    await cut.relay.start()


async def relay_term(scene: Scene) -> None:
    """A relay is told to leave (SIGTERM) with events on their way, and hands its runs over."""
    cut = await _flowing(scene)
    scene.say(f"{cut.relay.name} follows {len(cut.held)} of {len(cut.runs)} runs; telling it to leave (SIGTERM)")
    cut_at = time.monotonic()
    code = await cut.relay.term()
    scene.check(f"{cut.relay.name}: exit code", 0, code)
    await _expect_takeover(scene, cut, "relay told to leave", cut_at, within_s=LEFT_WITHIN_S)
    await cut.relay.start()
    scene.say(f"{cut.relay.name} is replaced")
    await scene.streams.end(*cut.runs)
    await scene.streams.expect(*cut.runs)


async def relay_freeze(scene: Scene) -> None:
    """A relay is frozen past its leases (SIGSTOP), and wakes up with events that another has written meanwhile."""
    cut = await _flowing(scene)
    scene.say(f"{cut.relay.name} follows {len(cut.held)} of {len(cut.runs)} runs; freezing it (SIGSTOP)")
    cut_at = time.monotonic()
    await cut.relay.freeze()
    await _expect_takeover(scene, cut, "relay frozen", cut_at, within_s=KILLED_WITHIN_S)
    for run in cut.held:
        # Its own is open, too, and holds what the agent has said since.
        scene.check(f"{run.run}: connections open", 2 * SOURCES, await scene.streams.open_connections(run))
    scene.say(f"waking {cut.relay.name}")
    await cut.relay.thaw()
    for run in cut.held:
        await scene.logged(cut.relay, "run_lost", run=run.run)
    scene.say(f"{cut.relay.name} has noticed that they are another's")
    await asyncio.gather(*(scene.streams.flows(run) for run in cut.runs))
    await scene.streams.end(*cut.runs)
    await scene.streams.expect(*cut.runs)


async def relay_scale(scene: Scene) -> None:
    """Relays are scaled from one to three and back to one; runs spread evenly, and no move is noticed by a watcher."""
    usual = len(scene.target.relays)
    await scene.target.scale("relay", 1)
    runs = [await scene.streams.follow(rate=SCALED_EVENTS_PER_S) for _ in range(SCALED_RUNS)]
    for number, run in enumerate(runs):
        scene.streams.watch(run, first=number)
    await asyncio.gather(*(scene.streams.flows(run) for run in runs))
    await _expect_shares(scene, runs, 1)
    began_at = time.monotonic()
    await scene.target.scale("relay", 3)
    await _expect_shares(scene, runs, 3)
    await scene.target.scale("relay", 1)
    await _expect_shares(scene, runs, 1)
    await asyncio.gather(*(scene.streams.flows(run) for run in runs))
    moves = sum([await _openings(scene, run) for run in runs]) - len(runs)
    scene.say(f"upstreams were asked again {moves} times, for {len(runs)} runs")
    # Each run of two relays' shares moves there, and back; one may go by way of the other that leaves.
    spread = SCALED_RUNS - SCALED_RUNS // 3
    scene.check("moves", f"{2 * spread} to {3 * spread}", moves, is_met=2 * spread <= moves <= 3 * spread)
    silence_s = max(_longest_silence(run, since=began_at) for run in runs)
    scene.recovered("longest silence of a run", 0.0, silence_s, within_s=MOVED_WITHIN_S)
    await scene.target.scale("relay", usual)
    await scene.streams.end(*runs)
    await scene.streams.expect(*runs)


async def _flowing(scene: Scene) -> _Cut:
    """Start runs, a watcher of each at every gateway, and choose the relay that follows the first."""
    runs = [await scene.streams.follow(SOURCES) for _ in range(RUNS)]
    for run in runs:
        for gateway in range(len(scene.target.gateways)):
            scene.streams.watch(run, first=gateway)
    await asyncio.gather(*(scene.streams.flows(run) for run in runs))
    relay = await scene.streams.owner(runs[0])
    held = [run for run in runs if await scene.streams.owner(run) is relay]
    return _Cut(runs, relay, held, {run.run: await scene.streams.lease(run) for run in runs})


async def _expect_takeover(scene: Scene, cut: _Cut, label: str, cut_at: float, *, within_s: float) -> None:
    """Every run of the relay goes on under another one and a newer epoch; the others notice nothing."""
    waits = [scene.streams.taken_over(run, since_epoch=cut.leases[run.run].epoch, within_s=LATE_S) for run in cut.held]
    good_at = max(await asyncio.gather(*waits))
    scene.say(f"all watchers of its {len(cut.held)} runs see events again {good_at - cut_at:.2f} s after the cut")
    scene.recovered(label, cut_at, good_at, within_s=within_s)
    for run in cut.runs:
        is_held = run in cut.held
        before, now = cut.leases[run.run], await scene.streams.lease(run)
        if is_held:
            scene.check(f"{run.run}: another relay follows it", True, now.relay != before.relay)
        scene.check(f"{run.run}: the epoch grew", is_held, now.epoch > before.epoch)
        openings = await _openings(scene, run)
        expected = f">= {2 * SOURCES}" if is_held else str(SOURCES)
        is_met = openings >= 2 * SOURCES if is_held else openings == SOURCES
        scene.check(f"{run.run}: connections at the agent", expected, openings, is_met=is_met)


async def _openings(scene: Scene, run: Followed) -> int:
    return sum([len(await scene.streams.requests(run, source)) for source in run.sources])


async def _expect_shares(scene: Scene, runs: Sequence[Followed], relays: int) -> None:
    began_at = time.monotonic()
    wanted = sorted(len(runs) // relays + (n < len(runs) % relays) for n in range(relays))

    async def are_even() -> bool:
        leases = [await scene.evidence.lease(run.run) for run in runs]
        return sorted(Counter(lease.relay for lease in leases if lease is not None).values()) == wanted

    await scene.eventually(f"shares of {wanted}", are_even, within_s=LATE_S)
    spread_at = time.monotonic()
    scene.say(f"{relays} relays, {len(runs)} runs: shares {wanted}, {spread_at - began_at:.2f} s after they were ready")
    if relays > 1:
        scene.recovered("spread evenly", began_at, spread_at, within_s=SPREAD_WITHIN_S)


def _longest_silence(run: Followed, *, since: float) -> float:
    times = [[seen.at for seen in watcher.seen if seen.at >= since] for watcher in run.watchers]
    return max(later - earlier for each in times for earlier, later in pairwise(each))
