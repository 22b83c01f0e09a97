"""`towline agents`, `threads`, `entries`, `turns`, `usage` as processes: what is seen and sent, the exit codes."""

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
from played_gateway import CUT, SILENT, document, opened, refusal
from played_threads import (
    AT,
    EVENTS,
    OTHER_TURN,
    POST,
    REPLY,
    THREAD,
    TURN,
    TURNS,
    VIEW,
    PlayedThreads,
    delta,
    entry,
    event,
    gap,
    route,
    thread,
    turn,
)
from support import eventually

from harness.stack import inherited_environment
from towline.wire import events

KEY = "secret-key"
FAR_S = 30.0

POSTED = document({"entry": entry(), "turn": turn("queued")}, status=201)
STARTED = event(1, events.TURN_STARTED, attempt=1)
COMPLETED = event(99, events.TURN_COMPLETED, entry=REPLY)
FAILED = event(99, events.TURN_FAILED, error={"code": "model-unknown", "message": "no such model"})
AGENT: dict[str, Any] = {
    "agent": "helper",
    "kind": "openai",
    "url": "https://api.test/v1",
    "model": "m",
    "instructions": "Be brief.",
    "tools": None,
    "has_api_key": True,
    "has_signing_secret": False,
    "turn_cap_s": 60.0,
    "created_at": AT,
}
USED: dict[str, Any] = {
    "turn": TURN,
    "thread": THREAD,
    "agent": "helper",
    "user": "alice",
    "seam": "reply",
    "model": "m",
    "input_tokens": 12,
    "output_tokens": 3,
    "model_calls": 2,
    "tool_calls": 1,
    "seconds": 1.5,
    "ended_at": AT,
}


def page(*items: Any) -> Any:
    return document({"items": list(items), "next_cursor": None})


async def run(gateway: PlayedThreads, *arguments: str, **variables: str) -> Ended:
    return await towline(*arguments, TOWLINE_URL=gateway.url, TOWLINE_API_KEY=KEY, **variables)


async def run_on_terminal(gateway: PlayedThreads, *arguments: str) -> tuple[int, str, str]:
    """Exit code, what the terminal shows as standard output, and standard error, which goes into a pipe."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.cli", *arguments,
        env={**inherited_environment(), "TOWLINE_URL": gateway.url, "TOWLINE_API_KEY": KEY, "TERM": "xterm"},
        stdout=theirs,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), FAR_S)
    shown = os.read(ours, 10_000).decode().replace("\r\n", "\n")
    os.close(ours)
    os.close(theirs)
    assert process.returncode is not None
    return process.returncode, shown, err.decode()


def answered(*frames: Any, state: str = "completed") -> Any:
    """A gateway where an entry's turn brings these frames and ends."""
    ended = document(turn(state))
    return PlayedThreads.start(route(POST, POSTED), route(EVENTS, opened(STARTED, *frames)), route(TURNS, ended))


async def test_a_pipe_gets_the_answer_once() -> None:
    """Whatever was void on the way; the key, tools and breaks are told on standard error."""
    frames = (
        delta(2, 1, "five"),
        event(3, events.TURN_RESTARTED, attempt=2),
        event(4, events.TOOL_CALL, step="s", name="search", args={"q": "\x1b[2J"}),
        event(5, events.TOOL_RESULT, step="s", state="completed", outcome={"result": 4}),
        delta(6, 1, "four", attempt=2),
        COMPLETED,
    )
    async with answered(*frames) as gateway:
        ended = await run(gateway, "threads", "say", THREAD, "2 + 2?", "--key", "k")
    assert (ended.code, ended.out) == (0, "four, of course\n")
    assert ended.err.splitlines() == [
        "key k",
        "it is worked on again, attempt 2",
        'tool search {"q":"\\u001b[2J"}',
        '  completed {"result":4}',
    ]
    (post,) = gateway.to(POST)
    assert post.headers["idempotency-key"] == '"k"'
    assert json.loads(post.body) == {"text": "2 + 2?", "on_busy": "queue"}


async def test_a_terminal_gets_the_answer_as_it_comes_and_once() -> None:
    async with answered(delta(2, 1, "four,"), delta(3, 2, " of \x1b[2J"), COMPLETED) as gateway:
        code, shown, err = await run_on_terminal(gateway, "threads", "say", THREAD, "2 + 2?")
    # The escape never was in the answer of the record, so that is shown whole, and safely.
    assert (code, shown) == (0, "four, of \ufffd[2J\nfour, of course\n")
    assert err.splitlines()[1:] == ["the whole answer:"]
    async with answered(delta(2, 1, "four,"), delta(3, 2, " of"), COMPLETED) as gateway:
        code, shown, err = await run_on_terminal(gateway, "threads", "say", THREAD, "2 + 2?")
    assert (code, shown) == (0, "four, of course\n")
    assert len(err.splitlines()) == 1


