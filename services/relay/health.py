"""Two heartbeats, and the detector that reads them: does the run make progress, and does anybody live there? PURE.

Promises: a run that only pings is `stalled`, however lively; one without any sign of life as well is `orphaned`; a
          verdict changes when the facts do, and each change is told once.
Used by:  relay.owner, once a second. Times are of the caller's monotonic clock: a step of the wall clock changes
          nothing. Of what it cannot know (a new owner after a Redis loss) it counts from when it began.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.store import keys

Verdict = Literal["active", "stalled", "orphaned"]


class Change(NamedTuple):
    """A new verdict. `stale_s`: since the last progress."""

    verdict: Verdict
    stale_s: float


@dataclass(slots=True)
class Pulse:
    """The two heartbeats of one source or of a whole run."""

    live_at: float
    progress_at: float

    def verdict(self, now: float, stall_after_s: float) -> Verdict:
        """Judge. Life is stale after what the liveness heartbeat lives, or sooner where progress is expected sooner."""
        if now - self.progress_at < stall_after_s:
            return "active"
        if now - self.live_at < min(stall_after_s, keys.LIVENESS_TTL_S):
            return "stalled"
        return "orphaned"


@dataclass(slots=True)
class Detector:
    """The verdict on one run. `verdict` starts with what the record says, which a former owner may have written."""

    stall_after_s: float
    verdict: Verdict

    def look(self, pulse: Pulse, now: float) -> Change | None:
        """Look at the heartbeats; returns the new verdict if it has changed."""
        found = pulse.verdict(now, self.stall_after_s)
        if found == self.verdict:
            return None
        self.verdict = found
        return Change(found, now - pulse.progress_at)
