"""What this process remembers of hinted jobs: enough that a second delivery never runs one again while it lives.

Owns:     outcomes of hinted jobs until they are acknowledged, then that they ran.
Promises: bounded; costs no disk. A hinted job may run again after this process died, and only then (or after
          `JOBS_MAX` younger ones).
Used by:  sidecar.memory.

Kept apart from the journal on purpose: its two fsyncs would cost a hinted job far more than running it twice could.
"""

from collections import OrderedDict

from towline.sidecar.decide import Row, State
from towline.sidecar.outcome import JobOutcome

# A worker has at most 16 hinted jobs under way; redeliveries come within one deadline. This is far beyond both.
JOBS_MAX = 4096
RESULT_BYTES_MAX = 32 * 1024 * 1024

_ACKNOWLEDGED = Row(State.ACKNOWLEDGED)


class Recent:
    """Rows of hinted jobs, keyed like the journal's; the oldest make room."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, str], Row] = OrderedDict()
        # Those that still hold an outcome, oldest first.
        self._held: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._held_bytes = 0

    def find(self, user: str, job: str) -> Row | None:
        """The job's row; None if it never ended here."""
        return self._rows.get((user, job))

    def remember(self, user: str, job: str, outcome: JobOutcome) -> None:
        """Keep an outcome until it is acknowledged. When too much is held, the oldest are kept as "ran" only."""
        key = (user, job)
        size = len(memoryview(outcome.result))
        self._rows[key] = Row(State.ENDED, outcome)
        self._held[key] = size
        self._held_bytes += size
        while self._held_bytes > RESULT_BYTES_MAX:
            self.acknowledge(*next(iter(self._held)))
        while len(self._rows) > JOBS_MAX:
            oldest, _ = self._rows.popitem(last=False)
            self._held_bytes -= self._held.pop(oldest, 0)

    def acknowledge(self, user: str, job: str) -> None:
        """The server has it: let the outcome go. Unknown jobs are ignored."""
        key = (user, job)
        if key in self._held:
            self._held_bytes -= self._held.pop(key)
            self._rows[key] = _ACKNOWLEDGED
