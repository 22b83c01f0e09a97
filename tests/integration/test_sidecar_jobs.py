"""The sidecar against a stand-in worker: what a delivery leads to. Real sockets, a real journal on disk."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sidecar_tools
from sidecar_hub import Hub
from sidecar_starts import logged
from support import eventually

from towline.sidecar import Sidecar, connection
from towline.wire import frames, json


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def sidecar(hub: Hub, tmp_path: Path, executions: Path) -> AsyncIterator[Sidecar]:
    sidecar_tools.release.clear()
    running = Sidecar(url=hub.url, token="secret", state_dir=tmp_path / "state", tools=sidecar_tools.ALL)
    task = asyncio.create_task(running.run())
    await hub.session()
    yield running
    sidecar_tools.release.set()
    running.stop()
    await asyncio.wait_for(task, 15)


def value(result: frames.JobResult) -> object:
    """The result as a value; fails unless the job completed."""
    assert result.outcome == "completed", result.error
    return json.loads(bytes(result.result))


def code(result: frames.JobResult) -> str:
    """The code of an error."""
    assert result.error is not None, result.outcome
    return result.error.code


async def test_hello_tells_machine_journal_and_tools(hub: Hub, sidecar: Sidecar) -> None:
    hello = (await hub.session()).hello
    assert hello.machine
    assert hello.journal
    assert hello.running == []
    tools = {tool.name: tool for tool in hello.tools}
    assert tools["look"].hints.repeatable
    assert not tools["click"].hints.repeatable
    assert tools["click"].description == "Press a button: has a side effect."
    assert tools["click"].input_schema["required"] == ["button"]
    assert hub.authorizations == {"Bearer secret": 1}


async def test_a_job_runs_and_is_answered_under_its_frame(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    session = await hub.session()
    async with logged() as lines:
        assert value(await session.run("click", {"button": "buy"}, traceparent="a-trace")) == "clicked buy"
        assert value(await session.run("look", {"at": "page"}, job="job-2", hinted=True)) == "saw page"
    assert executions.read_text() == "click buy\nlook page\n"
    ended = [(line["job"], line["traceparent"]) for line in lines if line["event"] == "job_ended"]
    assert ended == [("job-1", "a-trace"), ("job-2", "")]


@pytest.mark.parametrize(("tool", "hinted"), [("click", False), ("look", True)])
async def test_a_second_delivery_is_answered_and_not_run(
    hub: Hub, sidecar: Sidecar, executions: Path, tool: str, hinted: bool
) -> None:
    """The outcome was sent and never acknowledged; the job comes again on a new socket under a new frame id."""
    args = {"button": "buy"} if tool == "click" else {"at": "buy"}
    first = await hub.session()
    before = value(await first.run(tool, args, hinted=hinted))
    await first.drop()

    second = await hub.session(2)
    again = await second.run(tool, args, hinted=hinted, attempt=2)
    assert value(again) == before
    assert again.replayed
    assert executions.read_text().count("\n") == 1


async def test_an_acknowledged_job_does_not_run_again(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    """The journal let go of the outcome, but not of the fact that the job ran."""
    session = await hub.session()
    for job, tool, args, hinted in (("u", "click", {"button": "u"}, False), ("h", "look", {"at": "h"}, True)):
        await session.run(tool, args, job=job, hinted=hinted)
        await session.send(frames.JobResultAck([job]))
    await session.run("click", {"button": "next"}, job="next")  # acknowledgements ride on its commit
    for job, tool, args, hinted in (("u", "click", {"button": "u"}, False), ("h", "look", {"at": "h"}, True)):
        again = await session.run(tool, args, job=job, hinted=hinted, attempt=2)
        assert (again.outcome, code(again)) == ("unknown", "acknowledged")
    assert executions.read_text() == "click u\nlook h\nclick next\n"


async def test_a_job_outlives_its_socket_and_is_joined(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    """The line is cut while a tool runs. The next hello lists the job; a redelivery joins it; both are answered."""
    first = await hub.session()
    await first.deliver("click_plain")
    await eventually(executions.read_text)
    await first.drop()

    second = await hub.session(2)
    assert second.hello.running == ["job-1"]
    frame = await second.deliver("click_plain", attempt=2)
    assert (await second.status()).busy
    assert not second.results(frame=frame)
    sidecar_tools.release.set()
    assert value(await second.result(frame=frame)) == "done"
    assert value(await second.result(job="job-1")) == "done"
    assert executions.read_text() == "click_plain\n"


async def test_what_only_waits_is_dropped_with_its_socket(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    first = await hub.session()
    await first.deliver("click_plain", job="runs")
    await eventually(executions.read_text)
    await first.deliver("look", {"at": "waiting"}, job="waits", hinted=True)
    assert (await first.status()).queue == 1
    await first.drop()

    second = await hub.session(2)
    assert second.hello.running == ["runs"], "what waits is not running"
    sidecar_tools.release.set()
    await second.result(job="runs")
    assert (await second.status()).queue == 0
    assert value(await second.run("look", {"at": "waiting"}, job="waits", hinted=True)) == "saw waiting"
    assert executions.read_text() == "click_plain\nlook waiting\n"


async def test_status_is_answered_at_once_while_a_job_runs(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    session = await hub.session()
    assert not (await session.status()).busy
    await session.deliver("look", {"seconds": 30}, hinted=True)
    await eventually(executions.read_text)
    took_s = []
    for _ in range(20):
        began = time.perf_counter()
        status = await session.status()
        took_s.append(time.perf_counter() - began)
        assert status.busy
        assert status.uptime_s > 0
    # The job takes 30 s. Most answers come within the test's own poll, 10 ms, unless the machine is busy.
    assert sorted(took_s)[10] < 1


async def test_jobs_run_one_by_one_in_their_order(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    """Forty jobs and forty questions at once: nothing is starved, nothing overtakes."""
    session = await hub.session()
    jobs = [await session.deliver("look", {"at": f"{n}"}, job=f"job-{n}", hinted=True) for n in range(40)]
    for n in range(40):
        await session.send(frames.Status(f"s{n}"))
    for frame in jobs:
        await session.result(frame=frame)
    assert executions.read_text().split("\n")[:-1] == [f"look {n}" for n in range(40)]
    assert sum(isinstance(frame, frames.StatusResult) for frame in session.received) == 40
    assert not session.closed.is_set()


async def test_a_flooded_lane_refuses_by_name(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    session = await hub.session()
    await session.deliver("click_plain", job="runs")
    await eventually(executions.read_text)
    sent = [await session.deliver("look", {"at": f"{n}"}, job=f"job-{n}", hinted=True) for n in range(65)]
    refused = await session.result(frame=sent[-1])
    assert (refused.outcome, code(refused)) == ("failed", "lane-full")
    assert refused.error.retryable
    sidecar_tools.release.set()
    assert value(await session.result(frame=sent[0])) == "saw 0"


@pytest.mark.parametrize(
    ("name", "args", "hinted", "expected"),
    [
        ("nothing", {}, False, "unknown-tool"),
        ("click", {}, False, "bad-args"),
        ("click", {"button": 3}, False, "bad-args"),
        ("click", {"button": "x", "extra": 1}, False, "bad-args"),
        ("click", {"button": "x"}, True, "hints-changed"),
        ("give", {"kind": "nan"}, True, "result-unusable"),
        ("give", {"kind": "object"}, True, "result-unusable"),
        ("give", {"kind": "huge"}, True, "result-too-large"),
        ("give", {"kind": "raise"}, True, "tool-error"),
        ("give", {"kind": "exit"}, True, "tool-error"),
    ],
)
async def test_what_cannot_be_done_fails_by_name(
    hub: Hub, sidecar: Sidecar, executions: Path, name: str, args: dict[str, object], hinted: bool, expected: str
) -> None:
    session = await hub.session()
    result = await session.run(name, args, hinted=hinted)
    assert (result.outcome, code(result)) == ("failed", expected)
    assert executions.read_text() == ""
    assert value(await session.run("look", {"at": "after"}, job="after", hinted=True)) == "saw after"


async def test_bad_arguments_name_the_field(hub: Hub, sidecar: Sidecar) -> None:
    result = await (await hub.session()).run("click", {"button": 3})
    assert result.error is not None
    assert "$.button" in result.error.message


async def test_text_in_a_result_is_mended_and_marked(hub: Hub, sidecar: Sidecar) -> None:
    result = await (await hub.session()).run("give", {"kind": "surrogate"}, hinted=True)
    assert value(result) == "half \ufffd"
    assert result.mended


async def test_a_result_over_the_workers_limit_fails_and_the_socket_lives(
    hub: Hub, tmp_path: Path, executions: Path
) -> None:
    hub.max_frame_bytes = 1000
    sidecar = Sidecar(url=hub.url, token="secret", state_dir=tmp_path / "s", tools=sidecar_tools.ALL)
    task = asyncio.create_task(sidecar.run())
    session = await hub.session()
    assert code(await session.run("look", {"at": "x" * 2000}, hinted=True)) == "result-too-large"
    assert value(await session.run("look", {"at": "y"}, job="job-2", hinted=True)) == "saw y"
    sidecar.stop()
    await task


@pytest.mark.parametrize("hinted", [True, False])
async def test_a_late_job_is_answered_and_not_started(
    hub: Hub, sidecar: Sidecar, executions: Path, hinted: bool
) -> None:
    """Its deadline passes while it waits: looked at when its turn comes, not when it arrives."""
    session = await hub.session()
    await session.deliver("click_plain", job="runs")
    await eventually(executions.read_text)
    name, args = ("look", {"at": "late"}) if hinted else ("click", {"button": "late"})
    late = await session.deliver(name, args, job="late", hinted=hinted, deadline_s=0.3)
    await asyncio.sleep(0.5)
    assert not session.results(frame=late)
    sidecar_tools.release.set()
    result = await session.result(frame=late)
    assert (result.outcome, code(result)) == ("failed", "not-started")
    assert executions.read_text() == "click_plain\n"


async def test_a_job_whose_begin_mark_took_too_long_is_not_started(
    hub: Hub, sidecar: Sidecar, executions: Path, tmp_path: Path
) -> None:
    """Another process holds the journal while the deadline passes: checked once more between the mark and the start."""
    session = await hub.session()
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "journal.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        frame = await session.deliver("click", {"button": "late"}, deadline_s=0.3)
        await asyncio.sleep(0.5)
        other.execute("ROLLBACK")
    assert code(await session.result(frame=frame)) == "not-started"
    assert executions.read_text() == ""


async def test_what_ended_between_hello_and_welcome_is_answered_by_job(
    hub: Hub, sidecar: Sidecar, executions: Path
) -> None:
    """The hello said that it runs, so the server waits for it on this socket and will not send it again."""
    first = await hub.session()
    await first.deliver("click_plain")
    await eventually(executions.read_text)
    hub.may_welcome.clear()
    await first.drop()
    await eventually(lambda: len(hub.handshakes) == 2)
    await eventually(lambda: hub.hellos == 2)
    (job,) = [task for task in asyncio.all_tasks() if task.get_name() == "job:job-1"]
    sidecar_tools.release.set()
    await asyncio.wait_for(job, 10)
    hub.may_welcome.set()
    second = await hub.session(2)
    assert second.hello.running == ["job-1"]
    result = await second.result(job="job-1")
    assert (value(result), result.replayed) == ("done", True), "it had ended"


async def test_what_waits_behind_a_job_of_another_socket_does_not_start_after_stop(
    hub: Hub, sidecar: Sidecar, executions: Path
) -> None:
    first = await hub.session()
    await first.deliver("click_plain")
    await eventually(executions.read_text)
    await first.drop()
    second = await hub.session(2)
    await second.deliver("look", {"at": "never"}, job="waits", hinted=True)
    assert (await second.status()).queue == 1
    sidecar.stop()

    async def is_heeded() -> bool:
        return (await second.status()).queue == 0

    await eventually(is_heeded)
    sidecar_tools.release.set()
    await asyncio.wait_for(second.closed.wait(), 5)
    assert executions.read_text() == "click_plain\n"


async def test_status_goes_before_results_that_wait_to_be_written(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    """The worker reads nothing for a while, more piles up than the network holds, then it asks."""
    session = await hub.session()
    session.socket.transport.pause_reading()
    async with logged() as lines:
        for n in range(16):
            await session.deliver("look", {"at": "x" * 1_000_000}, job=f"job-{n}", hinted=True)
        await eventually(lambda: [line["event"] for line in lines].count("job_ended") == 16)
        await session.send(frames.Status("urgent"))
        # Frames are read in their order: when this job has ended, the question was read.
        after = await session.deliver("look", {"at": "after it"}, job="after it", hinted=True)
        await eventually(lambda: [line["event"] for line in lines].count("job_ended") == 17)
    session.socket.transport.resume_reading()
    await session.result(frame=after)
    came = [type(frame) for frame in session.received]
    behind = came[came.index(frames.StatusResult) :]
    assert behind.count(frames.JobResult) > 1, "not only the one that was asked for later"


async def test_a_worker_that_reads_no_more_is_left(hub: Hub, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.3)
    hub.heartbeat_s = 0.5
    await (await hub.session()).drop()
    first = await hub.session(2)
    hub.heartbeat_s = 10
    first.socket.transport.pause_reading()
    for n in range(12):
        await first.deliver("look", {"at": "x" * 1_000_000}, job=f"job-{n}", hinted=True)
    second = await hub.session(3)
    assert value(await second.run("look", {"at": "y"}, job="new", hinted=True)) == "saw y"
    first.socket.transport.abort()


async def test_deadlines_go_by_the_servers_clock(tmp_path: Path, executions: Path) -> None:
    """This machine's clock is an hour behind the server's."""
    async with Hub() as hub:
        hub.server_time_skew_s = 3600
        sidecar = Sidecar(url=hub.url, token="secret", state_dir=tmp_path / "s", tools=sidecar_tools.ALL)
        task = asyncio.create_task(sidecar.run())
        session = await hub.session()
        assert code(await session.run("click", {"button": "x"}, deadline_s=60)) == "not-started"
        assert value(await session.run("click", {"button": "y"}, job="job-2", deadline_s=3660)) == "clicked y"
        sidecar.stop()
        await task


@pytest.mark.parametrize(
    ("tool", "args", "hinted", "outcome"),
    [("click", {"button": "slow", "seconds": 30}, False, "unknown"), ("look", {"seconds": 30}, True, "failed")],
)
@pytest.mark.parametrize("why", ["timeout", "cancelled"])
async def test_an_async_tool_is_stopped(
    hub: Hub,
    sidecar: Sidecar,
    executions: Path,
    tool: str,
    args: dict[str, object],
    hinted: bool,
    outcome: str,
    why: str,
) -> None:
    session = await hub.session()
    frame = await session.deliver(tool, args, hinted=hinted, timeout_s=0.2 if why == "timeout" else 30)
    await eventually(executions.read_text)
    if why == "cancelled":
        await session.send(frames.JobCancel(frame))
    result = await session.result(frame=frame)
    assert (result.outcome, code(result), result.lane_busy) == (outcome, why, False)
    assert result.error is not None
    assert result.error.message.endswith("it may or may not have had its effect") == (outcome == "unknown")
    again = await session.run(tool, args, hinted=hinted, attempt=2)
    assert (again.outcome, code(again), again.replayed) == (outcome, why, True)
    assert not (await session.status()).busy


@pytest.mark.parametrize("why", ["timeout", "cancelled"])
async def test_a_plain_function_keeps_the_lane_busy(hub: Hub, sidecar: Sidecar, executions: Path, why: str) -> None:
    """It cannot be stopped: the job ends at once, the lane is free only when the function has returned."""
    session = await hub.session()
    frame = await session.deliver("click_plain", timeout_s=0.2 if why == "timeout" else 30)
    await eventually(executions.read_text)
    if why == "cancelled":
        await session.send(frames.JobCancel(frame))
    first = await session.result(frame=frame)
    assert (first.outcome, code(first), first.lane_busy) == ("unknown", why, True)
    joined = await session.deliver("click_plain", attempt=2)
    assert (await session.result(frame=joined)).lane_busy
    waits = await session.deliver("look", {"at": "next"}, job="next", hinted=True)
    assert (await session.status()).busy
    assert not session.results(frame=waits)

    sidecar_tools.release.set()
    second = await session.result(frame=frame, nth=2)
    assert (second.outcome, code(second), second.lane_busy) == ("unknown", why, False)
    assert not (await session.result(frame=joined, nth=2)).lane_busy
    assert value(await session.result(frame=waits)) == "saw next"
    assert executions.read_text() == "click_plain\nlook next\n"


async def test_a_busy_lane_is_told_on_the_next_socket_too(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    first = await hub.session()
    frame = await first.deliver("click_plain", timeout_s=0.1)
    await first.result(frame=frame)
    await first.drop()
    second = await hub.session(2)
    assert second.hello.running == ["job-1"]
    assert (await second.result(job="job-1")).lane_busy
    sidecar_tools.release.set()
    assert not (await second.result(job="job-1", nth=2)).lane_busy


async def test_a_coroutine_that_ignores_its_cancel_is_answered_too(hub: Hub, sidecar: Sidecar) -> None:
    session = await hub.session()
    frame = await session.deliver("stubborn", {"seconds": 2.5}, hinted=True, timeout_s=0.1)
    first = await session.result(frame=frame)
    assert (code(first), first.lane_busy) == ("timeout", True)
    assert not (await session.result(frame=frame, nth=2)).lane_busy


async def test_a_waiting_job_is_cancelled_without_running(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    session = await hub.session()
    await session.deliver("click_plain", job="runs")
    await eventually(executions.read_text)
    waits = await session.deliver("click", {"button": "no"}, job="waits")
    await session.send(frames.JobCancel(waits))
    result = await session.result(frame=waits)
    assert (result.outcome, code(result)) == ("failed", "cancelled")
    sidecar_tools.release.set()
    await session.run("look", job="next", hinted=True)
    assert "click no" not in executions.read_text()


async def test_the_users_no_is_an_answer_and_leaves_no_row(hub: Hub, sidecar: Sidecar, executions: Path) -> None:
    session = await hub.session()
    refused = await session.run("click_confirmed", {"button": "other"})
    assert (refused.outcome, code(refused)) == ("failed", "not-confirmed")
    assert executions.read_text() == "asked click_confirmed other\n"
    again = await session.run("click_confirmed", {"button": "other"}, attempt=2)
    assert not again.replayed, "nothing was marked, so the user is asked again"
    assert value(await session.run("click_confirmed", {"button": "allowed"}, job="job-2")) == "clicked allowed"


@pytest.mark.parametrize("end", ["cancelled", "deadline", "socket"])
async def test_a_question_that_nobody_answers_ends_with_its_job(
    hub: Hub, sidecar: Sidecar, executions: Path, end: str
) -> None:
    """The job is not running, so what waits behind it moves when it is cancelled, late, or its socket is gone."""
    session = await hub.session()
    asked = await session.deliver("click_unanswered", {"button": "x"}, deadline_s=1 if end == "deadline" else 60)
    await eventually(executions.read_text)
    behind = await session.deliver("look", {"at": "behind"}, job="behind", hinted=True)
    status = await session.status()
    assert (status.busy, status.queue) == (False, 2)
    if end == "socket":
        await session.drop()
        session = await hub.session(2)
        assert session.hello.running == []
        behind = await session.deliver("look", {"at": "behind"}, job="behind", hinted=True)
    elif end == "cancelled":
        await session.send(frames.JobCancel(asked))
        result = await session.result(frame=asked)
        assert (result.outcome, code(result)) == ("failed", "cancelled")
    else:
        assert code(await session.result(frame=asked)) == "not-confirmed"
    assert value(await session.result(frame=behind)) == "saw behind"
    assert (await session.status()).queue == 0
    assert executions.read_text() == "asked click_unanswered x\nlook behind\n"


async def test_cancelled_in_the_instant_of_its_delivery_it_does_not_run(
    hub: Hub, sidecar: Sidecar, executions: Path
) -> None:
    """Both frames arrive together, before the job's first step."""
    session = await hub.session()
    for number in range(20):
        frame = await session.deliver("look", {"at": "x", "seconds": 20}, job=f"job-{number}", hinted=True)
        await session.send(frames.JobCancel(frame))
        result = await session.result(frame=frame, within_s=5)
        assert (result.outcome, code(result)) == ("failed", "cancelled")


async def test_frames_out_of_order_hurt_nobody(hub: Hub, sidecar: Sidecar) -> None:
    session = await hub.session()
    welcome = frames.Welcome("other", 9, 10, 1, 0.0, "eve")
    for text in ('{"type":"tomorrow","x":1}', "no json", "[]", '{"type":"job"}', frames.encode(welcome)):
        await session.socket.send(text)
    await session.socket.send(b"\x00binary")
    for frame in (frames.JobCancel("nobody"), frames.JobResultAck(["nobody"]), frames.Pong(99), frames.Ping(7)):
        await session.send(frame)
    await eventually(lambda: frames.Pong(7) in session.received)
    assert value(await session.run("look", {"at": "still"}, hinted=True)) == "saw still"
    bad_time = frames.Job("f", "j", "k", "yesterday", "look", frames.msgspec.Raw(b"{}"), 1, "never", hinted=True)
    await session.send(bad_time)
    assert code(await session.result(frame="f")) == "bad-frame"
