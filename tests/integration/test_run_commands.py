"""`towline runs` as a process: what people and scripts see of a run, what is sent, and the exit codes."""

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Ended, towline
from played_gateway import NO_CONTENT, SILENT, PlayedGateway, document, end, event, gap, opened, refusal
from support import eventually

from harness.stack import inherited_environment

KEY = "secret-key"
RUN: dict[str, Any] = {
    "run": "order-17",
    "state": "active",
    "reason": None,
    "owner": "relay-1",
    "created_at": "2026-01-02T03:04:05.000Z",
    "ended_at": None,
    "progress_types": ["output"],
    "terminal_types": ["result"],
    "stall_after_s": 900.0,
    "max_duration_s": 86400.0,
    "sources": [
        {
            "source": "planner",
            "url": "https://agent.internal/17",
            "resume": "ids",
            "idle_timeout_s": 1800.0,
            "connected": True,
            "live_at": "2026-01-02T03:04:06.000Z",
            "progress_at": None,
            "verdict": "stalled",
            "failure": None,
            "state": None,
            "reason": None,
            "detail": None,
        }
    ],
}


async def runs(gateway: PlayedGateway, *arguments: str, **variables: str) -> Ended:
    return await towline("runs", *arguments, TOWLINE_URL=gateway.url, TOWLINE_API_KEY=KEY, **variables)


