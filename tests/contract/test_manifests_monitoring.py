"""Alerts ask for metrics and labels that exist, and each fires for what it is about and for nothing else."""

import functools
import re
from pathlib import Path

import pytest
import yaml
from manifests import KUSTOMIZE, SERVICES, get, kind_objects, parse, pod_of, pods
from prometheus_client import CollectorRegistry
from prometheus_server import promtool

from common.process.metrics import ProcessMetrics
from gateway.metrics import GatewayMetrics
from relay.metrics import RelayMetrics
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings

MONITORING = KUSTOMIZE / "components" / "monitoring"
(RULE,) = parse((MONITORING / "prometheusrule.yaml").read_text())
(MONITOR,) = parse((MONITORING / "podmonitor.yaml").read_text())
ALERTS = {alert["alert"]: alert for group in RULE["spec"]["groups"] for alert in group["rules"]}
HEALTHY = {
    'towline_build_info{service="gateway", instance="g"}': "1x120",
    'towline_build_info{service="worker", instance="w"}': "1x120",
    'towline_build_info{service="relay", instance="r"}': "1x120",
    'towline_dependency_up{dependency="redis", instance="g"}': "1x120",
    'towline_dependency_up{dependency="redis", instance="w"}': "1x120",
    'towline_dependency_up{dependency="postgres", instance="g"}': "1x120",
    'towline_http_requests_total{code="200", instance="g"}': "0+100x120",
    'towline_http_requests_total{code="503", instance="g"}': "0+1x120",
    'towline_queue_depth{queue="outcomes", instance="w"}': "0 80 0 90 0+0x116",
    'towline_queue_oldest_seconds{queue="turns_queued", instance="w"}': "1x120",
    'towline_queue_oldest_seconds{queue="queued", instance="w"}': "80000x120",
    'towline_jobs_total{outcome="completed", instance="w"}': "0+100x120",
    'towline_jobs_total{outcome="unknown", instance="w"}': "0+1x120",
    'towline_bridge_sockets{instance="w"}': "3000x120",
    'towline_runs_stalled{instance="r"}': "0x120",
    'towline_loop_lag_seconds_bucket{instance="g", le="0.005"}': "0+240x120",
    'towline_loop_lag_seconds_bucket{instance="g", le="1"}': "0+240x120",
    'towline_loop_lag_seconds_bucket{instance="g", le="+Inf"}': "0+240x120",
}
# By alert: which of the healthy series are different, or gone (None).
UNHEALTHY: dict[str, dict[str, str | None]] = {
    "TowlineServiceMissing": {'towline_build_info{service="relay", instance="r"}': None},
    "TowlineDependencyDown": {
        'towline_dependency_up{dependency="redis", instance="g"}': "0x120",
        'towline_dependency_up{dependency="redis", instance="w"}': "0x120",
    },
    "TowlineDependencyUnreachable": {'towline_dependency_up{dependency="redis", instance="w"}': "0x120"},
    "TowlineErrorsAtTheDoor": {'towline_http_requests_total{code="503", instance="g"}': "0+10x120"},
    "TowlineOutcomesWait": {'towline_queue_depth{queue="outcomes", instance="w"}': "60x120"},
    "TowlineTurnsWait": {'towline_queue_oldest_seconds{queue="turns_queued", instance="w"}': "90x120"},
    "TowlineOutcomesUnknown": {'towline_jobs_total{outcome="unknown", instance="w"}': "0+10x120"},
    "TowlineSocketsNearLimit": {'towline_bridge_sockets{instance="w"}': "4100x120"},
    "TowlineRunsStalled": {'towline_runs_stalled{instance="r"}': "2x120"},
    "TowlineLoopLate": {'towline_loop_lag_seconds_bucket{instance="g", le="0.005"}': "0+200x120"},
}


@functools.cache
def _families() -> dict[str, list[dict[str, str]]]:
    """What the services export: the labels of each series, by the series' name; a family without series, too."""
    found: dict[str, list[dict[str, str]]] = {}
    for service, make in (("gateway", GatewayMetrics), ("worker", WorkerMetrics), ("relay", RelayMetrics)):
        registry = CollectorRegistry()
        ProcessMetrics(registry, service=service, revision="unknown")
        make(registry)
        for family in registry.collect():
            found.setdefault(family.name + "_total" * (family.type == "counter"), [])
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def _uses(expression: str) -> list[tuple[str, dict[str, str]]]:
    """The metrics that an expression asks for, and what it wants of their labels."""
    found = re.findall(r"(towline_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels))) for name, labels in found]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_what_there_is(name: str) -> None:
    """A metric or a value that nobody exports is an alert that never fires."""
    uses = _uses(ALERTS[name]["expr"])
    assert uses
    for metric, wanted in uses:
        series = _families()[metric]
        for label, value in wanted.items():
            assert value in {labels.get(label) for labels in series}, f"{metric} has no {label}={value}"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do(name: str) -> None:
    """How bad it is, what it is, and what to look at."""
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"].keys() == {"summary", "description"}


def test_the_limit_of_sockets_is_the_settings() -> None:
    """Whoever changes the setting changes the alert."""
    assert f"* {WorkerSettings.model_fields['sockets_max'].default}" in ALERTS["TowlineSocketsNearLimit"]["expr"]


@pytest.mark.parametrize("fires", [None, *ALERTS])
def test_each_alert_fires_for_what_it_is_about(fires: str | None, tmp_path: Path) -> None:
    """Prometheus's own rule tests: an hour of a healthy installation, in which one thing at most is wrong."""
    series = HEALTHY | (UNHEALTHY[fires] if fires else {})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULE["spec"]))
    state = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": v} for name, v in series.items() if v is not None],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "1h",
                        "exp_samples": [{"labels": f'{{alertname="{fires}"}}', "value": 1}] if fires else [],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(state))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


def test_all_and_only_our_services_are_scraped() -> None:
    """By the operator, and by their annotations: stores and stand-ins export nothing here."""
    selector = MONITOR["spec"]["selector"]["matchExpressions"]
    chosen = [
        pod.owner.split("/")[1]
        for pod in pods(kind_objects())
        if all(pod.labels.get(each["key"]) in each["values"] for each in selector)
    ]
    assert sorted(chosen) == sorted(SERVICES)
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    for service in SERVICES:
        (container,) = pod_of(f"Deployment/{service}", kind_objects()).containers
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert endpoint["path"] == "/metrics"


def test_the_prometheus_of_the_overlay_asks_for_every_pod(tmp_path: Path) -> None:
    """By headless Services, which have the addresses of all pods, at the port of the metrics."""
    configuration = KUSTOMIZE / "components" / "prometheus" / "prometheus.yml"
    jobs = yaml.safe_load(configuration.read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == list(SERVICES)
    for job in jobs:
        (names,) = job["dns_sd_configs"]
        (name,) = names["names"]
        service = get(f"Service/{name}", kind_objects())["spec"]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"]
        assert service["selector"]["app.kubernetes.io/name"] == job["job_name"]
        (container,) = pod_of(f"Deployment/{job['job_name']}", kind_objects()).containers
        assert names["port"] in {port["containerPort"] for port in container["ports"] if port["name"] == "admin"}
    promtool("check", "config", str(configuration))
