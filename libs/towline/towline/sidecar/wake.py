"""PURE: two clocks tell whether this machine slept.

Owns:     the last reading of the wall clock and of the monotonic clock.
Promises: a pause of more than `GAP_S` in either clock, or a wall clock set back by as much, is reported once.
Used by:  sidecar.app (each second) and sidecar.lane (before each start).
"""

from dataclasses import dataclass

# Clocks are read once a second. Five seconds are no scheduling hiccup: the lid was closed, the process was stopped, the
# loop was wedged or somebody set the clock. In each case sockets and deadlines can no longer be trusted.
GAP_S = 5.0


@dataclass(slots=True)
class Clocks:
    """The latest reading; seconds."""

    wall: float
    monotonic: float

    def slept(self, wall: float, monotonic: float) -> bool:
        """Take a new reading; whether more time passed since the last one than a machine that is awake lets pass.

        On macOS and Linux the monotonic clock stands still in sleep and the wall clock goes on; a stopped process sees
        both go on. Either is enough.
        """
        wall_s, monotonic_s = wall - self.wall, monotonic - self.monotonic
        self.wall, self.monotonic = wall, monotonic
        return wall_s > GAP_S or monotonic_s > GAP_S or wall_s < -GAP_S
