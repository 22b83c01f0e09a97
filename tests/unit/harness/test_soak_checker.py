"""The checker of soaks must fail on every broken promise: hand-made histories, each broken in one way."""

import re
from collections.abc import Sequence

import msgspec
import pytest

from harness.soak.checker import check
from harness.soak.history import (
    Answered,
    AnyEvent,
    Asked,
    Delivered,
    FaultBegan,
    FaultEnded,
    History,
    KeysLeft,
    Left,
    Noted,
    Planned,
    PresenceTold,
    Recorded,
    Said,
    SessionBegan,
    Started,
    read_history,
)
from harness.soak.load import args_of
from harness.soak.plan import FAULTS, Plan, Request, make_plan
from harness.soak.report import count, excerpt
from towline.wire.api import timestamp

USER, KEY, JOB = "ann", "order-1", "01a2292c-dc1e-74d7-b32c-5b157b0c5f3e"
OTHER_JOB = "01a2292c-dc1e-74d7-b32c-5b157b0c5f3f"
MARK = f"{USER}/{KEY}"
ARGS = f'{{"mark":"{MARK}","seconds":0.0}}'
OUTCOME = f'{{"result":"{MARK}"}}'
NOT_STARTED = '{"error":{"code":"not-started","message":"","retryable":false}}'
UNKNOWN = '{"error":{"code":"interrupted","message":"","retryable":false}}'
HEARTBEAT_S = 2.0
TTL_MS = 6_000

# Events stand at their second after the beginning.
BEGAN_MS = 1_800_000_000_000


def at(seconds: float) -> int:
    return BEGAN_MS + round(seconds * 1000)


def planned() -> Planned:
    plan = Plan(seed=1, seconds=60, heartbeat_s=HEARTBEAT_S, users=[USER], requests=[], runs=[], faults=[])
    return Planned(at_ms=at(0), plan=plan)


def asked(
    second: float, request: int = 1, *, wait_s: float = 0, verb="submit", key: str = KEY, args: str = ARGS
) -> Asked:
    tool = "work" if verb == "submit" else ""
    return Asked(
        at_ms=at(second),
        request=request,
        verb=verb,
        user=USER,
        key=key,
        gateway="gateway-1",
        wait_s=wait_s,
        tool=tool,
        args=args if tool else "",
    )


def answered(second: float, request: int = 1, **told) -> Answered:
    """A 200 with the good end, unless `told` says otherwise."""
    values = {
        "status": 200,
        "job": JOB,
        "user": USER,
        "state": "completed",
        "outcome": OUTCOME,
        "ended_at": timestamp(at(2)),
        "replayed": request > 1,
    }
    return Answered(at_ms=at(second), request=request, **values | told)


def running(second: float, request: int = 1, **told) -> Answered:
    return answered(second, request, **{"status": 202, "state": "processing", "outcome": "", "ended_at": ""} | told)


def refused(second: float, request: int, status: int, problem: str) -> Answered:
    return Answered(at_ms=at(second), request=request, status=status, problem=problem)


def record(**values) -> Recorded:
    """It was accepted at 1 s, ended at 2 s, and has its deadline at 31 s."""
    base = {
        "job": JOB,
        "user": USER,
        "key": KEY,
        "tool": "work",
        "args": ARGS,
        "timeout_s": 120.0,
        "hinted": False,
        "state": "completed",
        "attempts": 1,
        "outcome": OUTCOME,
        "late_outcome": None,
        "accepted_ms": at(1),
        "deadline_ms": at(31),
        "ended_ms": at(2),
    }
    return Recorded(at_ms=at(60), **base | values)


def noted(second: float, what, mark: str = MARK, *, user: str = USER) -> Noted:
    return Noted(at_ms=at(second), user=user, what=what, mark="" if what == "died" else mark)


def fault(kind: str, target: str, from_s: float, to_s: float, number: int = 1) -> list[AnyEvent]:
    return [
        FaultBegan(at_ms=at(from_s), fault=number, kind=kind, target=target),
        FaultEnded(at_ms=at(to_s), fault=number),
    ]


def told(state: str, second: float) -> PresenceTold:
    return PresenceTold(at_ms=at(second) + 5, user=USER, gateway="gateway-1", asked_ms=at(second), state=state)