async def test_a_restart_voids_what_a_terminal_has_shown() -> None:
    frames = (delta(2, 1, "fi"), event(3, events.TURN_RESTARTED, attempt=2), delta(4, 1, "four", attempt=2), COMPLETED)
    async with answered(*frames) as gateway:
        code, shown, err = await run_on_terminal(gateway, "threads", "say", THREAD, "2 + 2?")
    assert (code, shown) == (0, "fi\nfour, of course\n")
    assert err.splitlines()[1:] == ["what was shown of the answer is void", "it is worked on again, attempt 2"]


async def test_a_broken_stream_is_resumed_and_said() -> None:
    over = asyncio.Event()
    async with PlayedThreads.start(
        route(POST, POSTED),
        route(EVENTS, opened(STARTED, delta(2, 1, "four"), CUT), opened(gap(), COMPLETED, SILENT)),
        route(TURNS, [over, *document(turn("completed"))]),
    ) as gateway:
        saying = asyncio.create_task(run(gateway, "threads", "say", THREAD, "2 + 2?"))
        await eventually(lambda: len(gateway.to(EVENTS)) == 2, FAR_S)
        over.set()
        ended = await saying
    assert (ended.code, ended.out) == (0, "four, of course\n")
    assert "resuming in" in ended.err
    assert "events are missing here" in ended.err
    assert gateway.to(EVENTS)[1].last_event_id == "7-2"


async def test_a_failure_says_why_and_is_no_answer() -> None:
    async with answered(FAILED, state="failed") as gateway:
        ended = await run(gateway, "threads", "say", THREAD, "2 + 2?")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == "failed: model-unknown: no such model"


async def test_programs_get_every_event() -> None:
    async with answered(delta(2, 1, "four"), gap(), COMPLETED) as gateway:
        ended = await run(gateway, "threads", "say", THREAD, "2 + 2?", "--key", "k", "--json")
    assert (ended.code, ended.err) == (0, "")
    first, started, text, missing, completed, last = ended.lines()
    assert (first["posted"]["turn"]["turn"], first["posted"]["idempotency_key"]) == (TURN, "k")
    assert [line["type"] for line in (started, text, completed)] == [
        "signal.dispatch.started",
        "message.delta",
        "signal.dispatch.completed",
    ]
    assert text["data"] == {"turn": TURN, "attempt": 1, "n": 1, "text": "four"}
    assert missing == {"gap": {"thread": THREAD, "after": "7-1", "first_available": "7-9"}}
    assert last == {"turn": turn("completed")}


async def test_a_repeated_key_gets_its_answer_at_once() -> None:
    known = turn("completed", replayed=True, replays=1, payload_matches=False)
    async with PlayedThreads.start(route(POST, document({"entry": entry(), "turn": known}))) as gateway:
        ended = await run(gateway, "threads", "say", THREAD, "3 + 3?", "--key", "k")
    assert (ended.code, ended.out, len(gateway.requests)) == (0, "four, of course\n", 1)
    assert "first used with another text" in ended.err


async def start_saying(gateway: PlayedThreads, text: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.cli", "threads", "say", THREAD, text, *options,
        env={**inherited_environment(), "TOWLINE_URL": gateway.url, "TOWLINE_API_KEY": KEY},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_long_text_comes_from_standard_input() -> None:
    async with answered(COMPLETED) as gateway:
        process = await start_saying(gateway, "-")
        await asyncio.wait_for(process.communicate("zwei\nZeilen, öfter".encode()), FAR_S)
    assert process.returncode == 0
    assert json.loads(gateway.to(POST)[0].body)["text"] == "zwei\nZeilen, öfter"


async def test_ctrl_c_before_the_answer_says_how_to_find_out() -> None:
    async with PlayedThreads.start(route(POST, [SILENT])) as gateway:
        process = await start_saying(gateway, "2 + 2?", "--key", "k")
        await eventually(lambda: gateway.to(POST), FAR_S)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), FAR_S)
    assert process.returncode == 130
    assert err.decode().splitlines()[1:] == ["nobody knows whether it was posted: the same with --key k finds out"]


