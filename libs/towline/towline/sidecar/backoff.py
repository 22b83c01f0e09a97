"""PURE: when to dial again, and when not to.

Owns:     the meaning of close codes and of refusals before the upgrade, and every delay between two dials.
Promises: delays are spread by a roll of the caller (0 <= roll < 1) and bounded by `CAP_S`, unless the server named its
          own; a server that accepts and closes at once is dialled at most three times more in the first ten seconds.
Used by:  sidecar.app, which rolls, waits and dials.
"""

import math
import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from towline.wire.frames import Close

BASE_S = 0.5
CAP_S = 30.0

# A restart announced by the server is no failure: everyone comes back within this, spread evenly. Longer, and callers
# wait for a machine that could be there; shorter, and a thousand laptops dial in the same instant.
RESTART_SPREAD_S = 1.0

# "Later" said by a server that is overloaded or full: two to four times what a blip would cost.
TRY_LATER_S = 10.0

# A session that ended sooner was none: without this a server that accepts and closes is dialled 1 500 times a second.
SHORT_SESSION_S = 3.0

# What a server may make us wait: a wrong header or reason must not park a machine for a day.
TOLD_DELAY_MAX_S = 300.0
STAND_BY_DEFAULT_S = 5.0

# A refused token does not get better by repeating it; a few tries only cover a server that starts up.
TOKEN_TRIES_MAX = 3


@dataclass(frozen=True, slots=True)
class Redial:
    """Dial again after so many seconds."""

    after_s: float


@dataclass(frozen=True, slots=True)
class NeedToken:
    """Dial again only with another token."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Dial no more; the process stays, so that no supervisor starts it into the same wall."""

    why: str


Step = Redial | NeedToken | Halt


@dataclass(slots=True)
class Backoff:
    """What the dials so far lead to next.

    Attributes:
        failures: dials in a row that ended without a session of at least `SHORT_SESSION_S`.
        refusals: 401 and 403 in a row.
    """

    failures: int = 0
    refusals: int = 0

    def after_failure(self, roll: float) -> Step:
        """After no connection, no welcome, or an answer that says nothing about us."""
        self.failures += 1
        return Redial(self._jittered(roll))

    def after_refusal(self, status: int, retry_after: str | None, roll: float, *, date: str | None = None) -> Step:
        """After an HTTP answer other than 101.

        Args:
            retry_after: the header's value, seconds or a date.
            date: the header of that name, by which a date in `retry_after` is read: our own clock may be wrong.
        """
        self.failures += 1
        if status in (401, 403):
            self.refusals += 1
            if self.refusals >= TOKEN_TRIES_MAX:
                return NeedToken()
        else:
            self.refusals = 0
        told_s = _retry_after_s(retry_after, date) if status in (429, 503) else None
        if told_s is not None:
            # Never sooner than told, and not everyone at the same instant.
            return Redial(told_s + roll * max(1.0, 0.2 * told_s))
        return Redial(self._jittered(roll))

    def after_close(self, code: int | None, reason: str, session_s: float, roll: float) -> Step:
        """After a socket that was open for `session_s`. `code`: of the peer's close frame, None if there was none."""
        self.refusals = 0
        self.failures = 0 if session_s >= SHORT_SESSION_S else self.failures + 1
        match code:
            case Close.OTHER_MACHINE:
                told_s = _told_s(reason)
                return Redial((STAND_BY_DEFAULT_S if told_s is None else told_s) * (1 + 0.1 * roll))
            case Close.TOKEN_REFUSED:
                return NeedToken()
            case Close.REPLACED:
                return Halt("another sidecar uses this identity; stop one of the two, then start this one again")
            case Close.BAD_VERSION:
                return Halt("the server does not speak this version; update towline, then start again")
            case int() if 4500 <= code <= 4999:
                return Halt(f"the server closed with {code} ({reason}) and wants no other dial")
            case Close.TRY_LATER:
                return Redial(max(TRY_LATER_S * (0.5 + roll), self._jittered(roll)))
        if self.failures >= 2:
            # Halved jitter here: full jitter would let several tries fall into the same second.
            return Redial((0.5 + 0.5 * roll) * min(CAP_S, 2.0**self.failures))
        return Redial(roll * RESTART_SPREAD_S)

    def after_new_token(self) -> None:
        """A token that was not refused yet: count from the start."""
        self.failures = self.refusals = 0

    def _jittered(self, roll: float) -> float:
        return roll * min(CAP_S, BASE_S * 2.0 ** min(self.failures, 16))


def _told_s(text: str) -> float | None:
    """The first number in a text for people, as seconds within bounds; None if there is none."""
    number = re.search(r"-?\d+(?:\.\d+)?(?:[eE]\d+)?", text)
    return _bounded(float(number[0])) if number else None


def _retry_after_s(text: str | None, date: str | None) -> float | None:
    """The header `Retry-After` as seconds within bounds; None if it says nothing that we understand."""
    try:
        return _bounded(float(text or ""))
    except ValueError:
        pass
    try:
        return _bounded((parsedate_to_datetime(text or "") - parsedate_to_datetime(date or "")).total_seconds())
    except (ValueError, TypeError, OverflowError):  # no date, or one with a time zone and one without
        return None


def _bounded(seconds: float) -> float | None:
    return min(max(seconds, 0.0), TOLD_DELAY_MAX_S) if math.isfinite(seconds) else None
