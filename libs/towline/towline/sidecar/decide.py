"""PURE: what to do with a delivery.

    running here                          -> Join      the answer goes out under this frame's id too
    journalled outcome                    -> Replay    never run again
    journalled, outcome gone or cut off   -> Unknown
    at or below the horizon, no row       -> Unknown   the journal may have forgotten it
    tool unknown, or its hint is gone     -> Refuse    certainly did not run
    else                                  -> Run       when the lane gets to it, decided once more there

Owns:     this table.
Promises: no delivery of a job that has a row, or may have had one, ever leads to Run.
Used by:  sidecar.lane.
"""

from dataclasses import dataclass
from enum import Enum

from towline.sidecar.outcome import JobOutcome
from towline.wire.frames import Hints


class State(Enum):
    """Of a kept job; RUNNING is written before its tool starts."""

    RUNNING = "running"
    ENDED = "ended"
    # The server has the outcome; what is kept is that the job ran.
    ACKNOWLEDGED = "acknowledged"


@dataclass(frozen=True, slots=True)
class Row:
    """What is kept of a job; `outcome` is there while ENDED."""

    state: State
    outcome: JobOutcome | None = None


@dataclass(frozen=True, slots=True)
class Run:
    pass


@dataclass(frozen=True, slots=True)
class Join:
    pass


@dataclass(frozen=True, slots=True)
class Replay:
    outcome: JobOutcome


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have run and must not run again."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """It certainly did not run."""

    code: str
    message: str


Decision = Run | Join | Replay | Unknown | Refuse


def decide(
    *,
    name: str,
    hinted: bool,
    accepted_at_ms: int,
    running: bool,
    row: Row | None,
    horizon_ms: int,
    hints: Hints | None,
) -> Decision:
    """Decide about one delivery.

    Args:
        name: of the tool, for messages.
        hinted: as the frame says, that is, as the catalogue said when the job was accepted.
        accepted_at_ms: by the server's clock.
        running: this very job occupies the lane now.
        row: what is kept of it, in the journal or, for a hinted job, in memory.
        horizon_ms: `accepted_at_ms` of the youngest job that the journal has forgotten.
        hints: of the tool as it is registered now; None if it is not.
    """
    if running:
        return Join()
    if row is not None:
        if row.outcome is not None:
            return Replay(row.outcome)
        if row.state is State.ACKNOWLEDGED:
            return Unknown("acknowledged", "this job ran and its outcome was acknowledged; the machine kept no copy")
        return Unknown("interrupted", "this job was started and its outcome was never recorded")
    if accepted_at_ms <= horizon_ms:
        return Unknown("forgotten", "this job is older than what the machine remembers")
    if hints is None:
        return Refuse("unknown-tool", f"this machine has no tool {name!r}")
    if hinted and not hints.repeatable:
        return Refuse("hints-changed", f"{name!r} is no longer read-only or idempotent; nothing was run")
    return Run()
