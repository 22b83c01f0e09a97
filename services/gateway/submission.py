"""A job's submission: what was asked for, and whether it may come in. Reads the request, decides in values."""

import math
from dataclasses import dataclass, replace

import msgspec

from common.ids import JobId, UserId, new_id
from common.store import keys
from common.store.jobs import Seen
from common.store.records import NewJob, fingerprint, scope_of_user
from gateway import problems
from gateway.problems import Refusal
from gateway.request import Request
from towline.wire import ids, json
from towline.wire.api import WAIT_S_MAX, JobSubmit, PresenceState
from towline.wire.frames import ARGS_BYTES_MAX

# A queue drains at the pace of a person's machine: coming back sooner finds it as full.
QUEUE_FULL_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller asked for.

    Attributes:
        body: without its `args`: parsed, they take ten times the room of their text.
        args: canonical JSON; what the machine is given. Empty once the job has its record.
        wait_s: how long to wait for the outcome; None when the caller named no preference.
        traceparent: as given, or empty.
    """

    user: UserId
    key: str
    body: JobSubmit
    args: bytes
    fingerprint: bytes
    wait_s: int | None
    traceparent: str

    @property
    def scope(self) -> str:
        """Where the key is unique."""
        return scope_of_user(self.user)

    @property
    def queues(self) -> bool:
        """Whether the job is to be kept for a machine that is not connected."""
        return self.body.if_offline == "queue"

    def without_args(self) -> "Submission":
        """What is left to hold while its caller waits."""
        return replace(self, args=b"")

    def new_job(self, *, hinted: bool) -> NewJob:
        """The record to be accepted."""
        return NewJob(
            job=JobId(new_id()),
            user=self.user,
            scope=self.scope,
            key=self.key,
            name=self.body.name,
            args=self.args.decode(),
            fingerprint=self.fingerprint,
            timeout_s=self.body.timeout_s,
            deadline_s=self.body.deadline_s,
            hinted=hinted,
            on_machine_change=self.body.on_machine_change,
            traceparent=self.traceparent,
        )


async def read_submission(request: Request, user: UserId) -> Submission:
    """Read headers and body. Raises: Refusal, naming what is wrong."""
    key = idempotency_key(request)
    wait_s = preferred_wait_s(request)
    body = await request.read(JobSubmit)
    args = json.canonical(body.args)
    if len(args) > ARGS_BYTES_MAX:
        raise Refusal(
            problems.BODY_TOO_LARGE,
            f"`args` has {len(args)} bytes, at most {ARGS_BYTES_MAX} are allowed",
            place="$.args",
        )
    return Submission(
        user=user,
        key=key,
        body=msgspec.structs.replace(body, args={}),
        args=args,
        fingerprint=fingerprint(body.name, args),
        wait_s=wait_s,
        traceparent=traceparent(request),
    )


def idempotency_key(request: Request) -> str:
    """The header that names a piece of work. Raises: Refusal, if it is missing or none."""
    try:
        return ids.parse_idempotency_key(request.values(b"idempotency-key"))
    except ValueError as error:
        raise Refusal(problems.INVALID_KEY, str(error)) from None


def traceparent(request: Request) -> str:
    """The header as given, or empty: a broken one is dropped, as W3C says, for tracing never fails a request."""
    given = request.values(b"traceparent")
    return given[0] if len(given) == 1 and ids.is_traceparent(given[0]) else ""


def preferred_wait_s(request: Request) -> int | None:
    """`Prefer: wait=N`, cut to what is permitted (`Preference-Applied` says so); None without it. Raises: Refusal."""
    for value in request.values(b"prefer"):
        for preference in value.split(","):
            name, _, given = preference.partition(";")[0].partition("=")
            if name.strip().lower() != "wait":
                continue
            seconds = given.strip().strip('"')
            if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
                raise Refusal(problems.INVALID_REQUEST, "the header Prefer: `wait` is not a whole number of seconds")
            return min(int(seconds), WAIT_S_MAX)
    return None


def refusal_of(
    asked: Submission,
    seen: Seen,
    state: PresenceState,
    *,
    knows_tool: bool,
    is_full: bool,
    answering_for_s: float,
    timing: keys.Timing,
) -> Refusal | None:
    """The door's questions, in their order: machine, tool, room, place to wait. None: come in.

    Args:
        knows_tool: whether the connected machine announced the tool.
        is_full: no further caller of this process may wait.
        answering_for_s: for how long Redis has answered this process without a break.
    """
    if state == "offline" and not asked.queues:
        return Refusal(problems.MACHINE_OFFLINE, "no machine of this user is connected")
    if state == "unknown" and not asked.queues:
        window_s = timing.unknown_window_s - min(seen.age_ms / 1000, answering_for_s)
        return Refusal(
            problems.PRESENCE_UNKNOWN,
            "it is not known whether a machine of this user is connected",
            retry_after_s=max(1, math.ceil(window_s)),
        )
    if state in ("online", "reconnecting") and not knows_tool:
        return Refusal(problems.UNKNOWN_TOOL, "`name`: the user's machine has no tool of this name", place="$.name")
    if not seen.has_room:
        return Refusal(
            problems.QUEUE_FULL,
            f"{seen.entries} jobs ({seen.bytes} bytes) wait for this user's machine",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )
    if asked.wait_s and is_full:
        return Refusal(problems.TOO_MANY_WAITERS, "this replica has no place to wait", retry_after_s=problems.soon())
    return None
