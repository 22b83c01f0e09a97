"""The window of a session: tables for each rule, and a state machine that tries all orders of what may happen."""

import itertools

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from common.ids import JobId
from common.store.jobs import Entry, Taken
from worker.delivery import AHEAD_BYTES_MAX, AHEAD_MAX, Action, Verb, Window

NOW_MS = 1_000_000
FAR_MS = NOW_MS + 60_000

HINTED, UNHINTED = True, False


def taken(job: str, hinted: bool, *, claimed: bool = False, size: int = 100, deadline_ms: int = FAR_MS) -> Taken:
    """What a take (or, `claimed`, a claim) brings."""
    entry = Entry(
        job=JobId(job),
        key=f"key of {job}",
        name="tool",
        args=msgspec.Raw(b"{}"),
        accepted_ms=NOW_MS,
        deadline_ms=deadline_ms,
        timeout_s=120,
        hinted=hinted,
    )
    return Taken(entry, claimed, size)


def planned(window: Window, now_ms: int = NOW_MS) -> list[str]:
    """The plan as text: `SEND a`, `MARK b`."""
    return [f"{verb.name} {entry.job}" for verb, entry in window.plan(now_ms)]


def holding(*entries: Taken) -> Window:
    """A window that has just taken these."""
    window = Window()
    assert window.add(entries) == []
    return window


def test_hinted_jobs_leave_ahead_of_one_another_in_stream_order() -> None:
    """Up to sixteen frames, so that the machine's lane never waits for a round trip."""
    window = holding(*(taken(f"{n}", HINTED) for n in range(20)))
    assert planned(window) == [f"SEND {n}" for n in range(16)]
    assert planned(window) == []
    assert window.result(JobId("3"), lane_busy=False)
    assert planned(window) == ["SEND 16"]


def test_an_unhinted_job_is_marked_when_nothing_flies_and_goes_alone() -> None:
    """Nothing leaves before it has come back, and it is not marked before it can start."""
    window = holding(taken("a", HINTED), taken("b", UNHINTED), taken("c", HINTED))
    assert planned(window) == ["SEND a"]
    assert window.result(JobId("a"), lane_busy=False)
    assert planned(window) == ["MARK b"]
    assert planned(window) == []
    window.marked(JobId("b"))
    assert planned(window) == []
    assert window.result(JobId("b"), lane_busy=False)
    assert planned(window) == ["SEND c"]


def test_a_hinted_job_that_was_claimed_is_marked_and_goes_alone() -> None:
    """It may be its second delivery: poison is counted from marks."""
    window = holding(taken("a", HINTED, claimed=True), taken("b", HINTED))
    assert planned(window) == ["MARK a"]


def test_nothing_overtakes_a_marked_job_that_waits() -> None:
    """Stream order holds although the ones behind it could leave at once."""
    window = holding(taken("a", HINTED), taken("b", UNHINTED), taken("c", HINTED))
    planned(window)
    assert planned(window) == []


def test_frames_ahead_are_bounded_in_bytes() -> None:
    """One MiB in flight, yet a single larger one still leaves."""
    half = AHEAD_BYTES_MAX // 2
    window = holding(
        taken("a", HINTED, size=half), taken("b", HINTED, size=half), taken("c", HINTED, size=1), taken("d", HINTED)
    )
    assert planned(window) == ["SEND a", "SEND b"]
    window.result(JobId("a"), lane_busy=False)
    assert planned(window) == ["SEND c", "SEND d"]
    assert planned(holding(taken("x", HINTED, size=2 * AHEAD_BYTES_MAX), taken("y", HINTED))) == ["SEND x"]


def test_a_hinted_job_past_its_deadline_is_given_up_and_not_sent() -> None:
    """At its very deadline, and without holding up those behind it."""
    window = holding(taken("a", HINTED, deadline_ms=NOW_MS), taken("b", HINTED))
    assert planned(window) == ["GIVE_UP a", "SEND b"]
    window.gone(JobId("a"))
    assert window.in_flight(NOW_MS) == ["b"]


def test_an_unhinted_job_past_its_deadline_is_left_to_the_mark() -> None:
    """The statement that marks compares the deadline by the clock that counts."""
    assert planned(holding(taken("a", UNHINTED, deadline_ms=NOW_MS - 1))) == ["MARK a"]


def test_what_the_machine_runs_already_is_in_flight_alone_and_never_sent() -> None:
    """From the first moment; the answer by job id frees the window."""
    window = Window()
    window.add_running([JobId("r")])
    assert window.is_busy()
    assert window.free_places() == 0
    assert window.in_flight(NOW_MS) == ["r"]
    assert window.add([taken("r", UNHINTED, claimed=True), taken("a", HINTED)]) == ["r"]
    assert planned(window) == []
    assert window.result(JobId("r"), lane_busy=False)
    assert planned(window) == ["SEND a"]


