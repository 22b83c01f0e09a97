"""Backoff: growing, jittered pauses between tries of a loop that must not give up."""

import random


class Backoff:
    """Jitter over a doubling bound, so that many who failed together do not come back together."""

    def __init__(self, *, first_s: float, cap_s: float) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._bound_s = first_s

    def next_s(self) -> float:
        """How long to wait before the next try."""
        pause = random.uniform(self._first_s / 2, self._bound_s)  # noqa: S311 (spread, not secrecy)
        self._bound_s = min(self._bound_s * 2, self._cap_s)
        return pause

    def reset(self) -> None:
        """Call after a success."""
        self._bound_s = self._first_s
