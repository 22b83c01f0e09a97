"""The stage of a drill: its timeline, its report, and waiting with a deadline.

Promises: everything that is expected is measured and written down, met or not; only what a drill cannot go on without
          raises.
Used by:  the scene and its streams.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sized
from typing import TypeVar

from common.errors import StoreUnavailable
from harness.drills.report import Check, Recovery, Report
from harness.drills.target import DrillFailed

T = TypeVar("T")

POLL_EVERY_S = 0.02
# For what takes milliseconds on an idle machine and must not be called a violation on a busy one.
SOON_S = 10.0


class Stage:
    """See the module.

    Attributes:
        report: what was found so far.
        run: makes this run's names unlike all others.
    """

    def __init__(
        self, report: Report, *, run: str, tell: Callable[[str], None], patience: float, allowance_s: float
    ) -> None:
        """
        Args:
            tell: takes each line of the timeline.
            patience: times every limit of time; 1 where a drill measures, more where a busy machine only counts.
            allowance_s: what the target's own tools may take, on top of it.
        """
        self.report = report
        self.run = run
        self._tell = tell
        self._patience = patience
        self._allowance_s = allowance_s
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Add a line to the timeline."""
        self._tell(f"{time.monotonic() - self._began:6.2f} s  {text}")

    def check(self, what: str, expected: object, measured: object, *, is_met: bool | None = None) -> None:
        """Write down an expectation; it is met when both are equal, unless `is_met` says otherwise."""
        met = expected == measured if is_met is None else is_met
        self.report.checks.append(Check(what, str(expected), str(measured), met))
        if not met:
            self.say(f"VIOLATION: {what}: expected {expected}, measured {measured}")

    def check_same(self, what: str, expected: Sized, measured: Sized) -> None:
        """Write down that two things too long to be read are equal; where they are not, the report has both."""
        if expected == measured:
            self.check(what, f"{len(expected)}, alike", f"{len(measured)}, alike")
        else:
            self.check(what, expected, measured)

    def recovered(self, label: str, cut_at: float, good_at: float, *, within_s: float) -> None:
        """Write down how long it took from a cut to its repair (monotonic seconds)."""
        taken_s = max(0.0, good_at - cut_at)
        within_s = within_s * self._patience + self._allowance_s
        self.report.recoveries.append(Recovery(label, taken_s))
        self.check(f"{label}: recovery", f"<= {within_s:.1f} s", f"{taken_s:.2f} s", is_met=taken_s <= within_s)

    async def eventually(
        self,
        what: str,
        condition: Callable[[], Awaitable[T | None]],
        *,
        within_s: float = SOON_S,
        every_s: float = POLL_EVERY_S,
    ) -> T:
        """Wait until `condition` gives something true, and return that. A store that is away counts as not yet.

        Raises:
            DrillFailed: it did not within `within_s`.
        """
        within_s = within_s * self._patience + self._allowance_s
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(StoreUnavailable):
                value = await condition()
                if value:
                    return value
            if time.monotonic() > deadline:
                raise DrillFailed(f"not within {within_s:g} s: {what}")
            await asyncio.sleep(every_s)
