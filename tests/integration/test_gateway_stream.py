"""One event stream of a real gateway: what a reader gets, where it resumes, and how it is told of an end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from event_stores import RunKeys
from gateway_door import Door, open_door
from gateway_streams import TS, Browser, PlayedRun, Watcher, metric
from support import eventually

from common.store import keys
from common.store.eventlog import NewEvent
from harness.servers import Servers
from harness.stack import Gateway

KEEPALIVE_S = 0.5


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway with a brisk keep-alive."""
    env = {"TOWLINE_SSE_KEEPALIVE_S": f"{KEEPALIVE_S}", "TOWLINE_SSE_DRAIN_S": "0.5"}
    async with open_door(servers, postgres_url, state_directory / "stream", env=env) as opened:
        yield opened


@pytest.fixture
async def browser(door: Door) -> AsyncIterator[Browser]:
    async with Browser(door) as opened:
        yield opened


@pytest.fixture
async def played(door: Door) -> PlayedRun:
    """A run that is followed, without an event yet."""
    return await (await PlayedRun(door).put()).begin()


# ---- what comes


async def test_a_reader_gets_the_history_and_then_what_comes(browser: Browser, played: PlayedRun) -> None:
    """In order, once, each with an id; the head says that nobody on the way may hold it back."""
    await played.add(1, 3)
    async with browser.watch(played.run) as watcher:
        assert watcher.response.status_code == 200
        head = watcher.response.headers
        assert head["content-type"] == "text/event-stream; charset=utf-8"
        assert (head["cache-control"], head["x-accel-buffering"]) == ("no-store", "no")
        await watcher.has(3)
        await played.add(4)
        await played.add(5, 6)
        assert await watcher.has(6) == [f"coder {n}" for n in range(1, 7)]
        assert all(frame.has_id for frame in watcher.frames)
        assert len({frame.id for frame in watcher.frames}) == 6
        assert watcher.frames[0].type == "output"
        assert watcher.frames[0].data == {
            "source": "coder",
            "uid": "coder:1",
            "ts": TS + 1,
            "type": "output",
            "data": "coder 1",
        }
        assert watcher.comments[0] == f"keepalive_s={KEEPALIVE_S}"
        assert 1000 <= watcher.retries[0] <= 7000


async def test_the_end_ends_the_response(browser: Browser, played: PlayedRun) -> None:
    """The last event, then `towline.end` without an id; whoever has seen it is told to stay away."""
    await played.add(1)
    async with browser.watch(played.run) as watcher:
        await watcher.has(1)
        await played.end()
        assert await watcher.is_done() == ["coder 1", "towline.run.ended", "towline.end"]
        assert not watcher.was_broken
        end = watcher.frames[-1]
        assert (end.data, end.has_id) == ({"run": played.run, "state": "completed"}, False)
        last_id = watcher.last_id
    answer = await browser.client.get(f"/v1/runs/{played.run}/events", headers={"last-event-id": last_id})
    assert (answer.status_code, answer.content) == (204, b"")


async def test_a_reader_who_came_before_the_first_event_misses_none(door: Door, browser: Browser) -> None:
    """The run is recorded and nobody follows it yet; its beginning is watched from the beginning, without a gap."""
    run = await PlayedRun(door).put()
    async with browser.watch(run.run) as watcher:
        await eventually(lambda: watcher.comments)
        await run.begin()
        await run.add(1, 3)
        assert await watcher.has(3) == ["coder 1", "coder 2", "coder 3"]


async def test_a_take_over_is_no_event(browser: Browser, played: PlayedRun) -> None:
    """Another relay goes on: its mark is not shown, and nothing counts as missing."""
    async with browser.watch(played.run) as watcher:
        await played.add(1)
        await played.begin()
        await played.add(2)
        assert await watcher.has(2) == ["coder 1", "coder 2"]
        async with browser.watch(played.run, watcher.frames[0].id) as later:
            assert await later.has(1) == ["coder 2"]


