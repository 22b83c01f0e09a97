"""What a former owner of a run has left, as far as the stores know it. PURE.

Promises: a source that has ended is not opened again, whoever saw it end; what was told of a run is not told again.
"""

import msgspec

from common.store.leases import Look, Taken
from common.store.runs import Run, Source
from relay.health import Pulse, Verdict
from relay.tailer import SourceEnd


def former_verdict(run: Run) -> Verdict:
    """The verdict that its record has; a run that is stopping is told no new one."""
    return run.state if run.state in ("stalled", "orphaned") else "active"


def former_end(source: Source, taken: Taken) -> SourceEnd | None:
    """How a source has ended under a former owner: the log knows first, Postgres for longer."""
    if data := taken.ended.get(source.source):
        told = msgspec.json.decode(data)
        return SourceEnd(told["state"], told["reason"], told["detail"])
    if source.state is not None:
        return SourceEnd(source.state, source.reason or "", source.detail or "")
    return None


def former_pulse(now: float, verdict: Verdict, stall_after_s: float, seen: Look) -> Pulse:
    """The heartbeats that a former owner left. What Redis does not know (any more) counts from now, but a run that was
    found stalled has not recovered by losing its heartbeats."""
    progress_age_s = seen.progress_age_s
    if progress_age_s is None:
        progress_age_s = 0.0 if verdict == "active" else stall_after_s
    live_age_s = seen.live_age_s
    if live_age_s is None:
        live_age_s = stall_after_s if verdict == "orphaned" else 0.0
    return Pulse(now - live_age_s, now - progress_age_s)
