"""A source's upstream: what it says gets into the log once and in order, however it closes, errs or starts anew."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from followed_runs import FollowedRun, Relay, source
from support import eventually

from common.ids import RunId
from common.store.leases import SourceStatus, look
from common.store.redis import open_redis
from common.store.runs import Runs
from harness.agent.server import Agent
from harness.agent.stream import Answer, Script


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as running:
        yield running


async def test_a_run_from_its_first_event_to_its_end(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit(3)
    await run.has([1, 2, 3])
    stream.end()
    record = await run.ended()
    assert (record.state, record.reason) == ("completed", "sources-completed")
    assert (record.sources[0].state, record.sources[0].reason) == ("completed", "terminal-event")
    entries = await run.entries()
    assert [e["type"] for e in entries] == [
        "output",
        "output",
        "output",
        "result",
        "towline.source.ended",
        "towline.run.ended",
    ]
    assert json.loads(entries[-1]["data"]) == {
        "state": "completed",
        "reason": "sources-completed",
        "sources": {"coder": {"state": "completed", "reason": "terminal-event"}},
    }
    assert record.last_seq == int(entries[-1]["id"].partition("-")[2])
    assert [e["uid"] for e in entries[:4]] == ["1", "2", "3", "4"]
    await eventually(lambda: _is_free(run))
    assert len(stream.requests) == 1
    sent = stream.requests[0].headers
    assert (sent["accept"], sent["accept-encoding"]) == ("text/event-stream", "identity")


async def _is_free(run: FollowedRun) -> bool:
    return not await run.owner()


# ---- connections that end


async def test_an_upstream_that_closes_again_and_again_loses_and_repeats_nothing(
    agent: Agent, relay: Relay, run: FollowedRun
) -> None:
    """A balancer cuts every stream after a fixed life: clean closes are no failures, and each asks for what follows."""
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    for lap in range(5):
        await eventually(lambda lap=lap: len(stream.requests) == lap + 1 and stream.open_connections)
        stream.emit(20)
        await run.has(range(1, 20 * (lap + 1) + 1))
        stream.close()
    stream.end()
    assert (await run.ended()).state == "completed"
    assert await run.numbers() == list(range(1, 102))
    assert [request.last_event_id for request in stream.requests] == [None, "20", "40", "60", "80", "100"]


async def test_an_event_cut_in_the_middle_comes_once_and_whole(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit(2)
    await run.has([1, 2])
    stream.cut()
    await run.has([1, 2, 3])
    assert [request.last_event_id for request in stream.requests] == [None, "2"]


async def test_an_upstream_that_ignores_the_last_id_is_recognised_by_its_ids(
    agent: Agent, relay: Relay, run: FollowedRun
) -> None:
    stream = agent.add("a", Script(resume="replay"))
    before = relay.metric("towline_relay_repeated_events_total")
    await run.put(source(agent.url("a"), resume="ids"))
    for lap in range(3):
        await eventually(lambda lap=lap: len(stream.requests) == lap + 1 and stream.open_connections)
        stream.emit(3)
        await run.has(range(1, 3 * (lap + 1) + 1))
        stream.close()
    assert stream.requests[1].last_event_id == "3"
    assert relay.metric("towline_relay_repeated_events_total") >= before + 3


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
async def test_a_replay_leaves_out_what_was_had(agent: Agent, relay: Relay, run: FollowedRun, ids: bool) -> None:
    stream = agent.add("a", Script(resume="replay", ids=ids))
    await run.put(source(agent.url("a"), resume="replay"))
    for lap in range(3):
        await eventually(lambda lap=lap: len(stream.requests) == lap + 1 and stream.open_connections)
        stream.emit(3)
        await run.has(range(1, 3 * (lap + 1) + 1))
        stream.close()
    assert await run.own() == []
    assert all(request.last_event_id is None for request in stream.requests)


async def test_a_replay_that_lacks_the_last_id_is_told_as_a_gap(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    """The upstream keeps two events, and five were missed: three are lost, and the stream says so."""
    stream = agent.add("a", Script(resume="replay", keep=2))
    await run.put(source(agent.url("a"), resume="replay"))
    await eventually(lambda: stream.open_connections)
    stream.emit(2)
    await run.has([1, 2])
    stream.answer(Answer(503))
    stream.close()
    stream.emit(5)
    await run.has([1, 2, 6, 7])
    assert await run.own() == [("towline.source.gap", {"source": "coder", "after": "2"})]
    assert [e["type"] for e in await run.entries()].index("towline.source.gap") == 2


async def test_a_live_source_tells_a_discontinuity_at_every_open_after_the_first(
    agent: Agent, relay: Relay, run: FollowedRun
) -> None:
    """A failed attempt is no open."""
    stream = agent.add("a", Script(resume="live", ids=False))
    stream.answer(Answer(503))
    await run.put(source(agent.url("a"), resume="live"))
    await eventually(lambda: stream.open_connections)
    stream.emit()
    await run.has([1])
    assert await run.own() == []
    stream.answer(Answer(503))
    stream.close()
    stream.emit()
    await eventually(lambda: len(stream.requests) == 4 and stream.open_connections)
    stream.emit()
    await run.has([1, 3])
    assert await run.own() == [("towline.discontinuity", {"source": "coder"})]


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_honoured(agent: Agent, relay: Relay, run: FollowedRun, status: int) -> None:
    stream = agent.add("a")
    stream.answer(Answer(status, headers={"Retry-After": "2"}))
    await run.put(source(agent.url("a")))
    stream.emit()
    await run.has([1])
    first, second = stream.requests
    assert second.at - first.at >= 2.0


async def test_an_upstream_that_is_down_is_found_again(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    """Refused connections, resets before an answer and 5xx are all retried, apart from each other."""
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit()
    await run.has([1])
    before = relay.metric("towline_relay_upstream_retries_total", reason="no_answer")
    await agent.__aexit__(None, None, None)
    await eventually(lambda: relay.metric("towline_relay_upstream_retries_total", reason="no_answer") >= before + 2)
    await agent.__aenter__()
    again = agent.add("a")
    again.emit(2)
    await run.has([1, 2], within_s=20)


@pytest.mark.parametrize(
    ("where", "status", "why"),
    [
        ("http://127.0.0.1:1/", None, "Connection refused"),
        ("http://localhost:1/", None, "Connection refused"),
        ("agent", 503, "the upstream answered 503"),
        ("agent", 200, "the upstream closed the connection, having sent nothing"),
    ],
    ids=["refused", "refused-by-name", "503", "empty"],
)
async def test_why_a_source_brings_nothing_is_told_until_it_does(
    agent: Agent, relay: Relay, run: FollowedRun, where: str, status: int | None, why: str
) -> None:
    """What a gateway shows of it, though nothing was ever heard of this run."""
    stream = agent.add("a")
    if status is not None:
        stream.answer(Answer(status, headers={"Content-Type": "text/event-stream"}, body=""), times=3)
    await run.put(source(agent.url("a") if where == "agent" else where))

    async with open_redis(relay.redis_url) as store:

        async def told() -> SourceStatus:
            said = (await look(store, [run.run]))[run.run].status or b'{"coder": null}'
            return msgspec.json.decode(said, type=dict[str, SourceStatus | None])["coder"] or UNTOLD

        await eventually(lambda: _is_told(told, why))
        assert (await told()).live_ms is None
        if where == "agent":
            stream.emit()
            await run.has([1], within_s=20)
            await eventually(lambda: _is_told(told, ""))
            assert (await told()).live_ms is not None


UNTOLD = SourceStatus(connected=False, live_ms=None, progress_ms=None, verdict="active", failure="untold")


async def _is_told(told: Callable[[], Awaitable[SourceStatus]], why: str) -> bool:
    return (await told()).failure == why


# ---- final answers


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(204), "upstream-finished"),
        (Answer(302, headers={"Location": "/elsewhere"}), "upstream-redirected"),
        (Answer(404), "upstream-refused"),
        (Answer(401), "upstream-refused"),
        (Answer(200, headers={"Content-Type": "text/html"}, body="<html>"), "not-an-event-stream"),
    ],
    ids=["204", "redirect", "404", "401", "html"],
)
async def test_a_final_answer_ends_the_source_where_everybody_sees_it(
    agent: Agent, relay: Relay, run: FollowedRun, answer: Answer, reason: str
) -> None:
    stream = agent.add("a")
    stream.answer(answer, times=100)
    await run.put(source(agent.url("a")))
    record = await run.ended()
    assert (record.state, record.sources[0].state, record.sources[0].reason) == ("failed", "failed", reason)
    (kind, told), (last, _) = await run.own()
    assert (kind, last) == ("towline.source.ended", "towline.run.ended")
    assert (told["source"], told["state"], told["reason"]) == ("coder", "failed", reason)
    assert str(answer.status) in told["detail"] or "text/html" in told["detail"]
    assert len(stream.requests) == 1


@pytest.mark.parametrize("url", ["http://10.1.2.3/stream", "http://169.254.169.254/latest", "ftp://127.0.0.1/"])
async def test_an_address_that_is_not_allowed_is_never_called(relay: Relay, run: FollowedRun, url: str) -> None:
    await run.put(source(url))
    record = await run.ended()
    assert (record.state, record.sources[0].reason) == ("failed", "egress-refused")


async def test_the_end_of_each_source_is_written_once(
    agent: Agent, relay: Relay, run: FollowedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One while the run goes on, the other with it; in Postgres both, and the run, in this order."""
    written: list[str] = []
    end_source, end_run = Runs.end_source, Runs.end

    async def note_source(runs: Runs, of: RunId, source: str, *end: Any) -> None:
        written.extend([source] if of == run.run else [])
        await end_source(runs, of, source, *end)

    async def note_run(runs: Runs, of: RunId, *end: Any) -> bool:
        written.extend(["the run"] if of == run.run else [])
        return await end_run(runs, of, *end)

    monkeypatch.setattr(Runs, "end_source", note_source)
    monkeypatch.setattr(Runs, "end", note_run)
    first, second = agent.add("first"), agent.add("second")
    await run.put(source(agent.url("first"), "first"), source(agent.url("second"), "second"))
    await eventually(lambda: first.open_connections and second.open_connections)
    first.end()
    await eventually(lambda: written == ["first"])
    second.end()
    assert (await run.ended()).state == "completed"
    assert written == ["first", "second", "the run"]