async def test_live_only_leaves_out_the_history_but_not_what_was_missed(browser: Browser, played: PlayedRun) -> None:
    """`?from=live` is repeated by an EventSource that reconnects: then its last id counts."""
    seen = await played.add(1)
    await played.add(2)
    async with browser.watch(played.run, **{"from": "live"}) as watcher:
        await eventually(lambda: watcher.comments)
        async with browser.watch(played.run, str(seen), **{"from": "live"}) as resumed:
            await resumed.has(1)
            await eventually(lambda: len(watcher.comments) > 1)  # nothing but signs of life
            await played.add(3)
            assert await watcher.has(1) == ["coder 3"]
            assert await resumed.has(2) == ["coder 2", "coder 3"]


async def test_line_breaks_forge_no_frames(browser: Browser, played: PlayedRun) -> None:
    """Whatever stands in type, uid or data: one entry is one event, its text unchanged."""
    text = "a\r\nid: 9-9\r\ndata: forged\n\nevent: x\rdata: \u2028\u0085\x00 ü"
    await played.add_event(NewEvent("coder", "u\n\nid: 8-8", "sly\r\nid: 7-7\rdata: x", text, TS))
    await played.add_event(NewEvent("coder", "", "t" * 1_000_000, "long type", TS))
    await played.add(3)
    async with browser.watch(played.run) as watcher:
        assert await watcher.has(3) == [text, "long type", "coder 3"]
        assert "\n" not in watcher.frames[0].type
        assert watcher.frames[0].data["type"] == "sly\r\nid: 7-7\rdata: x"
        assert {frame.id.partition("-")[0] for frame in watcher.frames} == {str(played.writer.tail.epoch)}


async def test_a_mended_event_says_so(browser: Browser, played: PlayedRun) -> None:
    """In the stream and in pages; the others have no word about it."""
    await played.add_event(NewEvent("coder", "", "output", "bad \ufffd byte", TS, mended=True))
    await played.add(2)
    async with browser.watch(played.run) as watcher:
        await watcher.has(2)
        assert [frame.data.get("mended") for frame in watcher.frames] == [True, None]
    answer = await browser.client.get(f"/v1/runs/{played.run}/events", headers={"accept": "application/json"})
    assert [item.get("mended") for item in answer.json()["items"]] == [True, None]


# ---- resuming


@pytest.mark.parametrize("together", [False, True], ids=["one run", "several runs"])
async def test_live_only_states_where_it_reads_on(door: Door, browser: Browser, together: bool) -> None:
    """By an id without an event. Broken off before the first one, a reader comes back by it: it misses nothing, and is
    not given the history that it did not want."""
    runs = [await (await PlayedRun(door).put()).begin() for _ in range(2 if together else 1)]
    await runs[0].add(1)  # the other one has no event yet

    def watch(last_event_id: str | None = None, **params: str) -> Watcher:
        if together:
            return browser.watch_many([run.run for run in runs], last_event_id, **params)
        return browser.watch(runs[0].run, last_event_id, **params)

    async with watch(**{"from": "live"}) as watcher:
        await eventually(lambda: watcher.last_id and watcher.comments)
        assert watcher.frames == []
        last_id = watcher.last_id
    for run in runs:
        await run.add(2)
    async with watch(last_id) as resumed:
        assert await resumed.has(len(runs)) == ["coder 2"] * len(runs)
        for run in runs:
            await run.add(3)
        assert sorted(await resumed.has(2 * len(runs))) == ["coder 2"] * len(runs) + ["coder 3"] * len(runs)
        resumed_id = resumed.last_id
    async with watch(resumed_id) as resumed:
        await eventually(lambda: len(resumed.comments) > 1)
        assert resumed.frames == []


async def test_reconnecting_at_any_moment_gives_each_event_once(browser: Browser, played: PlayedRun) -> None:
    """Twenty connections are cut while events come; each goes on after the last id, and together they saw it all."""
    total = 400

    async def produce() -> None:
        for number in range(1, total + 1):
            await played.add(number)
            if number % 20 == 0:
                await asyncio.sleep(0.01)
        await played.end()

    producing = asyncio.create_task(produce())
    seen: list[str] = []
    last_id: str | None = None
    connections = 0
    while "towline.end" not in seen:
        connections += 1
        async with browser.watch(played.run, last_id) as watcher:
            want = 1 if connections <= 20 else total
            await eventually(lambda w=watcher, n=want: len(w.frames) >= n or w.is_over)  # type: ignore[misc]
        seen += watcher.texts
        last_id = watcher.last_id or last_id
    await producing
    assert connections > 5
    assert seen == [f"coder {n}" for n in range(1, total + 1)] + ["towline.run.ended", "towline.end"]