def connected(second: float = 0.5) -> list[AnyEvent]:
    return [
        Said(at_ms=at(second), user=USER, what="connected", session="s1"),
        SessionBegan(at_ms=at(second), worker="worker-1", user=USER, session="s1"),
    ]


def left(**counts) -> list[AnyEvent]:
    queue = {"entries": 0, "pending": 0, "indexed": 0, "groups": 1, "consumers": 1}
    return [
        Left(at_ms=at(60), user=USER, **queue | counts),
        KeysLeft(at_ms=at(61), user=USER, names=[]),
    ]


GOOD_ANSWERS: list[AnyEvent] = [asked(1, wait_s=10), answered(2.1)]
GOOD_NOTES: list[AnyEvent] = [noted(1.5, "began"), noted(2, "ended")]


def history(
    *events: AnyEvent | Sequence[AnyEvent],
    answers: Sequence[AnyEvent] = GOOD_ANSWERS,
    notes: Sequence[AnyEvent] = GOOD_NOTES,
    records: Sequence[AnyEvent] | None = None,
    last_word: str = "online",
    end: Sequence[AnyEvent] | None = None,
) -> list[AnyEvent]:
    """One job that ran and was answered, and a machine that is online in the end, with more events or other parts."""
    flat: list[AnyEvent] = []
    for event in events:
        flat += event if isinstance(event, list) else [event]
    return [
        planned(),
        *answers,
        *notes,
        *flat,
        told(last_word, 59),
        *([record()] if records is None else records),
        *(left() if end is None else end),
    ]


def expect(events: Sequence[AnyEvent], promise: str, pattern: str) -> None:
    """There is this violation and no other."""
    found = check(events)
    assert [violation.promise for violation in found] == [promise], found
    assert re.search(pattern, found[0].what), found


def test_a_good_history_breaks_nothing():
    second = [asked(3, 2), answered(3.1, 2), asked(4, 3, verb="read"), answered(4.1, 3)]
    other = ARGS.replace("0.0", "0.5")
    third = [asked(5, 4, args=other), answered(5.1, 4, payload_matches=False)]
    presence = [*connected(), told("online", 3), told("online", 10)]

    assert check(history(second, third, presence)) == []


# ---- G1


def test_an_accepted_job_without_a_record():
    events = history(answers=[asked(1), running(1.1)], notes=[], records=[])
    expect(events, "G1", "no record")


def test_a_record_of_another_job_than_was_accepted():
    found = check(history(records=[record(job=OTHER_JOB)]))
    assert "G1" in {violation.promise for violation in found}


def test_an_answer_about_a_job_of_another_user():
    expect(history(answers=[asked(1), answered(2.1, user="bob")]), "G1", "job of bob")


def test_a_result_of_another_user():
    theirs = '{"result":"bob/order-1"}'
    events = history(answers=[asked(1), answered(2.1, outcome=theirs)], records=[record(outcome=theirs)])
    expect(events, "G1", "another job: 'bob/order-1'")


# ---- G2


def test_a_key_that_names_two_jobs():
    found = check(history(asked(3, 2), answered(3.1, 2, job=OTHER_JOB)))
    assert any(v.promise == "G2" and "names 2 jobs" in v.what for v in found)


@pytest.mark.parametrize(
    "second",
    [
        {"outcome": f'{{"result": "{MARK}"}}'},
        {"state": "unknown"},
        {"ended_at": timestamp(at(2) + 1)},
    ],
    ids=["other bytes", "other state", "other end"],
)
def test_two_ends_of_one_job(second):
    expect(history(asked(3, 2), answered(3.1, 2, **second)), "G2", "2 different ends")


def test_an_end_that_the_record_does_not_have():
    expect(history(records=[record(state="failed", outcome=NOT_STARTED)], notes=[]), "G2", "2 different ends")


def test_a_job_that_goes_on_after_its_end_was_told():
    expect(history(asked(3, 2), running(3.1, 2)), "G2", "processing after its end")


def test_two_answers_as_the_first_of_the_key():
    expect(history(asked(3, 2), answered(3.1, 2, replayed=False)), "G2", "as the first of their key")


@pytest.mark.parametrize(("args", "matches"), [(ARGS, False), (ARGS.replace("0.0", "0.5"), True)])
def test_payload_matches_that_is_wrong(args, matches):
    events = history(asked(3, 2, args=args), answered(3.1, 2, payload_matches=matches))
    expect(events, "G2", f"payload_matches is {matches}")


