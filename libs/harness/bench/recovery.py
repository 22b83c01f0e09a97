"""How long recoveries take: the drills (`harness.drills`) as runs of the bench.

A drill checks far more than its times; one that finds anything else wrong ends the bench. For p95 over many plays, and
for the other drills, see `towline drill run NAME --repeat 20`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from harness.bench.figures import Figure, Sample
from harness.bench.ground import BenchFailed, Ground
from harness.bench.runs import Run, of, p50
from harness.drills.local import open_target
from harness.drills.play import play
from harness.drills.target import Target

HEARTBEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut that a drill makes, by the name that its recovery has in the drill's report."""

    drill: str
    label: str


_KILLED = Cut("worker-kill", "killed before durable")
_REDIALLED = Cut("worker-kill", "killed while running")
_RELAY_KILLED = Cut("relay-kill", "relay killed")
_RELAY_TOLD = Cut("relay-term", "relay told to leave")
_TURN_CUT = Cut("turn-crash", "worker killed")

RUNS = (
    Run("worker killed, answer", "drills", _KILLED, _KILLED, "recovery"),
    Run("worker killed, redialled", "drills", _REDIALLED, _REDIALLED, "recovery"),
    Run("relay killed", "drills", _RELAY_KILLED, _RELAY_KILLED, "recovery"),
    Run("relay told to leave", "drills", _RELAY_TOLD, _RELAY_TOLD, "recovery"),
    Run("worker killed, turn", "drills", _TURN_CUT, _TURN_CUT, "recovery"),
)
_ANSWER, _REDIAL, _KILL, _TERM, _TURN = (run.name for run in RUNS)


# The times are of earlier systems of this kind, on other machines; not measured beside ours.
EARLIER = "an earlier system (constant)"


def _bound(name: str, run: str, *, earlier_s: float, goal_ms: float, then_ms: float) -> Figure:
    earlier_ms = earlier_s * 1000
    return Figure(
        name, (run,), "ms", of(run, p50), EARLIER, lambda _: earlier_ms, goal=goal_ms, then=then_ms, bounds="value"
    )


# By the word that chooses it on the command line.
ROWS = {
    "recovery": (
        _bound(
            "worker killed in mid-job, until the answer",
            _ANSWER,
            earlier_s=180,
            goal_ms=3000,
            then_ms=1000,
        ),
        _bound(
            "worker killed, until its sidecar is welcomed elsewhere",
            _REDIAL,
            earlier_s=22,
            goal_ms=2000,
            then_ms=1000,
        ),
        _bound(
            "relay killed, until its runs flow again",
            _KILL,
            earlier_s=65,
            goal_ms=5000,
            then_ms=3000,
        ),
        _bound(
            "relay told to leave, until its runs flow again",
            _TERM,
            earlier_s=65,
            goal_ms=1000,
            then_ms=300,
        ),
        _bound(
            "worker killed in mid-turn, until the turn goes on elsewhere",
            _TURN,
            earlier_s=120,
            goal_ms=15_000,
            then_ms=6000,
        ),
    )
}


class Drills:
    """An installation that is drilled, as a peer."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._found: dict[Cut, float] = {}

    async def run(self, load: Cut) -> Sample:
        """Say how long its recovery took. One play serves every cut of its drill, once each. Raises: BenchFailed."""
        if load not in self._found:
            report = await play(load.drill, self._target, lambda _: None)
            if report.violations:
                raise BenchFailed(f"drill {load.drill}: {report.violations}")
            self._found |= {Cut(load.drill, recovery.label): recovery.seconds for recovery in report.recoveries}
        seconds = self._found.pop(load)
        return Sample(1, seconds, seconds * 1000, seconds * 1000, {})


@asynccontextmanager
async def open_drills(ground: Ground) -> AsyncIterator[Drills]:
    """Run an installation of its own, with stores of its own, until the block ends. Raises: ProcessFailed."""
    async with open_target(ground.directory / "drilled", heartbeat_s=HEARTBEAT_S) as target:
        yield Drills(target)
