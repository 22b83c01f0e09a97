"""What a model is told of a tool call, and when there is no call at all."""

import pytest

from common.ids import AgentId, EntryId, ThreadId, TurnId, UserId
from common.store import keys, records
from common.store.jobs import Seen
from common.store.turns import Turn
from towline.wire.api import PresenceState
from worker.tool_calls import (
    DEADLINE_S,
    OFFLINE,
    QUEUE_FULL,
    TIMEOUT_S,
    WENT_OFFLINE,
    Outcome,
    job_of,
    refusal_of,
    refused,
    words_of,
)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome("completed", '{"result":{"a":  1.0}}'), '{"a":1.0}'),
        (Outcome("completed", '{"result":null}'), "null"),
        (Outcome("failed", records.error_outcome("no-file", "there is no such file")), "The tool failed: there is no"),
        (Outcome("unknown", records.LATE), "may or may not have run"),
        (Outcome("unknown", records.ELSEWHERE), "do not repeat the call before you have found out"),
        (Outcome("expired", records.EXPIRED), "The tool did not run: the deadline passed"),
        (Outcome("cancelled", WENT_OFFLINE), "The tool did not run: the user's machine went away"),
        (refused(OFFLINE), "the user's machine is not connected, so the tool did not run (machine-offline)"),
        (refused(QUEUE_FULL), "so the tool did not run (queue-full)"),
    ],
    ids=["result", "null", "failed", "late", "elsewhere", "expired", "cancelled", "offline", "full"],
)
def test_every_outcome_has_words(outcome: Outcome, expected: str) -> None:
    assert expected in words_of(outcome)


@pytest.mark.parametrize(
    ("state", "entries", "expected"),
    [
        ("online", 0, None),
        ("reconnecting", 0, None),
        ("unknown", 0, None),
        ("offline", 0, refused(OFFLINE)),
        ("online", keys.QUEUE_ENTRIES_MAX, refused(QUEUE_FULL)),
    ],
)
def test_what_the_door_refuses(state: PresenceState, entries: int, expected: Outcome | None) -> None:
    seen = Seen(presence={}, hint="u", entries=entries, bytes=0, age_ms=0)
    assert refusal_of(seen, state) == expected


@pytest.mark.parametrize(
    ("time_s", "timeout_s", "deadline_s"),
    [(600.0, TIMEOUT_S, DEADLINE_S), (150.0, TIMEOUT_S, 150.0), (30.0, 30.0, 30.0), (-1.0, 1.0, 1.0)],
)
def test_a_call_takes_no_longer_than_the_turn(time_s: float, timeout_s: float, deadline_s: float) -> None:
    """Its key is the turn's and the step's; its scope cannot be written to by callers (rule 34)."""
    turn = Turn(
        turn=TurnId("turn-1"),
        thread=ThreadId("thread-1"),
        number=1,
        entry=EntryId("entry-1"),
        key="key-1",
        fingerprint=b"",
        traceparent="trace",
        cap_s=600,
        state="running",
        attempts=1,
        replays=0,
        cancel_requested=False,
        reply=None,
        reply_text=None,
        error_code=None,
        error_message=None,
        agent=AgentId("agent-1"),
        user=UserId("alice"),
        model=None,
        created_ms=0,
        started_ms=0,
        ended_ms=None,
    )
    job = job_of(turn, UserId("alice"), "tool-1", "look", b"{}", time_s=time_s)
    assert (job.timeout_s, job.deadline_s) == (timeout_s, deadline_s)
    assert (job.scope, job.key, job.traceparent) == ("turn:turn-1", "turn-1:tool-1", "trace")
    assert job.scope != records.scope_of_user(UserId("turn-1"))