async def following(gateway: PlayedGateway, *arguments: str) -> asyncio.subprocess.Process:
    """`towline runs follow`, to be looked at while it runs."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.cli", "runs", "follow", *arguments,
        env={**inherited_environment(), "TOWLINE_URL": gateway.url, "TOWLINE_API_KEY": KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_run_as_people_follow_it() -> None:
    """One line an event, whatever is in it; a lost connection is resumed and said, apart from the results."""
    hostile = event(2, event_type="note", text="two\nlines \x1b[2J[red]")
    async with PlayedGateway.start(opened(event(1), hostile), opened(gap(), event(3), end())) as gateway:
        ended = await runs(gateway, "follow", "r")
    assert ended.code == 0
    first, second, missing, third, last = ended.out.splitlines()
    assert first.split() == ["16:00:00.001Z", "planner", "output", '{"n":1}']
    assert second.endswith("two lines \ufffd[2J[red]")
    assert "events are missing here" in missing
    assert third.endswith('{"n":3}')
    assert last == "the run has ended: completed"
    assert "the gateway closed the stream; resuming in 0.1 s" in ended.err
    assert gateway.requests[1].last_event_id == "7-2"


async def test_a_run_as_programs_follow_it() -> None:
    async with PlayedGateway.start(opened(event(1), gap(), end(state="failed"))) as gateway:
        ended = await runs(gateway, "follow", "r", "--json")
    assert (ended.code, ended.err) == (1, "")
    assert ended.lines() == [
        {
            "run": "r",
            "id": "7-1",
            "source": "planner",
            "uid": "u1",
            "ts": 1764000000001,
            "type": "output",
            "data": '{"n":1}',
        },
        {"gap": {"run": "r", "after": "7-1", "first_available": "7-9"}},
        {"end": {"run": "r", "state": "failed"}},
    ]


async def test_several_runs_are_told_apart() -> None:
    stream = opened(event(1, run="a"), event(2, run="b"), end("a"), end("b", "stopped"))
    async with PlayedGateway.start(stream) as gateway:
        ended = await runs(gateway, "follow", "a", "b")
    assert ended.code == 1
    assert [line.split()[0] for line in ended.out.splitlines()] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("expired", 1)])
async def test_a_run_whose_end_was_seen_before_says_how_it_ended(state: str, code: int) -> None:
    async with PlayedGateway.start(NO_CONTENT, document({**RUN, "state": state})) as gateway:
        ended = await runs(gateway, "follow", "order-17", "--last-event-id", "7-9", "--json")
    assert (ended.code, ended.out) == (code, "")
    assert gateway.requests[0].last_event_id == "7-9"


async def test_refusals_end_it() -> None:
    async with PlayedGateway.start(refusal(404, "not-found")) as gateway:
        ended = await runs(gateway, "follow", "r")
    assert (ended.code, ended.out) == (3, "")
    assert "not-found (404): why" in ended.err


@pytest.mark.parametrize("is_json", [False, True], ids=["lines", "json"])
async def test_an_event_is_there_when_it_comes_and_ctrl_c_says_how_to_go_on(is_json: bool) -> None:
    """Into a pipe, whose other end waits for each line."""
    async with PlayedGateway.start(opened(event(1), SILENT)) as gateway:
        process = await following(gateway, "r", *(["--json"] if is_json else []))
        assert process.stdout is not None
        async with asyncio.timeout(30):
            assert b"u1" in await process.stdout.readline() or not is_json
            gateway.send(event(2))
            await process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    assert process.returncode == 130
    assert err.decode() == "to go on from here: --last-event-id 7-2\n"


async def test_a_terminal_has_colours_and_a_pipe_has_none() -> None:
    async with PlayedGateway.start(opened(event(1), end())) as gateway:
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "towline.cli", "runs", "follow", "r",
            env={**inherited_environment(), "TOWLINE_URL": gateway.url, "TOWLINE_API_KEY": KEY, "TERM": "xterm"},
            stdout=theirs,
        )  # fmt: skip
        assert await asyncio.wait_for(process.wait(), 30) == 0
        shown = os.read(ours, 10_000).decode()
        os.close(ours)
        os.close(theirs)
        piped = await runs(gateway, "follow", "r")
    assert "\x1b[36moutput" in shown
    assert "\x1b" not in piped.out


async def test_start_sends_sources_with_secrets_from_elsewhere(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("Bearer from-a-file\n")
    async with PlayedGateway.start(document(RUN, status=201)) as gateway:
        ended = await runs(
            gateway,
            "start",
            "order-17",
            *("--source", "a=https://a.internal/stream?x=1", "--source", "b=https://b.internal/stream"),
            *("--resume", "ids", "--resume", "b=live"),
            *("--header", f"Authorization=@{token}", "--header", "b/X-Key=env:KEY_OF_B"),
            *("--terminal-type", "done", "--stall-after-s", "60", "--json"),
            KEY_OF_B="from-the-environment",
        )
    assert ended.code == 0, ended.err
    assert ended.document() == RUN
    (request,) = gateway.requests
    assert (request.method, request.target) == ("PUT", "/v1/runs/order-17")
    assert json.loads(request.body) == {
        "sources": [
            {
                "source": "a",
                "url": "https://a.internal/stream?x=1",
                "resume": "ids",
                "headers": {"Authorization": "Bearer from-a-file"},
                "idle_timeout_s": 1800.0,
            },
            {
                "source": "b",
                "url": "https://b.internal/stream",
                "resume": "live",
                "headers": {"Authorization": "Bearer from-a-file", "X-Key": "from-the-environment"},
                "idle_timeout_s": 1800.0,
            },
        ],
        "progress_types": ["output", "result", "assistant", "tool_result"],
        "terminal_types": ["done"],
        "stall_after_s": 60.0,
        "max_duration_s": 86400.0,
    }


async def test_show_stop_and_list() -> None:
    ended_run = {**RUN, "state": "stopped", "ended_at": "2026-01-02T03:05:00.000Z", "owner": None}
    page = {"items": [RUN, ended_run], "next_cursor": None}
    async with PlayedGateway.start(document(RUN), document(ended_run), document(page), document(page)) as gateway:
        shown = await runs(gateway, "show", "order-17")
        stopped = await runs(gateway, "stop", "order-17", "--json")
        listed = await runs(gateway, "list", "--state", "active")
        lines = await runs(gateway, "list", "--json")
    assert [shown.code, stopped.code, listed.code, lines.code] == [0, 0, 0, 0]
    for word in ("order-17", "relay-1", "planner", "stalled", "https://agent.internal/17", "2026-01-02T03:04:06.000Z"):
        assert word in shown.out
    assert stopped.document()["state"] == "stopped"
    assert "order-17  active" in listed.out
    assert [line["state"] for line in lines.lines()] == ["active", "stopped"]
    assert [request.method for request in gateway.requests] == ["GET", "DELETE", "GET", "GET"]
    assert "state=active" in gateway.requests[2].target


async def test_a_source_that_cannot_be_reached_is_said_with_the_reason() -> None:
    """Otherwise the stream is merely quiet, and nobody knows why."""
    source = {**RUN["sources"][0], "connected": False, "verdict": "unknown", "failure": "Connection refused"}
    silent = {**RUN, "sources": [source]}
    until = asyncio.Event()
    async with PlayedGateway.start(opened(until, end("order-17")), document(silent)) as gateway:
        process = await following(gateway, "order-17")
        assert process.stderr is not None
        async with asyncio.timeout(30):
            said = (await process.stderr.readline()).decode()
            until.set()
            await process.communicate()
        shown = await runs(gateway, "show", "order-17")
    assert process.returncode == 0
    assert "order-17: source planner cannot be read: Connection refused; it is tried again" in said
    assert "unknown (Connection refused)" in shown.out


async def test_wrong_usage_sends_nothing() -> None:
    async with PlayedGateway.start(document(RUN)) as gateway:
        bad_id = await runs(gateway, "follow", "a/b")
        no_source = await runs(gateway, "start", "r", "--resume", "ids")
    assert (bad_id.code, no_source.code) == (2, 2)
    assert gateway.requests == []
    await eventually(lambda: gateway.connections == 0)
