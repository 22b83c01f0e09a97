"""The relay's own metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.process.metrics import DURATION_BUCKETS_S, children

# first: nobody has followed the run before; moved: another relay has; behind: Redis lost what this one had appended.
TAKEOVERS = ("first", "moved", "behind")
# no_answer: no connection, or nothing on it; refused: 5xx, 408, 425, 429; closed: an open stream ended.
RETRIES = ("no_answer", "refused", "closed")
ENDS = ("completed", "failed", "stopped", "expired")


class RelayMetrics:
    """Runs, their events and their upstreams."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.runs_owned = Gauge("towline_relay_runs_owned", "Runs that this relay follows.", registry=registry)
        self.takeovers_total = children(
            Counter("towline_relay_takeovers_total", "Runs that this relay took.", ["reason"], registry=registry),
            TAKEOVERS,
        )
        self.fenced_total = Counter(
            "towline_relay_fenced_total", "Runs given up because another relay had taken them.", registry=registry
        )
        self.events_total = Counter(
            "towline_relay_events_total", "Events that this relay appended to logs.", registry=registry
        )
        self.gathered_events = Gauge(
            "towline_relay_gathered_events",
            "Events that were read and are not in the log yet; as Redis slows down, upstreams are held back.",
            registry=registry,
        )
        self.repeated_total = Counter(
            "towline_relay_repeated_events_total",
            "Events that an upstream sent again and that were left out, or held back until it is known.",
            registry=registry,
        )
        self.mended_total = Counter(
            "towline_relay_mended_events_total", "Events whose broken UTF-8 was replaced.", registry=registry
        )
        self.too_large_total = Counter(
            "towline_relay_too_large_events_total",
            "Events over the limit, replaced by one that says so.",
            registry=registry,
        )
        self.lag_seconds = Histogram(
            "towline_relay_lag_seconds",
            "From reading the oldest event of an append to its being in the log.",
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.retries_total = children(
            Counter(
                "towline_relay_upstream_retries_total",
                "Connections to upstreams that ended and are tried again.",
                ["reason"],
                registry=registry,
            ),
            RETRIES,
        )
        self.runs_ended_total = children(
            Counter("towline_runs_ended_total", "Runs that this relay ended.", ["state"], registry=registry), ENDS
        )
        self.runs_stalled = Gauge(
            "towline_runs_stalled", "Runs of this relay without progress, stalled or orphaned.", registry=registry
        )
