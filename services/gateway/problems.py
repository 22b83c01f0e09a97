"""Refusals: every way in which the gateway says no, as RFC 9457 problems.

Owns:     the closed list of problem types, those of other services included (`common.problems`); each is documented at
          `GET /problems/{slug}` from the same entry.
Promises: a problem says which field is wrong and why, and never quotes credentials or header values.
Used by:  every handler raises `Refusal`; `http` turns it, and every other error, into a response.
"""

import random

from common import problems as shared
from common.problems import ProblemType


class Refusal(Exception):
    """Ends a request with a problem.

    Attributes:
        detail: which field and why; shown to the caller.
        place: path of the wrong member in the body, or empty.
        headers: what goes out beside the problem.
    """

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        place: str = "",
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.place = place
        self.headers = headers
        if retry_after_s is not None:
            self.headers = (*headers, (b"retry-after", b"%d" % retry_after_s))

    def body(self) -> bytes:
        """The problem as JSON."""
        return self.kind.body(self.detail, place=self.place)


INVALID_REQUEST = ProblemType(
    "invalid-request",
    400,
    "The request is not valid",
    "A header, a path or query parameter, or the body breaks a rule of the API. Nothing was recorded.",
    "Mend what `detail` names (`place` is its path in the body) and send the request again; the key is still unused.",
)
INVALID_KEY = ProblemType(
    "invalid-idempotency-key",
    400,
    "The Idempotency-Key header is not valid",
    "Every request that starts work needs exactly one Idempotency-Key of 1 to 255 visible ASCII characters or spaces,"
    " bare or as a quoted string. Nothing was recorded.",
    "Send one key per piece of work, and the same key when you repeat a request.",
)
UNAUTHENTICATED = ProblemType(
    "unauthenticated",
    401,
    "No valid credential was given",
    "The Authorization header is missing, is not `Bearer` with an API key, or the key is unknown or revoked; or a"
    " stream token is not valid or has expired.",
    "Send `Authorization: Bearer tlk_...`, or to a stream a token of `POST /v1/stream-tokens`. A key that was just"
    " revoked may still work for up to 10 seconds.",
)
INSUFFICIENT_SCOPE = ProblemType(
    "insufficient-scope",
    403,
    "The credential does not cover this",
    "The API key is good but lacks the scope that `detail` names.",
    "Use a key with that scope.",
)
NOT_FOUND = shared.NOT_FOUND
METHOD_NOT_ALLOWED = ProblemType(
    "method-not-allowed",
    405,
    "The method does not apply here",
    "The path exists; the header Allow lists its methods.",
    "Use one of them.",
)
BODY_TIMEOUT = ProblemType(
    "body-timeout",
    408,
    "The body did not arrive in time",
    "The request's body was not complete within 30 seconds. Nothing was recorded.",
    "Send it again over a better connection.",
)
MACHINE_OFFLINE = ProblemType(
    "machine-offline",
    409,
    "The user's machine is not connected",
    "No sidecar of the user is connected, and the request said `if_offline: fail`. Nothing was recorded.",
    "Try again when presence says `online`, or send `if_offline: queue` with a longer `deadline_s`.",
)
RUN_DIFFERS = ProblemType(
    "run-differs",
    409,
    "The run is being followed otherwise",
    "A run of this id exists, with other sources, types or times than those in the body. Nothing was changed.",
    "Use another id, or send the body that the run was begun with (`headers` may differ: the newest ones count).",
)
RUN_ENDED = ProblemType(
    "run-ended",
    409,
    "The run has ended",
    "A run of this id was followed and has ended; an id is not used twice.",
    "Use a new id.",
)
THREAD_BUSY = ProblemType(
    "thread-busy",
    409,
    "A turn of the thread is open",
    "The thread has a turn that has not ended, and the request said `on_busy: reject`. Nothing was recorded.",
    "Wait for that turn (`detail` names it), or send `on_busy: queue` or `interrupt`.",
)
BODY_TOO_LARGE = ProblemType(
    "body-too-large",
    413,
    "The body is too large",
    "The body, or the arguments in it, are larger than this installation takes. Nothing was recorded.",
    "Pass a reference to large data instead of the data.",
)
UNSUPPORTED_MEDIA_TYPE = ProblemType(
    "unsupported-media-type",
    415,
    "The body is not JSON by its own account",
    "Bodies are UTF-8 JSON without content coding, declared as `Content-Type: application/json`.",
    "Set the header.",
)
UNKNOWN_AGENT = ProblemType(
    "unknown-agent",
    422,
    "There is no such agent",
    "No agent of this name is defined, or the thread's agent was deleted. Nothing was recorded.",
    "Define the agent (`PUT /v1/agents/{agent}`), or begin a thread of another one.",
)
UNKNOWN_TOOL = ProblemType(
    "unknown-tool",
    422,
    "The user's machine has no such tool",
    "The machine is connected, and the catalogue that it announced does not list this name. Nothing was recorded.",
    "Choose from `GET /v1/users/{user}/tools`.",
)
EGRESS_REFUSED = ProblemType(
    "egress-refused",
    422,
    "The URL may not be called",
    "The URL of a source or agent is not one that this installation may call (`TOWLINE_EGRESS_ALLOW`). Nothing was"
    " recorded.",
    "Use an address that is allowed, or ask the operator to allow this one.",
)
KEY_REUSED = ProblemType(
    "idempotency-key-reused",
    422,
    "The key was used for other work",
    "A request with this key was accepted before, with other contents (`name` or `args` of a job, `text` of an entry),"
    " and this installation is strict about it. Nothing new was recorded.",
    "Use a fresh key for new work.",
)
QUEUE_FULL = ProblemType(
    "queue-full",
    429,
    "The user's queue is full",
    "As many jobs, or bytes of them, as a user may have are waiting for the machine. Nothing was recorded.",
    "Wait for `Retry-After` seconds, or cancel what is not needed any more.",
)
INTERNAL_ERROR = ProblemType(
    "internal-error",
    500,
    "The gateway failed",
    "A fault of the gateway; it is in its log under the request's X-Request-Id. The request may have been recorded.",
    "Repeat it with the same key: it is never run twice.",
)
NOT_CONFIGURED = ProblemType(
    "not-configured",
    501,
    "This installation is not set up for it",
    "A setting that this needs is not set: `TOWLINE_TOKEN_KEYS` for stream tokens, `TOWLINE_SECRET_KEYS` for what is"
    " sent upstream in secret. Nothing was recorded.",
    "Ask the operator to set it.",
)
PRESENCE_UNKNOWN = ProblemType(
    "presence-unknown",
    503,
    "It is not known whether the machine is connected",
    "Redis began anew, or the gateway has just lost and found it, and machines are still reporting in. Nothing was"
    " recorded.",
    "Try again after `Retry-After` seconds, or send `if_offline: queue`.",
)
STORE_UNAVAILABLE = shared.STORE_UNAVAILABLE
TOO_MANY_WAITERS = ProblemType(
    "too-many-waiters",
    503,
    "Too many callers wait already",
    "This replica waits for as many outcomes as it may (`Prefer: wait`). Nothing was recorded.",
    "Try again after `Retry-After` seconds, or submit without `Prefer: wait` and read the job later.",
)

KINDS: dict[str, ProblemType] = {
    kind.slug: kind for kind in (*vars(shared).values(), *globals().values()) if isinstance(kind, ProblemType)
}


def not_found(what: str) -> Refusal:
    """What does not exist and what is out of reach are one answer."""
    return Refusal(NOT_FOUND, f"there is no such {what}, or it lies outside this credential's reach")


def store_unavailable() -> Refusal:
    """The answer while a store is away; callers are told different times, so that they do not come back as one."""
    return Refusal(
        STORE_UNAVAILABLE, "a store does not answer now; repeat the request with the same key", retry_after_s=soon()
    )


def soon() -> int:
    """Seconds for `Retry-After` where nothing better is known: one to three, so that a crowd spreads."""
    return random.randint(1, 3)  # noqa: S311 (spreads load, guards nothing)


def page(kind: ProblemType) -> str:
    """The text at `/problems/{slug}`."""
    return f"{kind.title} ({kind.status} {kind.slug})\n\n{kind.meaning}\n\nWhat to do: {kind.advice}\n"