def test_a_recorded_key_that_is_refused():
    expect(history(asked(3, 2), refused(3.1, 2, 409, "machine-offline")), "G2", "409 machine-offline")


def test_a_503_for_a_recorded_key_is_excused_by_postgres_alone():
    events = [asked(3, 2), refused(3.1, 2, 503, "store-unavailable")]

    assert check(history(events, fault("postgres-kill", "postgres", 2.5, 3.2))) == []
    expect(history(events, fault("redis-kill", "redis", 2.5, 3.2)), "G2", "503 store-unavailable")


# ---- G3


def test_a_job_that_ran_twice():
    twice = [*GOOD_NOTES, noted(3, "began"), noted(4, "ended")]
    expect(history(notes=twice), "G3", "began 2 times")


def test_a_job_with_side_effects_that_ran_again_after_the_sidecar_died():
    twice = [noted(1.2, "began"), noted(1.3, "died"), noted(1.5, "began"), noted(2, "ended")]
    expect(history(notes=twice), "G3", "not hinted and began 2 times")


def test_a_hinted_job_may_run_again_only_after_a_death():
    hinted = [record(hinted=True)]
    cut_off = [noted(1.2, "began"), noted(1.3, "died"), noted(1.5, "began"), noted(2, "ended")]
    doubled = [noted(1.2, "began"), noted(1.3, "ended"), noted(1.5, "began"), noted(2, "ended")]

    assert check(history(notes=cut_off, records=hinted)) == []
    expect(history(notes=doubled, records=hinted), "G3", "2 of them in one process")


def test_a_completed_job_that_never_ran():
    expect(history(notes=[]), "G3", "never came to its end")


def test_a_completed_job_that_was_cut_off():
    expect(history(notes=[noted(1.5, "began"), noted(1.6, "died")]), "G3", "never came to its end")


@pytest.mark.parametrize("state", ["failed", "expired", "cancelled"])
def test_an_end_that_says_it_did_not_run_although_it_did(state):
    events = history(
        answers=[asked(1), answered(2.1, state=state, outcome=NOT_STARTED)],
        records=[record(state=state, outcome=NOT_STARTED)],
    )
    expect(events, "G3", f"it is {state}.*began 1 times")


def test_an_unknown_job_may_have_run_once():
    events = history(
        answers=[asked(1), answered(2.1, state="unknown", outcome=UNKNOWN)],
        notes=[noted(1.5, "began"), noted(1.6, "died")],
        records=[record(state="unknown", outcome=UNKNOWN)],
    )
    assert check(events) == []


def second_job(**values) -> list[AnyEvent]:
    """Another job of the same user, answered as it should be."""
    mark = f"{USER}/order-2"
    base = {"job": OTHER_JOB, "key": "order-2", "args": ARGS.replace(MARK, mark), "outcome": f'{{"result":"{mark}"}}'}
    return [record(**base | values)]


def test_two_executions_of_one_machine_at_once():
    notes = [
        noted(1.2, "began"),
        noted(1.3, "began", f"{USER}/order-2"),
        noted(1.4, "ended"),
        noted(1.5, "ended", f"{USER}/order-2"),
    ]
    expect(history(second_job(), notes=notes), "G3", f"began while {MARK} was running")


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_a_job_that_was_stopped_before_its_end_does_not_overlap(how):
    code = "cancelled" if how == "cancelled" else "timeout"
    outcome = UNKNOWN.replace("interrupted", code)
    cancel = [asked(1.2, 2, verb="cancel"), running(1.25, 2)] if how == "cancelled" else []
    events = history(
        second_job(),
        cancel,
        answers=[asked(1, wait_s=10), answered(2.1, state="unknown", outcome=outcome)],
        notes=[noted(1.2, "began"), noted(1.3, "began", f"{USER}/order-2"), noted(1.5, "ended", f"{USER}/order-2")],
        records=[record(state="unknown", outcome=outcome)],
    )
    assert check(events) == []


def test_a_job_that_ran_without_a_record():
    expect(history(notes=[*GOOD_NOTES, noted(3, "began", f"{USER}/order-9")]), "G3", "no record")


def test_a_job_that_ran_on_the_machine_of_another_user():
    expect(history(notes=[noted(1.5, "began", user="bob"), noted(2, "ended", user="bob")]), "G3", "machine of bob")


