"""Events: which kinds there are, whose words they are, and what they say about the work (PURE).

Owns:     the names of our own events and frames, the reserved names, the default progress and terminal types, and the
          first frame of a stream out.
Promises: an event that an upstream sent never bears one of our names.
Used by:  the relay (what it stores), the gateway (what it sends), `towline.client` and `towline runs` (what they read).

Events stand in the log and have ids; frames are made by the gateway for one client and have none, so they never move
its cursor.
"""

import re
from collections.abc import Collection

from towline.wire import sse

RESERVED_PREFIX = "towline."
# EventSource fires events of these names itself; an upstream's would be taken for the state of the connection.
RESERVED_TYPES = frozenset({"open", "error"})
DEFAULT_TYPE = "message"

# Events of the log. `source` is empty where they are about the run; the data is a JSON object of these members.
SOURCE_ENDED = "towline.source.ended"  # source, state, reason, detail
SOURCE_GAP = "towline.source.gap"  # source, after: its replay no longer has what came after this uid
DISCONTINUITY = "towline.discontinuity"  # source: a live-only upstream was opened again; what it sent meanwhile is lost
EVENT_TOO_LARGE = "towline.event.too_large"  # source, type, size_bytes: stands in the place of such an event
RUN_STALLED = "towline.run.stalled"  # stale_s: signs of life come, real work does not
RUN_ORPHANED = "towline.run.orphaned"  # stale_s: not even signs of life come
RUN_RECOVERED = "towline.run.recovered"  # none: real work comes again
RUN_ENDED = "towline.run.ended"  # state, reason, sources: {source: {state, reason}}; the last event of every run

# Events of a thread's log; `source` is the turn, and `towline.wire.thread_events` has the data.
TURN_STARTED = "signal.dispatch.started"
TURN_RESTARTED = "signal.dispatch.restarted"  # what came of the turn before this is void: it is done again
TURN_COMPLETED = "signal.dispatch.completed"
TURN_FAILED = "signal.dispatch.failed"
TURN_CANCELLED = "signal.dispatch.cancelled"
MESSAGE = "message"  # an entry of the thread, the user's own included
MESSAGE_DELTA = "message.delta"
TOOL_CALL = "tool.call"
TOOL_RESULT = "tool.result"
# The visible ending of a turn, exactly one of them.
TURN_ENDS = frozenset({TURN_COMPLETED, TURN_FAILED, TURN_CANCELLED})

# Frames of the gateway; `towline.wire.runs` and `towline.wire.threads` have their bodies.
GAP = "towline.gap"
END = "towline.end"

# Real work, as agents name it: a run's progress is the last of these. A ping is a sign of life and no more.
PROGRESS_TYPES = ("output", "result", "assistant", "tool_result")
# What ends a source.
TERMINAL_TYPES = ("result",)

_OPENING = re.compile(rb"keepalive_s=([0-9]{1,6}(?:\.[0-9]{1,3})?)")


def upstream_type(event_type: str) -> str:
    """Name under which an upstream's event is stored: its own, unless that is reserved; then `message`."""
    if event_type.startswith(RESERVED_PREFIX) or event_type in RESERVED_TYPES:
        return DEFAULT_TYPE
    return event_type


def is_own(event_type: str) -> bool:
    """Whether the product says this, not an upstream."""
    return event_type.startswith(RESERVED_PREFIX)


def is_progress(event_type: str, progress_types: Collection[str] = PROGRESS_TYPES) -> bool:
    """Whether an upstream's event is real work; what the product says itself is none, whatever the run lists."""
    return event_type in progress_types and not is_own(event_type)


def is_terminal(event_type: str, terminal_types: Collection[str] = TERMINAL_TYPES) -> bool:
    """Whether an upstream's event ends its source; see `is_progress`."""
    return event_type in terminal_types and not is_own(event_type)


def opening(keepalive_s: float, retry_ms: int) -> bytes:
    """First frame of a stream out: how often it shows a sign of life, and how long to wait before coming back."""
    return sse.comment(f"keepalive_s={keepalive_s:g}").removesuffix(b"\n") + sse.retry(retry_ms)


def keepalive_s(comment: bytes) -> float | None:
    """Read the interval out of the comment of an `opening`; None if this is another comment."""
    found = _OPENING.fullmatch(comment)
    return float(found[1]) if found else None