async def test_the_header_counts_before_the_query(browser: Browser, played: PlayedRun) -> None:
    """A page that opened with `?last_event_id=` reconnects to the same URL, with a newer id in the header."""
    first = await played.add(1)
    second = await played.add(2)
    await played.add(3)
    url = f"/v1/runs/{played.run}/events"
    both = Watcher(browser.client, url, last_event_id=str(second), params={"last_event_id": str(first)})
    query_alone = Watcher(browser.client, url, params={"last_event_id": str(first)})
    async with both, query_alone:
        assert await both.has(1) == ["coder 3"]
        assert await query_alone.has(2) == ["coder 2", "coder 3"]


@pytest.mark.parametrize(
    "text", ["-1", "garbage", "5-", "", "9" * 300, "0-0", "$", "+", ">", "01-1", "1-1,2-2", "\u00fc"], ids=ascii
)
@pytest.mark.parametrize("place", ["header", "query"])
async def test_an_impossible_id_is_refused_before_the_stream(
    browser: Browser, played: PlayedRun, place: str, text: str
) -> None:
    """Nothing that is no id of ours gets to Redis, and nothing is replayed for it."""
    await played.add(1)
    url = f"/v1/runs/{played.run}/events"
    if place == "header":
        answer = await browser.client.get(url, headers=[(b"last-event-id", text.encode())])
    else:
        answer = await browser.client.get(url, params={"last_event_id": text})
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-request")


async def test_two_ids_are_none(browser: Browser, played: PlayedRun) -> None:
    """Two headers contradict each other."""
    headers = [("last-event-id", "1-1"), ("last-event-id", "1-2")]
    answer = await browser.client.get(f"/v1/runs/{played.run}/events", headers=headers)
    assert answer.status_code == 400


# ---- gaps


async def test_what_was_trimmed_is_a_gap(door: Door, browser: Browser, played: PlayedRun) -> None:
    """The buffer no longer has what came next: said, then what there is; from the beginning just the same."""
    first = await played.add(1)
    await played.add(2, 5)
    await door.commands.xtrim(keys.events(played.run), maxlen=2, approximate=False)
    gaps = await metric(door, "towline_sse_gaps_total")
    async with browser.watch(played.run, str(first)) as resumed, browser.watch(played.run) as whole:
        assert await resumed.has(3) == ["towline.gap", "coder 4", "coder 5"]
        assert await whole.has(3) == ["towline.gap", "coder 4", "coder 5"]
        gap = resumed.frames[0]
        assert gap.data == {"run": played.run, "after": str(first), "first_available": resumed.frames[1].id}
        assert not gap.has_id
        assert whole.frames[0].data["after"] is None
    assert await metric(door, "towline_sse_gaps_total") == gaps + 2


async def test_an_id_from_the_future_is_a_gap_and_then_what_comes(browser: Browser, played: PlayedRun) -> None:
    """A cursor beyond the stream cannot be vouched for; the reader is told, and not left with signs of life."""
    tail = await played.add(1)
    async with browser.watch(played.run, f"{tail.epoch + 3_600_000_000}-{tail.seq + 10}") as watcher:
        assert await watcher.has(2) == ["towline.gap", "coder 1"]
        await played.add(2)
        assert await watcher.has(3) == ["towline.gap", "coder 1", "coder 2"]


async def test_readers_of_a_lost_stream_are_told_when_it_begins_anew(
    door: Door, browser: Browser, played: PlayedRun
) -> None:
    """Redis is emptied under open readers; the owner begins again. They hear of a gap, then everything."""
    await played.add(1, 2)
    async with browser.watch(played.run) as watcher:
        await watcher.has(2)
        await RunKeys(door.commands, played.run).flush()
        await played.begin()
        await played.add(3)
        assert await watcher.has(4) == ["coder 1", "coder 2", "towline.gap", "coder 3"]
        async with browser.watch(played.run, watcher.frames[1].id) as resumed:
            assert await resumed.has(2) == ["towline.gap", "coder 3"]


