"""Drill of the upstreams: they close, break off in mid-event, refuse for a while, start anew, and refuse for good."""

import asyncio
import time
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Final

from harness.agent import Script
from harness.drills.scene import Scene
from harness.drills.streams import Followed
from towline.wire import events

FLAPS = 3
EVENTS_PER_S = 20.0
# What an upstream asks for in `Retry-After`; it goes after one failure without.
RETRY_AFTER_S = 2
# A pause of a second at most after a close; after a refusal what it asked for and a tenth, after a second one, two.
CLOSED_WITHIN_S = 3.0
REFUSED_WITHIN_S = 8.0
# A drill goes on this long for what is late, so that it can be said how late it was.
LATE_S = 30.0

# What an upstream answers for good, and how that is named; each after a few events.
FINAL_ANSWERS: Final[dict[str, tuple[dict[str, object], str]]] = {
    "finished": ({"status": 204}, "upstream-finished"),
    "missing": ({"status": 404}, "upstream-refused"),
    "moved": ({"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, "upstream-redirected"),
    "a-page": ({"status": 200, "headers": {"Content-Type": "text/html"}, "body": "<p>"}, "not-an-event-stream"),
}


async def upstream_flaps(scene: Scene) -> None:
    """Upstreams close, break off, refuse with 503 and 500 and start anew; others give a final answer."""
    await _flaps(scene)
    await _final_answers(scene)


async def _flaps(scene: Scene) -> None:
    usual = Script(rate=EVENTS_PER_S)
    replaying = Script(rate=EVENTS_PER_S, resume="replay")
    unnumbered = Script(rate=EVENTS_PER_S, resume="replay", ids=False)
    live = Script(rate=EVENTS_PER_S, resume="live", ids=False)
    run = await scene.streams.follow(
        {
            "closing": usual,
            "cutting": usual,
            "refusing": usual,
            "replaying": replaying,
            "unnumbered": unnumbered,
            "live": live,
        },
        resume={"replaying": "replay", "unnumbered": "replay", "live": "live"},
    )
    for gateway in range(len(scene.target.gateways)):
        scene.streams.watch(run, first=gateway)
    act = scene.target.agent.act
    await _all_go_on(scene, run, dict.fromkeys(run.sources, 0))
    for flap in range(1, FLAPS + 1):
        cut_at = time.monotonic()
        for source, stream in run.sources.items():
            if source == "refusing":
                await act(stream, "answer", status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
                await act(stream, "answer", status=500)
            await act(stream, "cut" if source == "cutting" else "close")
        said = await scene.streams.said(run)
        good_at = await _all_go_on(scene, run, said, but=("refusing",))
        scene.recovered("upstream closed or cut", cut_at, good_at, within_s=CLOSED_WITHIN_S)
        last_at = await _all_go_on(scene, run, said)
        scene.recovered("upstream refusing", cut_at, last_at, within_s=REFUSED_WITHIN_S)
        took = f"{good_at - cut_at:.2f} s, and the refusing one after {last_at - cut_at:.2f} s"
        scene.say(f"all six closed, flap {flap} of {FLAPS}: events again after {took}")
    for source in run.sources:
        requests = await scene.streams.requests(run, source)
        statuses = [request["status"] for request in requests]
        expected = [200, *([503, 500, 200] * FLAPS if source == "refusing" else [200] * FLAPS)]
        scene.check(f"{source}: answers it gave", expected, statuses)
        if source in ("closing", "cutting", "refusing"):
            resumed = sum(request["last_event_id"] is not None for request in requests)
            scene.check(f"{source}: requests with Last-Event-ID", len(requests) - 1, resumed)
        if source == "refusing":
            pauses = [later["at"] - earlier["at"] for earlier, later in pairwise(requests) if earlier["status"] == 503]
            asked = f">= {RETRY_AFTER_S} s"
            scene.check("pause after Retry-After", asked, f"{min(pauses):.2f} s", is_met=min(pauses) >= RETRY_AFTER_S)
    await scene.streams.end(run)
    # Of what the live one said while nobody listened nothing is known, and that is said.
    await scene.streams.expect(run, gaps=FLAPS * len(run.watchers), excused=None)
    told = {seen.source for watcher in run.watchers for seen in watcher.seen if seen.type == events.DISCONTINUITY}
    scene.check("sources with a discontinuity", {"live"}, told)


async def _final_answers(scene: Scene) -> None:
    run = await scene.streams.follow({source: Script() for source in FINAL_ANSWERS})
    for gateway in range(len(scene.target.gateways)):
        scene.streams.watch(run, first=gateway)
    act = scene.target.agent.act
    for stream in run.sources.values():
        await act(stream, "emit", count=3)
    await _all_go_on(scene, run, dict.fromkeys(run.sources, 2))
    scene.say("four upstreams close, and answer 204, 404, a redirect and a page")
    for source, (answer, _) in FINAL_ANSWERS.items():
        await act(run.sources[source], "answer", **answer)
        await act(run.sources[source], "close")
    await scene.streams.expect(run, state="failed")
    for watcher in run.watchers:
        told = sorted(seen.source for seen in watcher.seen if seen.type == events.SOURCE_ENDED)
        scene.check(f"{watcher.name}: sources said to have ended", sorted(FINAL_ANSWERS), told)
    record = await scene.caller.run(run.run)
    reasons = {} if record is None else {source.source: source.reason for source in record.sources}
    scene.check("reasons", {source: reason for source, (_, reason) in FINAL_ANSWERS.items()}, reasons)
    for source in FINAL_ANSWERS:
        scene.check(f"{source}: requests", 2, len(await scene.streams.requests(run, source)))


async def _all_go_on(scene: Scene, run: Followed, said: Mapping[str, int], *, but: Collection[str] = ()) -> float:
    """Wait until every watcher has an event of every source behind those numbers; returns when the last one did."""
    waits = [
        scene.streams.go_on(run, source, after=number, within_s=LATE_S)
        for source, number in said.items()
        if source not in but
    ]
    return max(await asyncio.gather(*waits))
