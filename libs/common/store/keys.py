"""Every Redis key, stream and group, with its time to live or cap.

Nothing else builds a key; none is found by scanning.

Presence times derive from the heartbeat, a setting (`Timing`); what is fixed stands here.
"""

from dataclasses import dataclass

from common.ids import GatewayId, JobId, UserId, WorkerId

# ---- presence: asserted by the session's worker, newest epoch only; deleted on goodbye


def presence(user: UserId) -> str:
    """Hash: state, machine, worker, session, since, seen, busy. Lives three heartbeats after the last refresh."""
    return f"bridge:presence:{user}"


def epoch(user: UserId) -> str:
    """String: the newest epoch that asserted. Outlives presence, so that a zombie stays fenced."""
    return f"bridge:epoch:{user}"


def tools(user: UserId) -> str:
    """Hash: tool name -> `h` (hinted) or `u`: what the door must know; `` names none. Lives as long as presence."""
    return f"bridge:tools:{user}"


BORN = "bridge:born"  # string, no TTL: milliseconds of Redis's clock when this Redis was first used
EPOCH_TTL_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of presence, all from the one heartbeat (seconds)."""

    heartbeat_s: float

    @property
    def presence_ttl_ms(self) -> int:
        """A blip shorter than two heartbeats must not read as a disconnect."""
        return int(self.heartbeat_s * 3000)

    @property
    def sign_of_life_max_age_s(self) -> float:
        """A session is refreshed only while its machine was heard within two heartbeats."""
        return self.heartbeat_s * 2

    @property
    def reconnecting_ms(self) -> int:
        """After a lost socket the door counts the machine as online this long: one redial and some."""
        return int(self.heartbeat_s * 1500)

    @property
    def unknown_window_s(self) -> float:
        """While Redis or our connection to it is younger than this, absent presence is `unknown`, not `offline`."""
        return self.heartbeat_s * 2


# ---- jobs: written by gateways and sweepers, taken by the session's worker, removed by settle

GROUP = "bridge-workers"
QUEUE_ENTRIES_MAX = 500
QUEUE_BYTES_MAX = 8 * 1024 * 1024
# Longer than any deadline: outstanding entries never lapse, those of users who left for good do.
QUEUE_TTL_S = 2 * 24 * 3600


def jobs(user: UserId) -> str:
    """Stream of outstanding jobs, group `bridge-workers`; fields `job`, `body` (JSON of `store.jobs.Entry`)."""
    return f"bridge:jobs:{user}"


def jobs_index(user: UserId) -> str:
    """Hash: job -> `entry-id bytes`; field `bytes` is the sum."""
    return f"bridge:jobs_index:{user}"


def waiters(job: JobId) -> str:
    """Set of gateways whose callers wait for the job."""
    return f"bridge:waiters:{job}"


WAITERS_TTL_S = 600


def result(job: JobId) -> str:
    """String: the terminal record, for whoever comes soon. The truth is in Postgres."""
    return f"bridge:result:{job}"


RESULT_TTL_S = 300

# ---- between processes: one stream each, read by that process's one blocking XREAD

CONTROL_PREFIX = "bridge:control:"
REPLIES_PREFIX = "bridge:replies:"
STREAM_TTL_S = 60
STREAM_LEN_MAX = 10_000
# Larger outcomes are fetched from the record instead of being copied into every waiting gateway's stream.
REPLY_INLINE_BYTES_MAX = 16 * 1024


def control(worker: WorkerId) -> str:
    """Stream of notes to a worker: `work`, `probe`, `cancel`, `close`."""
    return CONTROL_PREFIX + worker


def replies(gateway: GatewayId) -> str:
    """Stream of what a gateway's waiters are told."""
    return REPLIES_PREFIX + gateway