async def test_one_source_that_fails_leaves_the_others_and_fails_the_run_in_the_end(
    agent: Agent, relay: Relay, run: FollowedRun
) -> None:
    """Each source has its own upstream, resume point and end."""
    good, bad = agent.add("good"), agent.add("bad")
    bad.answer(Answer(404), times=100)
    await run.put(source(agent.url("good"), "good"), source(agent.url("bad"), "bad"))
    await eventually(lambda: good.open_connections)
    good.emit(2)
    await run.has([1, 2], source="good")
    good.close()
    good.emit()
    await run.has([1, 2, 3], source="good")
    assert await run.state() == "active"
    good.end()
    record = await run.ended()
    assert record.state == "failed"
    assert {s.source: s.state for s in record.sources} == {"good": "completed", "bad": "failed"}


# ---- time


async def test_a_source_that_sends_nothing_for_too_long_has_ended(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    stream = agent.add("a")
    await run.put(source(agent.url("a"), idle_timeout_s=1.0))
    record = await run.ended()
    assert (record.state, record.sources[0].reason) == ("failed", "idle-timeout")
    await eventually(lambda: stream.open_connections == 0)


async def test_a_source_that_was_never_reached_ends_with_the_reason(relay: Relay, run: FollowedRun) -> None:
    await run.put(source("http://127.0.0.1:1/", idle_timeout_s=1.0))
    record = await run.ended()
    assert (record.state, record.sources[0].reason) == ("failed", "idle-timeout")
    assert record.sources[0].detail == "the upstream sent nothing for 1 s (Connection refused)"


async def test_comments_are_a_sign_of_life(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    """They are not stored, and keep the source from being taken for dead."""
    stream = agent.add("a", Script(comment_every_s=0.1))
    await run.put(source(agent.url("a"), idle_timeout_s=3.0), max_duration_s=5.0)
    record = await run.ended()
    assert (record.state, record.reason) == ("expired", "max-duration")
    assert [kind for kind, _ in await run.own()] == ["towline.run.ended"]
    await eventually(lambda: stream.open_connections == 0)
    assert len(stream.requests) == 1


async def test_a_run_that_is_stopped_ends_at_once(agent: Agent, relay: Relay, run: FollowedRun) -> None:
    stream = agent.add("a")
    await run.put(source(agent.url("a")))
    await eventually(lambda: stream.open_connections)
    stream.emit(2)
    await run.has([1, 2])
    await run.runs.request_stop(run.run)
    record = await run.ended()
    assert (record.state, record.reason) == ("stopped", "stop-requested")
    assert (await run.own())[-1] == (
        "towline.run.ended",
        {
            "state": "stopped",
            "reason": "stop-requested",
            "sources": {"coder": {"state": "stopped", "reason": "stop-requested"}},
        },
    )
    await eventually(lambda: stream.open_connections == 0)
