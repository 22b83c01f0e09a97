"""What to do when an upstream answers, fails or closes: go on, come back later, or end the source. PURE.

Promises: everything is tried again except what only a person can change; no two sources that failed together come back
          together; no upstream can make us wait longer than RETRY_AFTER_MAX_S, or hurry us below RETRY_MIN_S.
"""

import calendar
from dataclasses import dataclass
from email.utils import parsedate
from typing import NamedTuple

# After a clean close, unless the upstream's `retry:` says otherwise.
RETRY_S = 1.0
RETRY_MIN_S = 0.1
RETRY_MAX_S = 60.0
# Failures in a row double the pause up to here: an upstream that is back is heard again within half a minute.
BACKOFF_MAX_S = 30.0
# Longer, and an upstream that names a far date is as good as gone: its source would be silent and nobody would know.
RETRY_AFTER_MAX_S = 300.0

# From the shortest pause to the longest and beyond.
_DOUBLINGS_MAX = 16

EVENT_STREAM = "text/event-stream"
# 4xx that say "not now" instead of "never".
_RETRIED_4XX = (408, 425, 429)


class Accepted(NamedTuple):
    """The answer is an event stream: read it."""


class Refused(NamedTuple):
    """Not now. `after_s`: what the upstream asked for, None when it did not say."""

    after_s: float | None


class Final(NamedTuple):
    """The source has failed for good. `reason` is a slug from a small set, `detail` says it in words."""

    reason: str
    detail: str


def judge_answer(status: int, content_type: str, retry_after: str, wall_now: float) -> Accepted | Refused | Final:
    """Decide what an answer's first line and headers mean for its source.

    Args:
        retry_after: the header's value, empty without one.
        wall_now: seconds since the Unix epoch, for a `Retry-After` that is a date.
    """
    if status == 204:
        return Final("upstream-finished", "the upstream answered 204: no more events")
    if 300 <= status < 400:
        return Final("upstream-redirected", f"the upstream answered {status}: redirects are not followed")
    if status >= 500 or status in _RETRIED_4XX:
        return Refused(_retry_after_s(retry_after, wall_now))
    if status != 200:
        return Final("upstream-refused", f"the upstream answered {status}")
    if content_type.partition(";")[0].strip().lower() != EVENT_STREAM:
        named = content_type[:80] or "no type"
        return Final("not-an-event-stream", f"the upstream's Content-Type is {named!r}, not {EVENT_STREAM}")
    return Accepted()


@dataclass(slots=True)
class Pace:
    """When one source's upstream is asked again.

    `spread` is a random number of [0, 1), drawn by the caller.
    """

    failures: int = 0
    retry_s: float = RETRY_S

    def heard(self, retry_ms: int | None) -> None:
        """A connection has brought something; `retry_ms` is the last `retry:` on it."""
        self.failures = 0
        if retry_ms is not None:
            self.retry_s = min(max(retry_ms / 1000, RETRY_MIN_S), RETRY_MAX_S)

    def after_close(self, spread: float) -> float:
        """Seconds to wait after a connection that was heard and ended, cleanly or not."""
        return self.retry_s * (0.5 + spread / 2)

    def after_failure(self, spread: float, asked_s: float | None = None) -> float:
        """Seconds to wait after one that brought nothing. `asked_s`: the upstream's own wish, which is a minimum."""
        bound = min(self.retry_s * float(2**self.failures), max(self.retry_s, BACKOFF_MAX_S))
        self.failures = min(self.failures + 1, _DOUBLINGS_MAX)
        pause = bound * (0.5 + spread / 2)
        if asked_s is None:
            return pause
        # Those who were told the same moment must not all keep it.
        return max(pause, min(asked_s, RETRY_AFTER_MAX_S) * (1 + spread / 10))


def _retry_after_s(value: str, wall_now: float) -> float | None:
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(min(int(text[:9]), int(RETRY_AFTER_MAX_S)))
    try:
        date = parsedate(text)
        return max(0.0, calendar.timegm(date) - wall_now) if date else None
    except (ValueError, OverflowError, TypeError):
        return None
