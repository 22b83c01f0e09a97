"""Every Redis key, stream and group, with its time to live or cap.

Nothing else builds a key; none is found by scanning.

Presence times derive from the heartbeat, a setting (`Timing`); what is fixed stands here.
"""

from dataclasses import dataclass

from common.ids import GatewayId, JobId, RunId, ThreadId, UserId, WorkerId

# ---- presence: asserted by the session's worker, newest epoch only; deleted on goodbye


def presence(user: UserId) -> str:
    """Hash: state, machine, worker, session, epoch, since, seen, busy, call (number of the last serve).

    Lives three heartbeats after the last refresh.
    """
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


def cancels(user: UserId) -> str:
    """Set of begun jobs that the machine is to be asked to stop; settle removes them. As long-lived as the stream."""
    return f"bridge:cancels:{user}"


def waiters(job: JobId) -> str:
    """Set of gateways whose callers wait for the job."""
    return f"bridge:waiters:{job}"


WAITERS_TTL_S = 600


def result(job: JobId) -> str:
    """String `1`: the job has ended, for whoever enqueues it late. Its outcome is in Postgres."""
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


# ---- runs: leased by relays, written by each run's owner, read by gateways

# How long a relay that died holds its runs. Two refreshes may be lost before a living one lets go of them.
LEASE_TTL_S = 3.0
LEASE_REFRESH_EVERY_S = 1.0

RELAYS = "relay:members"  # zset: relay -> milliseconds of Redis's clock when it last said that it lives
RELAYS_TTL_S = 60  # nobody has said so for long: no relay is there

EVENTS_MAX = 10_000
EVENTS_BYTES_MAX = 32 * 1024 * 1024
# What is there is known, and trimmed, in steps of this many bytes: the append script says how.
EVENTS_BYTES_STEP = EVENTS_BYTES_MAX // 16
# From the end of the run on. Before it each refresh of the lease puts it off, so that no loss of the end (an older
# replica took over, say) leaves a stream for ever.
EVENTS_TTL_S = 24 * 3600
LIVENESS_TTL_S = 300
PROGRESS_TTL_S = 3600


def owner(run: RunId) -> str:
    """String `relay:epoch`: who follows the run. Lives `LEASE_TTL_S` after its last refresh; deleted on release."""
    return f"stream_owner:{run}"


def events(run: RunId) -> str:
    """Stream: events (fields `type`, `data`, `source`, `uid`, `ts`) and markers (`marker`); ids are `epoch-seq`."""
    return f"events:{run}"


def events_resume(run: RunId) -> str:
    """Hash: source -> `count uid` of its last event; lives as the stream does. Names with a dot are our own.

    `.end`: the state in which the run ended; `.ended:{source}`: how that source ended; `.bytes`, `.steps`: for the
    bound in bytes.
    """
    return f"events_resume:{run}"


def liveness(run: RunId) -> str:
    """String `1`: lives `LIVENESS_TTL_S` after the last frame of any source."""
    return f"liveness_heartbeat:{run}"


def source_status(run: RunId) -> str:
    """String: what the owner says of its sources, heard of or not; lives `LIVENESS_TTL_S` after the last refresh."""
    return f"source_status:{run}"


def progress(run: RunId) -> str:
    """String: milliseconds of Redis's clock at the last real work; lives `PROGRESS_TTL_S` after it."""
    return f"forward_progress_heartbeat:{run}"


# ---- threads: appended to by the worker that runs a turn and by gateways, read by gateways

THREAD_EVENTS_TTL_S = 24 * 3600  # after the last event; entries and turns are in Postgres
# Whose last number is remembered: about as many turns as fit into the stream, a few writers each.
THREAD_WRITERS_MAX = 512


def thread_events(thread: ThreadId) -> str:
    """Stream: events and markers as of a run; ids are `epoch-seq`, made by the append script."""
    return f"thread_events:{thread}"


def thread_state(thread: ThreadId) -> str:
    """Hash: writer -> number of its last event, and `.fence`, `.bytes`, `.steps`; lives as the stream does."""
    return f"thread_state:{thread}"


def thread_writers(thread: ThreadId) -> str:
    """Zset: writer -> seq of its last event: which ones to forget first; lives as the stream does."""
    return f"thread_writers:{thread}"