def test_a_job_that_started_after_its_end():
    expect(history(Started(at_ms=at(4), user=USER, job=JOB)), "G3", "after its end")


def test_two_deliveries_under_one_frame_id():
    frames = [
        Delivered(at_ms=at(second), user=USER, job=JOB, frame="f1", attempt=1, decision="run") for second in (1.2, 1.8)
    ]
    expect(history(frames), "G3", "same frame id")


# ---- G4


def test_a_lost_job():
    events = history(
        answers=[asked(1), running(1.1)],
        notes=[],
        records=[record(state="queued", outcome=None, ended_ms=None, attempts=0)],
    )
    expect(events, "G4", "never ended: queued")


def silent(ended_s: float, *events: AnyEvent | Sequence[AnyEvent]) -> list[AnyEvent]:
    return history(
        *events,
        answers=[asked(1), running(1.1)],
        notes=[],
        records=[record(state="expired", outcome=UNKNOWN, ended_ms=at(ended_s))],
    )


def test_a_job_that_is_silent_past_its_deadline():
    assert check(silent(35)) == []
    expect(silent(37), "G4", "6.0 s after its deadline")


def test_only_the_time_of_a_fault_of_a_store_excuses_a_late_end():
    def ends_at(second: float, kind: str, target: str) -> list[AnyEvent]:
        return silent(second, fault(kind, target, 30, 38))

    assert check(ends_at(52, "postgres-freeze", "postgres")) == []
    expect(ends_at(54, "postgres-freeze", "postgres"), "G4", "23.0 s after its deadline")
    expect(ends_at(45, "worker-freeze", "worker-1"), "G4", "14.0 s after its deadline")


def test_a_late_end_is_excused_while_no_worker_serves():
    one, two = fault("worker-kill", "worker-1", 30, 38), fault("worker-kill", "worker-2", 32, 40, 2)

    assert check(silent(45, one, two)) == []
    expect(silent(45, one, fault("worker-kill", "worker-2", 10, 15, 2)), "G4", "14.0 s after its deadline")


def test_a_waiter_who_is_left_waiting():
    assert check(history(answers=[asked(1, wait_s=3), answered(8.5)])) == []
    expect(history(answers=[asked(1, wait_s=3), answered(9.5)]), "G4", "may wait 3 s and took 8.5 s")


def test_a_waiter_who_is_never_answered():
    expect(history(asked(3, 2, wait_s=3)), "G4", "may wait 3 s and took 5[0-9]")


# ---- G5


def test_offline_told_about_a_connected_machine():
    expect(history(connected(), told("offline", 10)), "G5", "connected for 9.5 s")


@pytest.mark.parametrize(
    ("kind", "target"),
    [("worker-freeze", "worker-1"), ("link-stall", USER), ("sidecar-freeze", USER)],
)
def test_offline_is_excused_by_a_fault_for_one_time_to_live(kind, target):
    events = [*connected(), *fault(kind, target, 5, 8)]

    assert check(history(events, told("offline", 8 + TTL_MS / 1000 - 0.1))) == []
    expect(history(events, told("offline", 8 + TTL_MS / 1000 + 0.1)), "G5", "told `offline`")


@pytest.mark.parametrize(
    ("kind", "target"), [("redis-flush", "redis"), ("postgres-kill", "postgres"), ("worker-kill", "worker-2")]
)
def test_offline_is_not_excused_by_a_fault_of_a_store_or_another_worker(kind, target):
    expect(history(connected(), fault(kind, target, 5, 8), told("offline", 6)), "G5", "told `offline`")


@pytest.mark.parametrize("what", ["disconnected", "connection_lost", "draining"])
def test_offline_may_be_told_once_the_socket_is_lost(what):
    assert check(history(connected(), Said(at_ms=at(9), user=USER, what=what), told("offline", 10))) == []


def test_offline_may_be_told_of_a_killed_machine():
    assert check(history(connected(), fault("sidecar-kill", USER, 5, 30), told("offline", 29))) == []


@pytest.mark.parametrize("state", ["online", "reconnecting"])
def test_online_told_about_a_dead_machine(state):
    killed = [*connected(), *fault("sidecar-kill", USER, 5, 30)]

    assert check(history(killed, told(state, 11.9))) == []
    expect(history(killed, told(state, 12.1)), "G5", f"told `{state}` of a machine 7.1 s after sidecar-kill")


