"""The worker's own metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.process.metrics import DURATION_BUCKETS_S, children, jobs_total, turns_total
from towline.wire.frames import Close

# queue: accepted -> taken from the stream; deliver: taken -> frame sent; execute: frame sent -> result received;
# reply: result received -> durable and its waiters told.
PHASES = ("queue", "deliver", "execute", "reply")

# claimed: a newer session took over what an older one held; requeued: put back by the sweeper, Redis had lost it.
REDELIVERIES = ("claimed", "requeued")

# Why a session ended: with which code we closed it, or how else; `lost` is a socket that went without a word.
CLOSE_OF_CODE = {
    Close.NO_PONG: "no_pong",
    Close.TOO_SLOW: "too_slow",
    Close.BAD_FRAME: "bad_frame",
    Close.OTHER_MACHINE: "other_machine",
    Close.REPLACED: "replaced",
    Close.TOKEN_REFUSED: "token_refused",
    Close.RESTARTING: "draining",
}
CLOSES = ("goodbye", "lost", *CLOSE_OF_CODE.values(), "error")

# queued, processing: open jobs of the whole installation as the sweeper of this worker saw them last (take the maximum
# over the workers, not the sum); turns_queued, turns_running: open turns, by the net in the same way; outcomes: held by
# this worker until Postgres has them.
QUEUES = ("queued", "processing", "turns_queued", "turns_running", "outcomes")


class WorkerMetrics:
    """Sockets, deliveries, outcomes and turns."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs_total = jobs_total(registry)
        self.job_seconds = children(
            Histogram(
                "towline_job_seconds",
                "How long a job spent in each phase.",
                ["phase"],
                buckets=DURATION_BUCKETS_S,
                registry=registry,
            ),
            PHASES,
        )
        self.redeliveries_total = children(
            Counter("towline_job_redeliveries_total", "Jobs handed over again.", ["reason"], registry=registry),
            REDELIVERIES,
        )
        self.sockets = Gauge("towline_bridge_sockets", "Machines connected to this worker.", registry=registry)
        self.sessions_total = children(
            Counter("towline_bridge_sessions_total", "Sessions that ended.", ["close"], registry=registry), CLOSES
        )
        self.unknown_frames_total = Counter(
            "towline_bridge_unknown_frames_total",
            "Frames of a type that this worker does not know; they are ignored.",
            registry=registry,
        )
        self.presence_refresh_seconds = Histogram(
            "towline_presence_refresh_seconds",
            "One pipeline that refreshes the presence of this worker's machines, up to 200 of them.",
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.queue_depth = children(
            Gauge("towline_queue_depth", "Items in a queue.", ["queue"], registry=registry), QUEUES
        )
        self.queue_oldest_seconds = children(
            Gauge("towline_queue_oldest_seconds", "Age of a queue's oldest item.", ["queue"], registry=registry), QUEUES
        )
        self.turns_total = turns_total(registry)
        self.turn_seconds = Histogram(
            "towline_turn_seconds",
            "From a turn's entry to its end.",
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
