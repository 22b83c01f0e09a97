"""The gateway's own metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.process.metrics import DURATION_BUCKETS_S, jobs_total, turns_total

# Anything else a client invents is one series, not one each.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNROUTED = "unrouted"
# Why an event stream ended: its run did; the client left; it was too slow; this process leaves; the gateway failed.
SSE_CLOSES = ("ended", "gone", "slow", "drain", "failed")


class GatewayMetrics:
    """Requests at the door, and the jobs and turns that this gateway itself ended (by cancelling them in the queue)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs_total = jobs_total(registry)
        self.turns_total = turns_total(registry)
        self._requests = Counter(
            "towline_http_requests_total", "Requests answered.", ["route", "method", "code"], registry=registry
        )
        self._seconds = Histogram(
            "towline_http_request_seconds",
            "From the request's head to the answer; of a stream, to its head. Waiting for an outcome (`Prefer: wait`)"
            " is included.",
            ["route"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )

        self.waiters = Gauge(
            "towline_waiters", "Callers that wait for an outcome, a turn or a probe.", registry=registry
        )

        self.sse_clients = Gauge("towline_sse_clients", "Event streams that are open.", registry=registry)
        closed = Counter("towline_sse_closed_total", "Event streams that ended.", ["reason"], registry=registry)
        self.sse_closed = {reason: closed.labels(reason) for reason in SSE_CLOSES}
        self.sse_gaps = Counter(
            "towline_sse_gaps_total", "Gaps announced to readers of event streams.", registry=registry
        )

    def observe_request(self, *, route: str | None, method: str, code: int, seconds: float) -> None:
        """Count one answered request.

        Args:
            route: the route's template (`/v1/jobs/{job}`), never the path; None when no route matched.
        """
        route = route or UNROUTED
        self._requests.labels(route, method if method in METHODS else "other", str(code)).inc()
        self._seconds.labels(route).observe(seconds)