def test_online_told_about_a_sleeping_machine():
    """Its last sign of life counts for two heartbeats, and then its presence has its time to live."""
    frozen = [*connected(), *fault("sidecar-freeze", USER, 5, 30)]

    assert check(history(frozen, told("online", 15.9))) == []
    expect(history(frozen, told("online", 16.1)), "G5", "11.1 s after sidecar-freeze")


def offline(from_s: float, to_s: float) -> list[AnyEvent]:
    """Told each second, of a machine whose sidecar says nothing, and then `online`."""
    return [*(told("offline", second) for second in range(round(from_s), round(to_s))), told("online", to_s)]


def test_a_machine_that_runs_and_stays_offline():
    assert check(history(offline(0, 40))) == []
    expect(history(offline(0, 43)), "G5", "not been online for 40")


@pytest.mark.parametrize(("kind", "target"), [("sidecar-kill", USER), ("redis-kill", "redis")])
def test_a_machine_may_stay_offline_while_something_is_in_its_way(kind, target):
    assert check(history(offline(0, 60), fault(kind, target, 1, 25))) == []


def test_a_machine_that_is_not_online_at_the_end():
    expect(history(told("online", 3), last_word="offline"), "G5", "`offline` was told of it at the end")


def test_offline_is_not_excused_long_after_one_fault_and_before_the_next():
    faults = [*fault("socket-cut", USER, 5, 5), *fault("socket-cut", USER, 20, 20, 2)]
    expect(history(connected(), faults, told("offline", 15)), "G5", "connected for 4.0 s")


# ---- the end


@pytest.mark.parametrize(
    "counts", [{"entries": 1}, {"pending": 1}, {"indexed": 1}, {"groups": 2}, {"consumers": 3}], ids=str
)
def test_what_is_left_in_redis(counts):
    expect(history(end=left(**counts)), "end", "left in Redis")


def test_keys_of_a_user_who_left():
    end = [left()[0], KeysLeft(at_ms=at(61), user=USER, names=["bridge:presence:ann"])]
    expect(history(end=end), "end", "bridge:presence:ann")


def test_a_run_whose_end_nobody_looked_at():
    expect(history(end=[]), "end", "nobody looked")


# ---- plan, file, report


def test_a_seed_decides_the_whole_plan():
    one = make_plan(7, seconds=600, users=3, heartbeat_s=2)

    assert one == make_plan(7, seconds=600, users=3, heartbeat_s=2)
    assert one != make_plan(8, seconds=600, users=3, heartbeat_s=2)
    assert {fault.kind for fault in one.faults} == set(FAULTS)
    assert {request.verb for request in one.requests} == {"submit", "read", "cancel"}


def test_a_history_is_read_as_it_was_written(tmp_path):
    events = history(connected(), told("online", 3), fault("redis-kill", "redis", 5, 6))
    written = History(tmp_path / "history")
    for event in events:
        written.add(event)
    written.close()

    assert read_history(tmp_path / "history") == events


def test_a_file_that_is_no_history_is_refused():
    with pytest.raises(ValueError, match="begins with its plan"):
        check([record()])


def test_arguments_are_what_the_tools_take():
    request = Request(at_s=0, verb="submit", user=USER, key=KEY, gateway=0)
    assert msgspec.json.decode(args_of(request)) == {"mark": MARK, "seconds": 0.0}


def test_counts_and_excerpt_of_a_violation():
    twice = [*GOOD_NOTES, noted(3, "began"), noted(4, "ended")]
    events = history(asked(5, 2), answered(5.1, 2), fault("redis-kill", "redis", 2.5, 3), notes=twice)
    counts = count(events)

    assert (counts.submits, counts.retries, counts.jobs) == (2, 1, 1)
    assert (counts.executions, counts.executions_again) == (2, 1)
    assert counts.faults == {"redis-kill": 1}
    assert counts.answers == {"200": 2}

    lines = excerpt(events, check(events)[0])
    kinds = [msgspec.json.decode(line.partition("  ")[2])["event"] for line in lines]
    assert kinds.count("noted") == 4
    assert {"asked", "answered", "faultbegan", "faultended", "recorded"} <= set(kinds)
