"""Presence: the fact "this user's machine is connected, by this session of this worker".

Owns:     `bridge:presence`, `bridge:epoch`, `bridge:tools`, `bridge:born`.
Promises: only the newest epoch writes; a machine's first assert never evicts another live machine; an assert claims and
          takes in the same script, so nothing that an older session held waits.
Used by:  the worker's pump (serve) and sockets (leave); the gateway reads through `jobs.ask`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from common.ids import JobId, MachineId, SessionId, UserId, WorkerId
from common.store import keys
from common.store.jobs import CALL_NUMBERS, Seen, Taken, parse_served
from common.store.redis import Call, Redis, script
from towline.wire.api import PresenceState


class Assertion(NamedTuple):
    """What a session says of itself at each heartbeat. Times in milliseconds of the worker's wall clock."""

    user: UserId
    machine: MachineId
    worker: WorkerId
    session: SessionId
    epoch: int
    first: bool
    since_ms: int
    seen_ms: int
    busy: bool
    free: int
    in_flight: Sequence[JobId]
    tools: dict[str, bool] | None  # name -> hinted; None: unchanged
    unreadable: Sequence[str] = ()  # entries that an earlier answer brought in vain; they are removed


@dataclass(frozen=True, slots=True)
class Served:
    """The answer to an assertion.

    Attributes:
        status: `ok`; `outranked`: a newer session of the user has asserted; `other`: another machine is connected.
        machine: whom the live presence names, when the status is not `ok`.
        tools_missing: the catalogue is to be sent with the next assertion.
        born: when this Redis was first used; a change means that everything in it was lost.
        left: claimed entries for which there was no free place.
        taken: entries that the session holds from now on, in stream order.
        unreadable: ids of entries that say no job; the next assertion is to name them.
        cancels: jobs that the machine is to be asked to stop, if it has them.
    """

    status: Literal["ok", "outranked", "other"]
    machine: str = ""
    tools_missing: bool = False
    born: str = ""
    left: int = 0
    taken: Sequence[Taken] = ()
    unreadable: Sequence[str] = ()
    cancels: Sequence[JobId] = ()


def serve_call(assertion: Assertion, timing: keys.Timing) -> Call:
    """Assert, claim and take for one session in one script; see `parse_serve`. Many go out in one pipeline."""
    a = assertion
    tools: list[str] = []
    if a.tools is not None:
        # One member that names no tool: a hash without members is no key, and would be asked for without end.
        tools += ["", ""]
        for name, hinted in a.tools.items():
            tools += [name, "h" if hinted else "u"]
    return Call(
        script("serve"),
        [
            keys.presence(a.user),
            keys.epoch(a.user),
            keys.tools(a.user),
            keys.BORN,
            keys.jobs(a.user),
            keys.jobs_index(a.user),
            keys.cancels(a.user),
        ],
        [
            a.epoch,
            int(a.first),
            a.machine,
            a.worker,
            a.session,
            a.since_ms,
            a.seen_ms,
            int(a.busy),
            timing.presence_ttl_ms,
            keys.EPOCH_TTL_S,
            keys.GROUP,
            a.free,
            " ".join(a.in_flight),
            next(CALL_NUMBERS),
            " ".join(a.unreadable),
            *tools,
        ],
    )


def parse_serve(answer: Any) -> Served:
    """Read the answer to `serve_call`."""
    if answer[0] != b"ok":
        return Served("outranked" if answer[0] == b"outranked" else "other", machine=answer[1].decode())
    _, tools_missing, born, left, flat, cancels = answer
    taken, unreadable = parse_served(flat)
    return Served(
        "ok",
        tools_missing=bool(tools_missing),
        born=born.decode(),
        left=left,
        taken=taken,
        unreadable=unreadable,
        cancels=[JobId(job.decode()) for job in cancels],
    )


async def leave(redis: Redis, user: UserId, epoch: int, *, grace_ms: int | None) -> None:
    """End a session: at once (`grace_ms` None, the machine said goodbye) or as reconnecting for a while.

    Does nothing when a newer session has asserted. Raises: StoreUnavailable.
    """
    await redis.run(
        script("leave"),
        [keys.presence(user), keys.epoch(user), keys.tools(user), keys.jobs(user), keys.jobs_index(user)],
        [epoch, "goodbye" if grace_ms is None else grace_ms],
    )


def state_of(seen: Seen, answering_for_s: float, timing: keys.Timing) -> PresenceState:
    """What may be said of a machine: `offline` only when Redis, and our link to it, are old enough to know."""
    if seen.presence:
        return "reconnecting" if seen.presence.get("state") == "reconnecting" else "online"
    if min(seen.age_ms / 1000, answering_for_s) < timing.unknown_window_s:
        return "unknown"
    return "offline"