def test_a_job_stays_in_flight_until_it_is_settled() -> None:
    """Between result and settle a claim may still find its entry: it must not come again."""
    window = holding(taken("a", HINTED))
    planned(window)
    window.result(JobId("a"), lane_busy=False)
    assert window.in_flight(NOW_MS) == ["a"]
    assert window.add([taken("a", HINTED, claimed=True)]) == ["a"]
    assert planned(window) == []
    window.gone(JobId("a"))
    assert window.in_flight(NOW_MS) == []
    assert window.add([taken("a", HINTED, claimed=True)]) == []


def test_a_second_result_of_a_job_is_not_its_result() -> None:
    """Nor is one of a job that this session does not hold."""
    window = holding(taken("a", HINTED))
    planned(window)
    assert window.result(JobId("a"), lane_busy=False)
    assert not window.result(JobId("a"), lane_busy=False)
    assert not window.result(JobId("stranger"), lane_busy=False)


def test_a_busy_lane_frees_with_a_second_result_of_the_same_job() -> None:
    """The job has ended, its tool has not returned: nothing can start there, and nothing is taken."""
    window = holding(taken("a", UNHINTED), taken("b", HINTED))
    planned(window)
    window.marked(JobId("a"))
    assert window.result(JobId("a"), lane_busy=True)
    window.gone(JobId("a"))
    assert (window.is_busy(), window.free_places(), planned(window)) == (True, 0, [])
    assert not window.result(JobId("other"), lane_busy=False)
    assert planned(window) == []
    assert not window.result(JobId("a"), lane_busy=False)
    assert planned(window) == ["SEND b"]


def test_a_refused_job_ends_or_is_parked() -> None:
    """Parked, it waits for its own machine: it takes no place, and claims pass it by."""
    for parked in (False, True):
        window = holding(taken("a", UNHINTED), taken("b", HINTED))
        planned(window)
        window.refused(JobId("a"), parked=parked)
        assert window.in_flight(NOW_MS) == ["a", "b"]
        assert window.free_places() == AHEAD_MAX - 1
        assert planned(window) == ["SEND b"]


def test_an_answer_about_another_phase_changes_nothing() -> None:
    """A late answer to a mark, or one about a job that has gone."""
    window = holding(taken("a", UNHINTED))
    window.marked(JobId("a"))
    window.marked(JobId("nobody"))
    window.refused(JobId("nobody"), parked=True)
    window.gone(JobId("nobody"))
    assert planned(window) == ["MARK a"]


def test_a_parked_job_comes_back_after_its_deadline() -> None:
    """Then it can be ended; until then no claim brings it."""
    window = holding(taken("a", UNHINTED, deadline_ms=NOW_MS + 10))
    planned(window)
    window.refused(JobId("a"), parked=True)
    assert window.in_flight(NOW_MS + 9) == ["a"]
    assert window.in_flight(NOW_MS + 10) == []
    assert window.add([taken("a", UNHINTED, claimed=True, deadline_ms=NOW_MS + 10)]) == []
    assert planned(window, NOW_MS + 10) == ["MARK a"]


@pytest.mark.parametrize(
    ("kinds", "free"),
    [
        ([], 16),
        ([HINTED], 15),
        ([HINTED] * 16, 0),
        ([HINTED] * 20, 0),
        # It waits with the others, and is taken already: places are left for more of the same wait.
        ([HINTED, UNHINTED], 14),
        ([UNHINTED], 0),
        ([UNHINTED, HINTED], 0),
    ],
)
def test_free_places(kinds: list[bool], free: int) -> None:
    """Sixteen less what is held without a result; none while a marked one is in flight."""
    window = holding(*(taken(f"{n}", hinted) for n, hinted in enumerate(kinds)))
    planned(window)
    assert window.free_places() == free


def test_every_order_of_three_kinds_of_job_is_sent_in_stream_order() -> None:
    """All mixes of up to five hinted, unhinted and claimed jobs, each answered as soon as it was sent."""
    kinds = [(HINTED, False), (UNHINTED, False), (HINTED, True)]
    for mix in itertools.chain.from_iterable(itertools.product(kinds, repeat=n) for n in range(1, 6)):
        jobs = [f"{n}" for n in range(len(mix))]
        entries = [taken(job, hinted, claimed=claimed) for job, (hinted, claimed) in zip(jobs, mix, strict=True)]
        window, sent = holding(*entries), list[str]()
        while actions := window.plan(NOW_MS):
            for verb, entry in actions:
                if verb is Verb.MARK:
                    window.marked(entry.job)
                sent.append(entry.job)
            for _, entry in actions:
                assert window.result(entry.job, lane_busy=False)
                window.gone(entry.job)
        assert sent == jobs
        assert window.in_flight(NOW_MS) == []