async def test_ctrl_c_leaves_the_turn_and_says_how_to_read_it() -> None:
    async with PlayedThreads.start(
        route(POST, POSTED), route(EVENTS, opened(STARTED, SILENT)), route(TURNS, [SILENT])
    ) as gateway:
        process = await start_saying(gateway, "2 + 2?", "--json")
        assert process.stdout is not None
        async with asyncio.timeout(FAR_S):
            await process.stdout.readline()
            assert b"signal.dispatch.started" in await process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    assert process.returncode == 130
    assert err.decode() == f"the turn goes on: towline entries read {THREAD} --turn {TURN}\n"
    assert [request.method for request in gateway.requests].count("DELETE") == 0


async def test_entries_create_does_not_wait() -> None:
    async with PlayedThreads.start(route(POST, POSTED)) as gateway:
        ended = await run(gateway, "entries", "create", THREAD, "2 + 2?", "--on-busy", "reject", "--json")
        shown = await run(gateway, "entries", "create", THREAD, "2 + 2?")
    assert (ended.code, ended.err, shown.code) == (0, "", 0)
    used_key = json.loads(gateway.to(POST)[0].headers["idempotency-key"])
    assert ended.document() == {"entry": entry(), "turn": turn("queued"), "idempotency_key": used_key}
    assert json.loads(gateway.to(POST)[0].body)["on_busy"] == "reject"
    assert TURN in shown.out
    assert shown.err.startswith("key ")


CONVERSATION = [entry(), entry(2, "agent", "four [red]\x1b[2J")]


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [("completed", 0, "four [red]\ufffd[2J"), ("failed", 1, "failed: model-unknown: no such model")],
)
async def test_entries_read_blocks_until_the_turn_has_ended(state: str, code: int, said: str) -> None:
    over = asyncio.Event()
    entries = CONVERSATION if state == "completed" else CONVERSATION[:1]
    before = document(thread(entries=CONVERSATION[:1], turns=[turn()]))
    after = document(thread(entries=entries, turns=[turn(state, attempts=2, replays=1)]))
    async with PlayedThreads.start(route(VIEW, before, after), route(TURNS, [over, *document(turn(state))])) as gateway:
        reading = asyncio.create_task(run(gateway, "entries", "read", THREAD))
        await eventually(lambda: gateway.to(TURNS), FAR_S)
        assert len(gateway.to(VIEW)) == 1
        over.set()
        ended = await reading
    assert ended.code == code, ended
    head = ended.out.splitlines()[0]
    assert head == f"#1 user  {AT}  {state}, attempts 2, replayed 1 times  turn {TURN}"
    assert said in ended.out
    assert gateway.to(TURNS)[0].headers["prefer"] == "wait=50"


async def test_entries_read_gives_up_when_it_is_told_to() -> None:
    view = document(thread(entries=CONVERSATION[:1], turns=[turn()]))
    elsewhere = turn("completed", turn=OTHER_TURN, thread="of-somebody-else")
    async with PlayedThreads.start(
        route(VIEW, view),
        route(TURNS, document(turn())),
        route(f"GET /v1/turns/{OTHER_TURN}", document(elsewhere)),
    ) as gateway:
        ended = await run(gateway, "entries", "read", THREAD, "--wait", "0", "--json")
        of_another = await run(gateway, "entries", "read", THREAD, "--turn", OTHER_TURN)
        of_none = await run(gateway, "entries", "read", THREAD, "--turn", "", "--wait", "0")
    assert (ended.code, ended.document()["turns"][0]["state"]) == (5, "running")
    assert gateway.to(TURNS)
    assert all("prefer" not in request.headers for request in gateway.to(TURNS))
    assert (of_another.code, of_another.out) == (2, "")
    assert (of_none.code, of_none.out) == (2, "")


async def test_turns_are_shown_and_cancelled() -> None:
    """Read at once or at their end; a cancellation says how the turn stands."""
    stop = f"DELETE /v1/turns/{TURN}"
    async with PlayedThreads.start(
        route(TURNS, document(turn()), document(turn()), document(turn("failed"))),
        route(stop, document(turn("cancelled"))),
    ) as gateway:
        running = await run(gateway, "turns", "show", TURN)
        failed = await run(gateway, "turns", "show", TURN, "--wait", "30", "--json")
        cancelled = await run(gateway, "turns", "cancel", TURN)
    assert [running.code, failed.code, cancelled.code] == [0, 1, 0]
    assert "running" in running.out
    assert failed.document()["outcome"]["error"]["code"] == "model-unknown"
    assert "the turn was cancelled" in cancelled.out
    assert len(gateway.to(stop)) == 1