async def test_readers_of_a_stream_with_lower_ids_are_told(door: Door, browser: Browser, played: PlayedRun) -> None:
    """The new stream's ids are below those seen, so that no blocking read would ever bring them."""
    await played.add(1, 2)
    async with browser.watch(played.run) as watcher:
        await watcher.has(2)
        await RunKeys(door.commands, played.run).flush()
        fields = {"source": "coder", "uid": "", "type": "output", "ts": str(TS)}
        await door.commands.xadd(keys.events(played.run), {"marker": ""}, id="5-100")
        for seq in (101, 102):
            await door.commands.xadd(keys.events(played.run), {**fields, "data": f"new {seq}"}, id=f"5-{seq}")
        assert await watcher.has(5, within_s=15) == ["coder 1", "coder 2", "towline.gap", "new 101", "new 102"]
        await door.commands.xadd(keys.events(played.run), {**fields, "data": "new 103"}, id="5-103")
        assert (await watcher.has(6))[-1] == "new 103"


async def test_an_older_replica_as_primary_is_a_gap(door: Door, browser: Browser, played: PlayedRun) -> None:
    """The last events are gone with the old primary; the owner fences and sends them again, after a gap."""
    held = RunKeys(door.commands, played.run)
    await played.add(1)
    photograph = await held.photograph()
    await played.add(2)
    async with browser.watch(played.run) as watcher:
        await watcher.has(2)
        await photograph.take_over()
        await played.begin()
        await played.add(2, 3)
        await eventually(lambda: watcher.texts[-1] == "coder 3", 15)
        told = watcher.texts
        assert told[:2] == ["coder 1", "coder 2"]
        assert "towline.gap" in told[2:]
        assert [text for text in told[2:] if text != "towline.gap"] == ["coder 2", "coder 3"]


# ---- ends


@pytest.mark.parametrize("when", ["watching", "coming", "resuming"])
async def test_an_end_that_only_the_record_knows_ends_streams(
    door: Door, browser: Browser, played: PlayedRun, when: str
) -> None:
    """The buffer is gone, the record has the end: what is missing is said; the end's id stops those who come back."""
    cursor = await played.add(1)
    await played.add(2)
    tail = await played.end(record=False)
    await RunKeys(door.commands, played.run).flush()
    if when == "watching":
        async with browser.watch(played.run, str(cursor)) as watcher:
            await eventually(lambda: watcher.comments)
            await played.runs.end(played.run, "completed", "all-sources-ended", tail.seq)
            told = await watcher.is_done(15)
    else:
        await played.runs.end(played.run, "completed", "all-sources-ended", tail.seq)
        async with browser.watch(played.run, str(cursor) if when == "resuming" else None) as watcher:
            told = await watcher.is_done()
    assert told == ["towline.gap", "towline.run.ended", "towline.end"]
    assert watcher.frames[1].data["type"] == "towline.run.ended"
    answer = await browser.client.get(f"/v1/runs/{played.run}/events", headers={"last-event-id": watcher.last_id})
    assert answer.status_code == 204


async def test_an_end_of_which_only_the_last_event_is_lost_is_no_gap(
    door: Door, browser: Browser, played: PlayedRun
) -> None:
    """Nothing but the end itself is missing, and that is in the record."""
    cursor = await played.add(1)
    await played.end()
    await RunKeys(door.commands, played.run).flush()
    async with browser.watch(played.run, str(cursor)) as watcher:
        assert await watcher.is_done() == ["towline.run.ended", "towline.end"]


async def test_a_run_stopped_before_anyone_followed_it_ends_its_streams(door: Door, browser: Browser) -> None:
    """There never was a stream."""
    run = await PlayedRun(door).put()
    await run.runs.end(run.run, "stopped", "requested", 0)
    async with browser.watch(run.run) as watcher:
        assert await watcher.is_done() == ["towline.run.ended", "towline.end"]
    answer = await browser.client.get(f"/v1/runs/{run.run}/events", headers={"last-event-id": watcher.last_id})
    assert answer.status_code == 204