class WindowMachine(RuleBasedStateMachine):
    """Takes, marks, results, settles and refusals in every order, against what the rules say (3a, 13)."""

    flying = Bundle("flying")
    marking = Bundle("marking")
    ending = Bundle("ending")

    def __init__(self) -> None:
        super().__init__()
        self.window = Window()
        self.numbers = itertools.count()
        self.entries: dict[JobId, Taken] = {}  # held by the window, in stream order
        self.waiting: list[JobId] = []
        self.sent: list[JobId] = []  # ever, in this session
        self.out: set[JobId] = set()  # at the machine, or being marked
        self.ended: set[JobId] = set()
        self.parked: set[JobId] = set()
        self.lane_busy: JobId | None = None

    def is_marked(self, job: JobId) -> bool:
        """Side effects, a second delivery, or running since before this session."""
        held = self.entries.get(job)
        return held is None or held.claimed or not held.entry.hinted

    @initialize(running=st.integers(0, 2))
    def begin(self, running: int) -> None:
        jobs = [JobId(f"r{n}") for n in range(running)]
        self.window.add_running(jobs)
        self.out |= set(jobs)
        self.running = set(jobs)

    @rule(
        kinds=st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([1, 300_000, 2_000_000])), max_size=16),
        late=st.booleans(),
    )
    def take(self, kinds: list[tuple[bool, bool, int]], late: bool) -> None:
        free = self.window.free_places()
        brought = []
        for hinted, claimed, size in kinds[:free]:
            job = f"{next(self.numbers)}"
            brought.append(
                taken(job, hinted, claimed=claimed, size=size, deadline_ms=NOW_MS - 1 if late and hinted else FAR_MS)
            )
        assert self.window.add(brought) == []
        for one in brought:
            self.entries[one.entry.job] = one
            self.waiting.append(one.entry.job)

    @rule()
    def claim_what_is_held(self) -> None:
        """A claim that was under way meanwhile brings only what is held already."""
        again = [one._replace(claimed=True) for one in self.entries.values()]
        assert self.window.add(again) == [one.entry.job for one in again]

    @rule(target=flying)
    def answer_running(self) -> object:
        jobs = self.running & self.out
        return multiple(*sorted(jobs)[:1])

    @rule(targets=(flying, marking, ending))
    def plan(self) -> object:
        actions = self.window.plan(NOW_MS)
        for action in actions:
            self.check(action)
        self.actions = {action.entry.job: action.verb for action in actions}
        return multiple(*self.actions)

    def check(self, action: Action) -> None:
        verb, entry = action
        job = entry.job
        assert self.lane_busy is None
        assert job not in self.sent, "one send of a job in a session"
        assert not any(self.is_marked(other) for other in self.out), "a marked job goes alone"
        ahead = self.waiting[: self.waiting.index(job)]
        assert not ahead, "stream order"
        self.waiting.remove(job)
        if verb is Verb.GIVE_UP:
            assert entry.hinted
            assert entry.deadline_ms <= NOW_MS
            self.ended.add(job)
            return
        if verb is Verb.MARK:
            assert self.is_marked(job)
            assert not self.out, "it is marked when nothing is in flight"
        else:
            assert not self.is_marked(job)
            assert len(self.out) < AHEAD_MAX
            size = sum(self.entries[other].size for other in self.out)
            assert not self.out or size + self.entries[job].size <= AHEAD_BYTES_MAX
        self.sent.append(job)
        self.out.add(job)

    @rule(job=consumes(marking), outcome=st.sampled_from(["marked", "ended", "parked"]))
    def mark(self, job: JobId, outcome: str) -> None:
        if job not in self.out or not self.is_marked(job) or job in self.running:
            return
        if outcome == "marked":
            self.window.marked(job)
            return
        self.window.refused(job, parked=outcome == "parked")
        self.out.discard(job)
        (self.parked if outcome == "parked" else self.ended).add(job)

    @rule(job=consumes(flying), lane_busy=st.booleans())
    def result(self, job: JobId, lane_busy: bool) -> None:
        if job not in self.out:
            return
        assert self.window.result(job, lane_busy=lane_busy)
        self.out.discard(job)
        self.ended.add(job)
        if lane_busy:
            self.lane_busy = job

    @rule()
    def lane_frees(self) -> None:
        if self.lane_busy is not None:
            assert not self.window.result(self.lane_busy, lane_busy=False)
            self.lane_busy = None

    @rule(job=consumes(ending))
    def settle(self, job: JobId) -> None:
        if job in self.ended:
            self.window.gone(job)
            self.ended.discard(job)
            self.entries.pop(job, None)

    @invariant()
    def holds_what_it_was_given(self) -> None:
        held = set(self.window.in_flight(NOW_MS))
        # A parked job whose deadline has passed is let go, so that a claim brings it back to be ended.
        for job in [job for job in self.parked if self.entries[job].entry.deadline_ms <= NOW_MS]:
            self.parked.discard(job)
            del self.entries[job]
        assert held == set(self.waiting) | self.out | self.ended | self.parked
        assert self.window.is_busy() == (self.lane_busy is not None or bool(self.out))

    @invariant()
    def never_more_than_its_places(self) -> None:
        held = len(self.waiting) + len(self.out)
        blocked = self.lane_busy is not None or any(self.is_marked(job) for job in self.out)
        assert self.window.free_places() == (0 if blocked else AHEAD_MAX - held)
        assert held <= AHEAD_MAX + len(self.running)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
