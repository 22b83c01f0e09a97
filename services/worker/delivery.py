"""Which of a session's entries to mark, send or give up now (PURE; rules 3, 3a, 13 and 18).

    take/claim ─▶ WAITING ─┬─ unmarked ───────────────▶ SENT ─▶ ENDING ─▶ (settled: gone)
                           ├─ marked ─▶ MARKING ─ mark ─▶ SENT      ▲
                           │               └─ refused ──────────────┤ (the record has ended)
                           │               └─ refused ─▶ PARKED     │ (it waits for its own machine)
                           └─ hinted, past its deadline ────────────┘
    hello.running ─▶ RUNNING ─ result ─▶ ENDING

A marked job (side effects, delivered before, or in doubt) goes alone; unmarked ones may be ahead of one another, in
stream order.
A job stays here, by its id, from the answer that brought it until it is settled, so no claim or take brings it twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from common.ids import JobId
from common.store.jobs import Entry, Taken

# Frames of unmarked jobs that may wait in the machine's lane: enough to hide a round trip, few enough to cancel.
AHEAD_MAX = 16
AHEAD_BYTES_MAX = 1024 * 1024


class Phase(Enum):
    """Where a job of a session stands; see the drawing above."""

    WAITING = auto()
    MARKING = auto()
    SENT = auto()
    RUNNING = auto()
    ENDING = auto()
    PARKED = auto()


class Verb(Enum):
    """What the session has to do about a job."""

    MARK = auto()
    SEND = auto()
    GIVE_UP = auto()


class Action(NamedTuple):
    """One thing to do now."""

    verb: Verb
    entry: Entry


@dataclass(slots=True)
class _Held:
    entry: Entry | None
    claimed: bool
    size: int
    phase: Phase

    @property
    def marked(self) -> bool:
        return self.entry is None or self.claimed or not self.entry.hinted


@dataclass(slots=True)
class Window:
    """The jobs of one session. Callers act on `plan`, and tell what came of it."""

    _held: dict[JobId, _Held] = field(default_factory=dict)
    # The machine answered for this job, but its tool has not returned: nothing can start there.
    lane_busy: JobId | None = None

    def add_running(self, jobs: Iterable[JobId]) -> None:
        """What the machine said in its hello: in flight, alone, and not sent again."""
        for job in jobs:
            self._held.setdefault(job, _Held(None, True, 0, Phase.RUNNING))

    def add(self, taken: Sequence[Taken]) -> list[JobId]:
        """Take over what a take or claim brought, in stream order; returns those that were held already."""
        known = []
        for entry, claimed, size in taken:
            if entry.job in self._held:
                known.append(entry.job)
            else:
                self._held[entry.job] = _Held(entry, claimed, size, Phase.WAITING)
        return known

    def free_places(self) -> int:
        """How many entries a take may bring now."""
        if self.lane_busy is not None:
            return 0
        places = AHEAD_MAX
        for held in self._held.values():
            if held.phase is Phase.WAITING:
                places -= 1
            elif held.phase in (Phase.MARKING, Phase.SENT, Phase.RUNNING):
                if held.marked:
                    return 0
                places -= 1
        return max(places, 0)

    def plan(self, now_ms: float) -> list[Action]:
        """What to do now, in this order. Each action is planned once.

        A MARK is answered by `marked` or `refused`, a GIVE_UP by `ended`, a SEND by `result`.
        """
        if self.lane_busy is not None:
            return []
        flying, size = 0, 0
        for held in self._held.values():
            if held.phase in (Phase.MARKING, Phase.SENT, Phase.RUNNING):
                if held.marked:
                    return []
                flying += 1
                size += held.size
        actions: list[Action] = []
        for held in self._held.values():
            if held.phase is not Phase.WAITING or held.entry is None:
                continue
            if held.marked:
                if flying == 0:
                    held.phase = Phase.MARKING
                    actions.append(Action(Verb.MARK, held.entry))
                break  # it goes alone, and nothing behind it overtakes
            if held.entry.deadline_ms <= now_ms:
                held.phase = Phase.ENDING
                actions.append(Action(Verb.GIVE_UP, held.entry))
                continue
            if flying >= AHEAD_MAX or (flying and size + held.size > AHEAD_BYTES_MAX):
                break
            held.phase = Phase.SENT
            flying += 1
            size += held.size
            actions.append(Action(Verb.SEND, held.entry))
        return actions

    def marked(self, job: JobId) -> None:
        """The begin mark is durable: its frame leaves now."""
        if (held := self._held.get(job)) and held.phase is Phase.MARKING:
            held.phase = Phase.SENT

    def refused(self, job: JobId, *, parked: bool) -> None:
        """No mark: the record has ended (it is settled next), or waits for its own machine."""
        if held := self._held.get(job):
            held.phase = Phase.PARKED if parked else Phase.ENDING

    def result(self, job: JobId, *, lane_busy: bool) -> bool:
        """The machine answered. False: this job is none of this session's, or was answered before."""
        if lane_busy:
            self.lane_busy = job
        elif self.lane_busy == job:
            self.lane_busy = None
        held = self._held.get(job)
        if held is None or held.phase is Phase.ENDING:
            return False
        held.phase = Phase.ENDING
        return True

    def is_running(self, job: JobId) -> bool:
        """Whether the machine runs it since an older session, as its hello said, and has not answered yet."""
        return (held := self._held.get(job)) is not None and held.phase is Phase.RUNNING

    def doubt(self, job: JobId) -> None:
        """It may have ended: if it waits here it is marked before it is sent, hinted or not, and so refused."""
        if (held := self._held.get(job)) and held.phase is Phase.WAITING:
            held.claimed = True

    def holds(self, job: JobId) -> bool:
        """Whether the job is here, in whatever phase."""
        return job in self._held

    def gone(self, job: JobId) -> None:
        """The job is settled, or its outcome was let go: a claim may bring it again."""
        self._held.pop(job, None)

    def in_flight(self, now_ms: float) -> list[JobId]:
        """Jobs that a claim must not bring again; a parked one may come back after its deadline, to be ended."""
        late = [
            job
            for job, held in self._held.items()
            if held.phase is Phase.PARKED and held.entry is not None and held.entry.deadline_ms <= now_ms
        ]
        for job in late:
            del self._held[job]
        return list(self._held)

    def is_busy(self) -> bool:
        """Whether the machine has work of ours."""
        return self.lane_busy is not None or any(
            h.phase in (Phase.SENT, Phase.RUNNING, Phase.MARKING) for h in self._held.values()
        )