# ---- the rest


async def test_a_run_that_does_not_exist_is_404(browser: Browser) -> None:
    """There is nothing to wait for."""
    answer = await browser.client.get("/v1/runs/nobody/events", headers={"accept": "text/event-stream"})
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")


async def test_head_is_answered_and_over(door: Door, browser: Browser, played: PlayedRun) -> None:
    """The head of a stream, and no stream behind it."""
    answer = await browser.client.head(f"/v1/runs/{played.run}/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert await metric(door, "towline_sse_clients") == 0


async def test_a_quiet_stream_shows_signs_of_life_that_move_no_cursor(browser: Browser, played: PlayedRun) -> None:
    """Comments, no ids; the last id stays that of the last event."""
    tail = await played.add(1)
    async with browser.watch(played.run) as watcher:
        await watcher.has(1)
        before = len(watcher.comments)
        await eventually(lambda: len(watcher.comments) >= before + 3)
        assert watcher.last_id == str(tail)
        assert len(watcher.frames) == 1


async def test_pages_are_the_same_stream(door: Door, browser: Browser, played: PlayedRun) -> None:
    """Page by page, oldest first, each from the last one's id; a gap begins a page, the end ends the last."""
    await played.add(1, 5)
    await played.end()
    await door.commands.xdel(keys.events(played.run), *(await door.commands.xrange(keys.events(played.run)))[3][:1])
    url = f"/v1/runs/{played.run}/events"
    pages = []
    params: dict[str, str] = {"limit": "2"}
    while True:
        answer = await browser.client.get(url, headers={"accept": "application/json"}, params=params)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        pages.append(([item["data"] for item in page["items"] if item["source"]], "gap" in page))
        params["last_event_id"] = page["last_event_id"]
        if "end" in page:
            break
    assert page["end"] == {"run": played.run, "state": "completed"}
    assert [text for texts, _ in pages for text in texts] == ["coder 1", "coder 2", "coder 4", "coder 5"]
    gapped = [texts for texts, has_gap in pages if has_gap]
    assert len(gapped) == 1
    assert gapped[0][0] == "coder 4"


async def test_a_page_has_as_many_events_as_it_may(browser: Browser, played: PlayedRun) -> None:
    """Whatever stands between them: a takeover leaves a mark in the log, which is no event."""
    for number in (1, 2, 3):
        await played.add(number)
        await played.begin()
        await played.begin()
    url = f"/v1/runs/{played.run}/events"
    params = {"limit": "1"}
    for number in (1, 2, 3):
        answer = await browser.client.get(url, headers={"accept": "application/json"}, params=params)
        page = answer.json()
        assert [item["data"] for item in page["items"]] == [f"coder {number}"]
        params["last_event_id"] = page["last_event_id"]


async def test_leaving_sends_readers_elsewhere_and_waits_for_none_that_does_not_read(
    door: Door, played: PlayedRun
) -> None:
    """SIGTERM: each reader gets a `retry` and a clean end; one that takes nothing is cut off; the process is gone."""
    gateway: Gateway = await door.add_gateway({"TOWLINE_SSE_DRAIN_S": "0.5", "TOWLINE_DRAIN_S": "2"})
    async with Browser(door, gateway) as browser:
        await played.add(1)
        async with browser.watch(played.run) as first, browser.watch(played.run) as second:
            await first.has(1)
            await second.has(1)
            deaf = await _deaf_reader(gateway, door.stack.api_key, played.run)
            block = NewEvent("coder", "", "output", "x" * 200_000, TS)
            for _ in range(60):
                await played.add_event(block)
            await first.has(61)
            await second.has(61)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await gateway.stop()
            assert loop.time() - began < 15
            for watcher in (first, second):
                await watcher.is_done()
                assert not watcher.was_broken
                assert len(watcher.retries) == 2
            deaf.close()
    door.stack.gateways.remove(gateway)


async def _deaf_reader(gateway: Gateway, key: str, run: str) -> asyncio.StreamWriter:
    """A connection that asks for a stream and reads nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    writer.write(f"GET /v1/runs/{run}/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
    await writer.drain()
    await reader.readuntil(b"\r\n\r\n")
    return writer