async def test_a_thread_without_entries_has_nothing_to_wait_for() -> None:
    async with PlayedThreads.start(route(VIEW, document(thread(entries=[], turns=[])))) as gateway:
        ended = await run(gateway, "entries", "read", THREAD)
    assert (ended.code, ended.out, ended.err) == (0, "", "no entries\n")


async def test_an_agent_with_its_secret_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-123\n")
    async with PlayedThreads.start(route("PUT /v1/agents/helper", document(AGENT, status=201))) as gateway:
        ended = await run(
            gateway,
            *("agents", "create", "helper", "--kind", "openai", "--endpoint", "https://api.test/v1", "--model", "m"),
            *("--tool", "search", "--tool", "read", "--api-key", f"@{tmp_path / 'key'}", "--turn-cap-s", "60"),
        )
    assert ended.code == 0, ended.err
    assert "stored" in ended.out
    assert "sk-123" not in ended.out + ended.err
    (put,) = gateway.requests
    assert json.loads(put.body) == {
        "kind": "openai",
        "url": "https://api.test/v1",
        "model": "m",
        "instructions": None,
        "tools": ["search", "read"],
        "api_key": "sk-123",
        "signing_secret": None,
        "turn_cap_s": 60.0,
    }


async def test_what_is_created_is_shown_listed_and_deleted() -> None:
    async with PlayedThreads.start(
        route("GET /v1/agents", page(AGENT)),
        route("GET /v1/agents/helper", document(AGENT)),
        route("DELETE /v1/agents/helper", [b"HTTP/1.1 204 No Content\r\n\r\n"]),
        route("POST /v1/threads", document(thread(), status=201)),
        route("GET /v1/threads", page(thread())),
        route(VIEW, document(thread(entries=CONVERSATION, turns=[turn("completed")]))),
        route("GET /v1/usage", page(USED, {**USED, "seam": "title", "input_tokens": 30})),
    ) as gateway:
        agents = await run(gateway, "agents", "list")
        agent = await run(gateway, "agents", "show", "helper", "--json")
        deleted = await run(gateway, "agents", "delete", "helper")
        created = await run(gateway, "threads", "create", "helper", "--user", "alice")
        threads = await run(gateway, "threads", "list", "--user", "alice", "--json")
        shown = await run(gateway, "threads", "show", THREAD)
        usage = await run(gateway, "usage", "--agent", "helper", "--day", "2026-01-02")
        rows = await run(gateway, "usage", "--json")
    ended = (agents, agent, deleted, created, threads, shown, usage, rows)
    assert [each.code for each in ended] == [0] * 8, ended
    assert "helper" in agents.out
    assert agent.document() == AGENT
    assert deleted.err == "deleted helper\n"
    assert created.out == f"{THREAD}\n"
    assert threads.lines() == [thread()]
    assert "alice" in shown.out
    assert "four [red]\ufffd[2J" in shown.out
    total = usage.out.splitlines()[-1].split()
    assert total == ["total", "1", "threads", "1", "turns", "42", "6", "4", "2", "3.000", "s"]
    assert [row["seam"] for row in rows.lines()] == ["reply", "title"]
    assert "day=2026-01-02" in gateway.to("GET /v1/usage")[0].target


async def test_refusals_and_wrong_usage() -> None:
    async with PlayedThreads.start(route(POST, refusal(409, "thread-busy"))) as gateway:
        busy = await run(gateway, "threads", "say", THREAD, "x", "--on-busy", "reject")
        said = len(gateway.requests)
        no_id = await run(gateway, "threads", "say", "a/b", "x")
        no_endpoint = await run(gateway, "agents", "create", "a", "--kind", "http", "--json")
        no_day = await run(gateway, "usage", "--day", "yesterday")
        in_argv = await run(
            gateway,
            *("agents", "create", "a", "--kind", "http", "--endpoint", "https://x.test", "--signing-secret", "s3"),
        )
    assert (busy.code, busy.out) == (3, "")
    assert "thread-busy (409): why" in busy.err
    assert [each.code for each in (no_id, no_endpoint, no_day, in_argv)] == [2, 2, 2, 2]
    assert "--endpoint" in no_endpoint.err
    assert len(gateway.requests) == said
