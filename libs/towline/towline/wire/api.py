"""HTTP bodies of the gateway's API, shared by the gateway, its OpenAPI description and the client.

Requests (`JobSubmit`, `MachineTokenCreate`, `ApiKeyCreate`) refuse members they do not know; answers ignore them on the
client's side, so that a newer gateway can talk to an older client. Times are RFC 3339 UTC with milliseconds; durations
carry their unit in the name. In answers a member marked `UnsetType` may be absent, every other one is always there.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towline.wire.frames import Failure, Tool
from towline.wire.ids import ID_PATTERN, TOOL_NAME_CHARACTERS_MAX

TIMEOUT_S_MAX = 600
# The journal on the machine keeps an outcome for this long and a day (protocol rule 8): it cannot be longer.
DEADLINE_S_MAX = 86_400
WAIT_S_MAX = 300
PAGE_ITEMS_DEFAULT = 50
PAGE_ITEMS_MAX = 200
USERS_MAX = 1000

JobState = Literal["queued", "processing", "completed", "failed", "unknown", "expired", "cancelled"]
JOB_STATES: tuple[JobState, ...] = get_args(JobState)
TERMINAL_STATES: frozenset[str] = frozenset({"completed", "failed", "unknown", "expired", "cancelled"})
PresenceState = Literal["online", "reconnecting", "offline", "unknown"]
Scope = Literal["jobs", "runs", "threads", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

Timestamp = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Id = Annotated[str, Meta(pattern=rf"^{ID_PATTERN}$(?!\n)")]
# `Outcome`, with its two alternatives. The gateway passes its stored bytes through unread: a replay is the same bytes.
OutcomeJson = Annotated[
    msgspec.Raw,
    Meta(
        extra_json_schema={
            "type": "object",
            "description": "`{result}` if completed, else `{error: {code, message, retryable}}`.",
            "properties": {
                "result": {},
                "error": {
                    "type": "object",
                    "required": ["code", "message", "retryable"],
                    "properties": {
                        "code": {"type": "string"},
                        "message": {"type": "string"},
                        "retryable": {"type": "boolean"},
                    },
                },
                "mended": {
                    "type": "boolean",
                    "description": "True where text in it could not be carried, and is U+FFFD now; else absent.",
                },
            },
        }
    ),
]

Item = TypeVar("Item")


class JobSubmit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/users/{user}/jobs`.

    Attributes:
        timeout_s: counts from the tool's start on the machine.
        deadline_s: counts from acceptance; then the job ends, whatever has become of it.
        if_offline: what to do while the machine is not connected: refuse, or keep the job for it.
        on_machine_change: what becomes of a job begun on a machine that another one has replaced: it ends as
            `unknown`, or waits for its own machine.
    """

    name: Annotated[str, Meta(min_length=1, max_length=TOOL_NAME_CHARACTERS_MAX)]
    args: dict[str, Any] = {}
    timeout_s: Annotated[float, Meta(gt=0, le=TIMEOUT_S_MAX)] = 120.0
    deadline_s: Annotated[float, Meta(gt=0, le=DEADLINE_S_MAX)] = 300.0
    if_offline: Literal["fail", "queue"] = "fail"
    on_machine_change: Literal["unknown", "wait"] = "unknown"


