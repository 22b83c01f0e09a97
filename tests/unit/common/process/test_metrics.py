"""Metrics: the names that dashboards rely on, there from the start, without ids in their labels."""

import platform
from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.process.metrics import ProcessMetrics, new_registry
from gateway.metrics import GatewayMetrics
from worker.metrics import WorkerMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


def test_the_worker_shows_every_closed_series_at_zero(registry: CollectorRegistry) -> None:
    ProcessMetrics(registry, service="worker", revision="0a1b2c3")
    WorkerMetrics(registry)

    text = generate_latest(registry).decode()

    for series in (
        'towline_jobs_total{outcome="unknown"} 0.0',
        'towline_job_seconds_count{phase="queue"} 0.0',
        'towline_job_seconds_count{phase="reply"} 0.0',
        'towline_job_redeliveries_total{reason="claimed"} 0.0',
        "towline_bridge_sockets 0.0",
        "towline_bridge_unknown_frames_total 0.0",
        'towline_bridge_sessions_total{close="replaced"} 0.0',
        "towline_presence_refresh_seconds_count 0.0",
        'towline_queue_depth{queue="queued"} 0.0',
        'towline_queue_oldest_seconds{queue="queued"} 0.0',
        'towline_dependency_up{dependency="redis"} 0.0',
        "towline_loop_lag_seconds_count 0.0",
        "process_open_fds",
    ):
        assert f"\n{series}" in text
    assert "_created" not in text


def test_the_build_is_told_by_version_revision_and_python(registry: CollectorRegistry) -> None:
    ProcessMetrics(registry, service="worker", revision="0a1b2c3")

    (info,) = [sample for family in registry.collect() for sample in family.samples if "build_info" in sample.name]

    assert info.name == "towline_build_info"
    assert info.value == 1
    assert info.labels == {
        "service": "worker",
        "version": version("towline-services"),
        "revision": "0a1b2c3",
        "python": platform.python_version(),
    }


def test_requests_are_counted_by_template_method_and_code(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics(registry)
    metrics.observe_request(route="/v1/jobs/{job}", method="GET", code=200, seconds=0.003)
    metrics.observe_request(route=None, method="BREW", code=404, seconds=0.001)
    metrics.observe_request(route=None, method="BREW2", code=404, seconds=0.001)

    def count(**labels: str) -> float | None:
        return registry.get_sample_value("towline_http_requests_total", labels)

    assert count(route="/v1/jobs/{job}", method="GET", code="200") == 1
    assert count(route="unrouted", method="other", code="404") == 2
    bucket = {"route": "/v1/jobs/{job}", "le": "0.005"}
    assert registry.get_sample_value("towline_http_request_seconds_bucket", bucket) == 1


def test_two_services_can_live_in_one_process() -> None:
    """Tests and the demo do so: nothing hangs on the default registry."""
    for registry in (new_registry(), new_registry()):
        GatewayMetrics(registry)
        assert registry.get_sample_value("towline_jobs_total", {"outcome": "cancelled"}) == 0
