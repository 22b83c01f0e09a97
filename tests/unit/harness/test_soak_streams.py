"""The checker of soaks must fail on every broken promise about streams: hand-made histories, each broken in one way."""

import re
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from harness.drills.sequences import Seen
from harness.soak.checker import check
from harness.soak.history import (
    AnyEvent,
    FaultBegan,
    FaultEnded,
    Followed,
    Planned,
    RunRecorded,
    Spoken,
    Watched,
)
from harness.soak.plan import Plan, RunPlan, SourcePlan
from harness.soak.report import count, excerpt
from towline.wire import events
from towline.wire.runs import Resume

RUN, WATCHER = "soak-1-1", "watcher-1"
AT_MS = 1_800_000_000_000
END = [Seen(events.RUN_ENDED, "", 0, state="completed"), Seen(events.END, "", 0, state="completed")]
# What two sources said, as it came.
EVENTS = [Seen("output", "a", 1), Seen("output", "b", 1), Seen("output", "a", 2), Seen("result", "a", 3)]


def watched(seen: Sequence[Seen], *, ended: bool = True, opened: int = 1) -> Watched:
    return Watched(
        at_ms=AT_MS,
        run=RUN,
        watcher=WATCHER,
        opened=opened,
        broken=opened - 1,
        refused=[],
        ended=ended,
        seen=list(seen),
    )


def history(
    *watching: Watched,
    resume: Resume = "ids",
    accepted: bool = True,
    record: Mapping[str, str] | None = None,
    fault: str = "",
    fault_ms: int = AT_MS,
) -> list[AnyEvent]:
    """A run of two sources that was followed to its end, with these watchers."""
    sources = {"a": SourcePlan(resume=resume, rate=1, total=2), "b": SourcePlan(resume="ids", rate=1, total=1)}
    plan = Plan(
        seed=1,
        seconds=60,
        heartbeat_s=2,
        users=[],
        requests=[],
        runs=[RunPlan(at_s=1, run=RUN, sources=sources, watchers=[])],
        faults=[],
    )
    recorded = RunRecorded(at_ms=AT_MS, run=RUN, state="completed", reason="", lease="")
    faults: list[AnyEvent] = []
    if fault:
        faults = [
            FaultBegan(at_ms=fault_ms, fault=1, kind=fault, target="redis"),
            FaultEnded(at_ms=fault_ms + 1, fault=1),
        ]
    return [
        Planned(at_ms=AT_MS, plan=plan),
        Followed(at_ms=AT_MS, run=RUN, accepted=accepted),
        *faults,
        *(Spoken(at_ms=AT_MS, run=RUN, source=name, last=last, requests=1) for name, last in (("a", 3), ("b", 1))),
        *watching,
        *([] if record == {} else [msgspec.structs.replace(recorded, **(record or {}))]),
    ]


def expect(events: Sequence[AnyEvent], promise: str, pattern: str) -> None:
    """There is this violation and no other."""
    found = check(events)
    assert [violation.promise for violation in found] == [promise], found
    assert re.search(pattern, found[0].what), found


def test_a_watcher_who_saw_everything_breaks_nothing() -> None:
    whole = history(watched([*EVENTS, *END]))
    assert check(whole) == []
    assert count(whole).events == len(EVENTS)


@pytest.mark.parametrize(
    ("seen", "pattern"),
    [
        pytest.param([*EVENTS[:2], *EVENTS[3:], *END], "1 events lost without a word", id="hole"),
        pytest.param([*EVENTS[:1], *END], "3 events lost without a word", id="end missing"),
        pytest.param([*EVENTS, EVENTS[3], *END], "1 events doubled", id="doubled"),
        pytest.param([*EVENTS, Seen("output", "soak-1-2.a", 1), *END], "1 events of other runs", id="of another run"),
        pytest.param([EVENTS[2], EVENTS[0], EVENTS[1], EVENTS[3], *END], "1 events out of order", id="order"),
        pytest.param([*EVENTS[:3], END[0], EVENTS[3], END[1]], "1 events sent after the last one", id="after the end"),
    ],
)
def test_an_unfaithful_sequence(seen: list[Seen], pattern: str) -> None:
    expect(history(watched(seen)), "G6", pattern)


@pytest.mark.parametrize("kind", ["redis-flush", "redis-kill"])
def test_a_gap_is_true_only_where_redis_has_lost_something(kind: str) -> None:
    seen = [EVENTS[0], Seen(events.GAP, "", 0), *EVENTS[1:2], EVENTS[3], *END]
    assert check(history(watched(seen), fault=kind)) == []
    expect(history(watched(seen), fault=kind, fault_ms=AT_MS - 2), "G6", "1 gaps, and nothing was lost")
    expect(history(watched(seen), fault="redis-freeze"), "G6", "1 gaps, and nothing was lost")


def test_a_live_source_may_lose_what_it_says_so_of() -> None:
    seen = [*EVENTS[:2], Seen(events.DISCONTINUITY, "a", 0), EVENTS[3], *END]
    assert check(history(watched(seen), resume="live")) == []
    expect(history(watched([*EVENTS[:2], EVENTS[3], *END]), resume="live"), "G6", "1 events lost")


def test_a_source_that_failed_is_not_expected_to_have_been_heard_to_its_end() -> None:
    failed = Seen(events.SOURCE_ENDED, "a", 0, state="failed")
    assert check(history(watched([*EVENTS[:2], failed, *END]), resume="live")) == []
    completed = Seen(events.SOURCE_ENDED, "a", 0, state="completed")
    expect(history(watched([*EVENTS[:2], completed, *END]), resume="live"), "G6", "2 events lost")


def test_a_watcher_who_is_never_told_the_end() -> None:
    expect(history(watched(EVENTS, ended=False)), "G4", "never told the end")


@pytest.mark.parametrize("times", [0, 2])
def test_a_last_event_that_does_not_come_once(times: int) -> None:
    found = check(history(watched([*EVENTS, *[END[0]] * times, END[1]])))
    assert any(violation.promise == "G4" and f"{times} last events" in violation.what for violation in found)


def test_a_watcher_who_is_told_another_end_than_the_record_has() -> None:
    other = [Seen(events.RUN_ENDED, "", 0, state="failed"), Seen(events.END, "", 0, state="failed")]
    expect(history(watched([*EVENTS, *other])), "G4", r"told \['failed'\], and the record says completed")


@pytest.mark.parametrize(
    ("record", "pattern"),
    [
        pytest.param({}, "no record", id="no record"),
        pytest.param({"state": "active"}, "never ended: active", id="never ended"),
        pytest.param({"state": "failed", "reason": "sources-failed"}, "it is failed", id="failed"),
        pytest.param({"lease": "relay-1"}, "relay-1 still follows it", id="lease"),
    ],
)
def test_a_run_that_did_not_end_as_it_must(record: dict[str, str], pattern: str) -> None:
    expect(history(record=record), "G4", pattern)


def test_a_run_with_a_live_source_may_fail_for_it() -> None:
    assert check(history(record={"state": "failed"}, resume="live")) == []


def test_a_run_that_was_never_accepted_promises_nothing() -> None:
    assert check(history(accepted=False, record={})) == []


def test_the_excerpt_of_a_violation_has_its_run_and_its_watcher() -> None:
    broken = history(watched([*EVENTS[:1], *END], opened=2))
    lines = "\n".join(excerpt(broken, check(broken)[0]))
    assert all(word in lines for word in ('"watched"', '"spoken"', '"followed"', '"runrecorded"'))