class Job(msgspec.Struct, frozen=True):
    """A job as its record says.

    Attributes:
        attempts: how often its delivery was recorded as begun, at least 1 once a machine has answered. Not how often
            its tool ran: what is delivered again finds the action still running, or its outcome, and a hinted tool's
            first delivery needs no record.
        outcome: JSON of `Outcome`, once the state is terminal; the same bytes in every answer about this job.
        replayed: this answers a submission whose key had been accepted before.
        payload_matches: false when such a submission asked for other work (another `name` or `args`); else absent.
        machine: `offline` when a wait ended because the machine's presence lapsed; else absent.
    """

    job: str
    user: str
    name: str
    state: JobState
    attempts: int
    accepted_at: Timestamp
    deadline_at: Timestamp
    replayed: bool
    ended_at: Timestamp | UnsetType = UNSET
    outcome: OutcomeJson | UnsetType = UNSET
    payload_matches: bool | UnsetType = UNSET
    machine: Literal["offline"] | UnsetType = UNSET

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL_STATES


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended; decode it from `Job.outcome`. A `result` may be null, which is not the same as none.

    Attributes:
        mended: true where text in it could not be carried, and is U+FFFD now; else absent.
    """

    result: Any = UNSET
    error: Failure | UnsetType = UNSET
    mended: bool | UnsetType = UNSET


class Page(msgspec.Struct, Generic[Item], frozen=True):
    """One page of a list: newest first, but entries oldest first, agents by name; `next_cursor` is null on the last."""

    items: list[Item]
    next_cursor: str | None


class Presence(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/users/{user}/presence`; what is not known is null.

    Attributes:
        worker: the process that holds the machine's socket.
        last_seen_at: the machine's last sign of life, at the latest refresh of presence.
        busy: a job is running on the machine.
        queued: jobs that are accepted and not ended; null when Redis does not answer.
        probed: with `?probe=true`: whether the machine answered a round trip just now.
        rtt_ms: how long that took, from this gateway to the machine and back; null if it did not answer.
    """

    state: PresenceState
    since: Timestamp | None
    machine: str | None
    worker: str | None
    last_seen_at: Timestamp | None
    busy: bool | None
    queued: int | None
    probed: bool | UnsetType = UNSET
    rtt_ms: float | UnsetType | None = UNSET


class Catalogue(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/users/{user}/tools`: what the user's machine that connected last announced.

    `machine` is null when none ever connected; `announced_at` says when it did.
    """

    machine: str | None
    name: str | None
    version: str | None
    announced_at: Timestamp | None
    tools: list[Tool]


class MachineTokenCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/users/{user}/machine-tokens`. `ttl_s`: null means until it is revoked."""

    name: Annotated[str, Meta(max_length=200)] = ""
    ttl_s: Annotated[float, Meta(ge=1, le=10 * 365 * 86_400)] | None = None


class MachineToken(msgspec.Struct, frozen=True):
    """A sidecar's credential, without its value."""

    token_id: str
    user: str
    name: str
    created_at: Timestamp
    expires_at: Timestamp | None
    revoked_at: Timestamp | None


class MintedMachineToken(MachineToken, frozen=True, kw_only=True):
    """A new machine token with its value, which is shown this once."""

    token: str


class ApiKeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/api-keys`. `users`: whom the key may act for; null means everyone."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=4)]
    users: Annotated[list[Id], Meta(min_length=1, max_length=USERS_MAX)] | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """A product's credential, without its value."""

    key_id: str
    name: str
    scopes: list[Scope]
    users: list[str] | None
    created_at: Timestamp
    revoked_at: Timestamp | None


class MintedApiKey(ApiKey, frozen=True, kw_only=True):
    """A new API key with its value, which is shown this once."""

    api_key: str


class Problem(msgspec.Struct, frozen=True):
    """Why a request was refused (RFC 9457, `application/problem+json`).

    Attributes:
        type: `/problems/{slug}`; what it means and what to do stands at that address.
        detail: which field and why.
        place: the path of the wrong member in the body, such as `$.args.rows[3]`.
    """

    type: str
    title: str
    status: int
    detail: str
    place: str | UnsetType = UNSET

    @property
    def slug(self) -> str:
        """The last part of `type`: what programs compare."""
        return self.type.rpartition("/")[2]


def timestamp(ms: int) -> str:
    """RFC 3339 UTC with milliseconds, from milliseconds since the Unix epoch."""
    seconds, rest = divmod(ms, 1000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=64)
def _to_the_second(seconds: int) -> str:
    # Times of one moment share it, and nearly all that is written is of this moment or a default deadline later.
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]
