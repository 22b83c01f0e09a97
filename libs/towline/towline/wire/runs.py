"""HTTP bodies of runs, their event streams and stream tokens, shared by the gateway, its description and the client.

As in `towline.wire.api`: requests (`RunFollow`, `StreamTokenCreate`) refuse members they do not know, answers ignore
them; times are RFC 3339 UTC with milliseconds; in answers only a member marked `UnsetType` may be absent.
"""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towline.wire.api import Id, Timestamp
from towline.wire.events import PROGRESS_TYPES, TERMINAL_TYPES

SOURCES_MAX = 20
HEADERS_MAX = 20
EVENT_TYPES_MAX = 50
# How many runs one connection, and one stream token, may carry.
STREAM_RUNS_MAX = 20
STREAM_THREADS_MAX = 20
DURATION_S_MAX = 7 * 86_400
STREAM_TOKEN_TTL_S_MAX = 3600
EVENTS_PAGE_DEFAULT = 100
EVENTS_PAGE_MAX = 1000

RunState = Literal["active", "stalled", "orphaned", "stopping", "completed", "failed", "stopped", "expired"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
RUN_TERMINAL_STATES: frozenset[str] = frozenset({"completed", "failed", "stopped", "expired"})
Resume = Literal["ids", "replay", "live"]
Verdict = Literal["active", "stalled", "orphaned", "ended", "unknown"]

EventType = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$(?!\n)")]
Uuid = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$(?!\n)")]
EventTypes = Annotated[list[EventType], Meta(max_length=EVENT_TYPES_MAX)]
HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$(?!\n)")]
HeaderValue = Annotated[str, Meta(pattern=r"^[\t -~]*$(?!\n)", max_length=8192)]
Seconds = Annotated[float, Meta(gt=0, le=DURATION_S_MAX)]


class SourceFollow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One upstream SSE stream to follow, within `RunFollow`.

    Attributes:
        source: its name within the run.
        headers: sent upstream with every request; encrypted at rest, never shown again, and no part of the
            comparison that makes a PUT "the same" (the newest ones count).
        resume: how it goes on after a break: by `Last-Event-ID` (`ids`); from its start, what was had before being
            left out (`replay`); or with what comes next, what came in between being lost (`live`).
        idle_timeout_s: without any byte for this long, the source has ended.
    """

    source: Id
    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    resume: Resume
    headers: Annotated[dict[HeaderName, HeaderValue], Meta(max_length=HEADERS_MAX)] = {}
    idle_timeout_s: Seconds = 1800.0


class RunFollow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /v1/runs/{run}`.

    Attributes:
        progress_types: event types that are real work; without one for `stall_after_s` the run is reported stalled.
        terminal_types: event types that end their source; when all sources have ended, the run has.
        max_duration_s: counts from the first PUT; then the run ends as `expired`.
    """

    sources: Annotated[list[SourceFollow], Meta(min_length=1, max_length=SOURCES_MAX)]
    progress_types: EventTypes = msgspec.field(default_factory=lambda: list(PROGRESS_TYPES))
    terminal_types: EventTypes = msgspec.field(default_factory=lambda: list(TERMINAL_TYPES))
    stall_after_s: Seconds = 900.0
    max_duration_s: Seconds = 86_400.0


class RunSource(msgspec.Struct, frozen=True):
    """One source of a run, as `Run` shows it; what is not known is null.

    Attributes:
        connected: whether its relay holds an open answer of the upstream.
        live_at: the last frame of any kind, pings included.
        progress_at: the last event of one of the run's progress types.
        verdict: `active`: real work comes; `stalled`: only signs of life come; `orphaned`: not even these;
            `ended`: see `state`; `unknown`: nothing was heard of it yet, or Redis does not answer.
        failure: why the last attempt to read it brought nothing, in words; null once one has. It is tried again.
        state: how it ended (`completed` or `failed`); null before.
        reason: slug of why it ended, and `detail` in words; null before.
    """

    source: str
    url: str
    resume: Resume
    idle_timeout_s: float
    connected: bool | None
    live_at: Timestamp | None
    progress_at: Timestamp | None
    verdict: Verdict
    failure: str | None
    state: Literal["completed", "failed", "stopped", "expired"] | None
    reason: str | None
    detail: str | None


class Run(msgspec.Struct, frozen=True):
    """A run as its record says.

    Attributes:
        state: `active`, `stalled` and `orphaned` alternate; `stopping` until its relay has ended it; then one of
            `completed`, `failed`, `stopped`, `expired`, for ever.
        owner: the relay that follows it now; null when none does, or when Redis does not answer.
    """

    run: str
    state: RunState
    reason: str | None
    owner: str | None
    created_at: Timestamp
    ended_at: Timestamp | None
    progress_types: list[str]
    terminal_types: list[str]
    stall_after_s: float
    max_duration_s: float
    sources: list[RunSource]

    @property
    def terminal(self) -> bool:
        """Whether the run has ended."""
        return self.state in RUN_TERMINAL_STATES


class Gap(msgspec.Struct, frozen=True):
    """Data of the frame `towline.gap`, and of an `EventsPage`: what is missing cannot be given any more.

    Attributes:
        run: whose events.
        after: id of the last event before the gap; null when none was seen.
        first_available: id of the first event after it; null when there is none.
    """

    run: str
    after: str | None
    first_available: str | None


class End(msgspec.Struct, frozen=True):
    """Data of the frame `towline.end`, and of an `EventsPage`: the run has ended and its last event was sent."""

    run: str
    state: str


class EventData(msgspec.Struct, frozen=True):
    """Data of an event's frame.

    Attributes:
        source: the source that sent it; empty when it is about the run.
        uid: the upstream's own id of the event; empty when it has none.
        ts: when the relay had it, milliseconds since the Unix epoch.
        data: the upstream's text, unchanged.
        run: whose event it is; only on a connection that carries several runs.
        mended: true where the text was no UTF-8, and what was wrong in it is U+FFFD now; else absent.
    """

    source: str
    uid: str
    ts: int
    type: str
    data: str
    run: str | UnsetType = UNSET
    mended: bool | UnsetType = UNSET


class StreamEvent(msgspec.Struct, frozen=True):
    """One event in an `EventsPage`: the members of `EventData`, and `id`, which is opaque: where to resume after it."""

    id: str
    source: str
    uid: str
    ts: int
    type: str
    data: str
    mended: bool | UnsetType = UNSET


class EventsPage(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/runs/{run}/events` with `Accept: application/json`: the stream in pages, oldest first.

    Attributes:
        last_event_id: pass it as `?last_event_id=` for what follows; null before the first event.
        gap: before the items something is missing; after it events may repeat, with their `uid`.
        end: the run has ended, and this page holds its last event or stands after it.
    """

    items: list[StreamEvent]
    last_event_id: str | None
    gap: Gap | UnsetType = UNSET
    end: End | UnsetType = UNSET


class StreamTokenCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/stream-tokens`: the runs and threads whose events a browser may read, and for how long.

    Attributes:
        runs: they need not exist yet.
        threads: of either there must be one.
    """

    runs: Annotated[list[Id], Meta(max_length=STREAM_RUNS_MAX)] = []
    threads: Annotated[list[Uuid], Meta(max_length=STREAM_THREADS_MAX)] = []
    ttl_s: Annotated[float, Meta(ge=1, le=STREAM_TOKEN_TTL_S_MAX)] = 600.0

    def __post_init__(self) -> None:
        """Raises: ValueError, when nothing is named."""
        if not self.runs and not self.threads:
            raise ValueError("a stream token needs `runs` or `threads`")


class StreamToken(msgspec.Struct, frozen=True):
    """A new stream token; good in `Authorization: Bearer` or `?access_token=`, for nothing but these streams."""

    token: str
    runs: list[str]
    threads: list[str]
    expires_at: Timestamp
