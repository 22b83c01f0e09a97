"""Numbers and names that stand both in the manifests and in the services are the same."""

import os
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from drain_budgets import drain_budget_s
from manifests import ROOT, SERVICES, environment, get, kind_objects, pod_of

from common import commands
from common.process import health
from common.process.settings import CommonSettings, load, unknown_variables
from gateway.settings import GatewaySettings
from relay.gathering import RELAY_BYTES_MAX
from relay.settings import RelaySettings
from towline.cli.terminal import Exit
from worker.settings import WorkerSettings

SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "relay": RelaySettings,
}
# What a kube-proxy, or a load balancer that reads endpoints, may need to hear that a pod leaves: seen 2 s.
ENDPOINTS_LAG_S = 2.0
MARGIN_S = 5.0
MIB = 1024 * 1024


def container(service: str) -> dict[str, Any]:
    """The one container of a service's pods."""
    (found,) = pod_of(f"Deployment/{service}", kind_objects()).containers
    return found


@pytest.fixture
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CommonSettings:
    """What a service reads in its pod: the rendered environment and nothing else."""
    service: str = request.param
    values = environment(container(service), kind_objects())
    for name in [name for name in os.environ if name.startswith("TOWLINE_")]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return load(SETTINGS[service])


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in SERVICES], indirect=["settings"])
def test_the_grace_period_fits_the_drain(settings: CommonSettings, service: str) -> None:
    """A pod that is killed in its drain loses what the drain is for."""
    grace_s = pod_of(f"Deployment/{service}", kind_objects()).spec["terminationGracePeriodSeconds"]
    assert grace_s >= drain_budget_s(settings) + MARGIN_S
    # Nor is a hung process waited for much longer.
    assert grace_s <= drain_budget_s(settings) + 20
    documented = " ".join((ROOT / "deploy" / "README.md").read_text().split())
    assert f"{grace_s} s for a {service}" in documented


@pytest.mark.parametrize("settings", ["gateway"], indirect=True)
def test_the_door_stays_open_until_nobody_is_sent_there(settings: GatewaySettings) -> None:
    """By the process itself, so no preStop hook: it would only make the drain start later."""
    assert settings.unready_s > ENDPOINTS_LAG_S
    for service in SERVICES:
        assert "lifecycle" not in container(service)


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in SERVICES], indirect=["settings"])
def test_every_variable_is_a_setting_of_its_service(settings: CommonSettings, service: str) -> None:
    """And its value is accepted: a wrong one would have failed to load."""
    values = environment(container(service), kind_objects())
    assert {"REDIS_URL", "DATABASE_URL", "TOWLINE_SECRET_KEYS", "TOWLINE_EGRESS_ALLOW"} <= values.keys()
    assert not unknown_variables(type(settings), values)


def test_stream_tokens_are_for_gateways_alone() -> None:
    """Who cannot need a secret does not get it."""
    holders = [name for name in SERVICES if "TOWLINE_TOKEN_KEYS" in environment(container(name), kind_objects())]
    assert holders == ["gateway"]
    (migrate,) = pod_of("Job/migrate", kind_objects()).containers
    assert environment(migrate, kind_objects()).keys() == {"DATABASE_URL"}


def test_the_urls_lead_to_the_stores_of_the_overlay() -> None:
    """The password stands in two Secrets: in the URL, and where PostgreSQL is made with it."""
    objects = kind_objects()
    values = environment(container("gateway"), objects)
    (postgres,) = pod_of("StatefulSet/postgres", objects).containers
    made_with = environment(postgres, objects)
    url = urlsplit(values["DATABASE_URL"])
    assert (url.username, url.password) == (made_with["POSTGRES_USER"], made_with["POSTGRES_PASSWORD"])
    assert url.path == f"/{made_with['POSTGRES_DB']}"
    for store in (url, urlsplit(values["REDIS_URL"])):
        assert store.port == get(f"Service/{store.hostname}", objects)["spec"]["ports"][0]["port"]


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in SERVICES], indirect=["settings"])
def test_ports_are_those_that_the_service_opens(settings: CommonSettings, service: str) -> None:
    """By number; the rest of the manifests goes by name."""
    ports = {port["name"]: port["containerPort"] for port in container(service)["ports"]}
    expected = {"admin": settings.admin_port}
    if isinstance(settings, GatewaySettings):
        expected["http"] = settings.http_port
    if isinstance(settings, WorkerSettings):
        expected["bridge"] = settings.bridge_port
    assert ports == expected
    annotations = _template(service)["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert int(annotations["prometheus.io/port"]) == settings.admin_port


@pytest.mark.parametrize("service", SERVICES)
def test_probes_ask_the_process_and_never_its_stores(service: str) -> None:
    """`/readyz` is no different here: its status, too, tells of the process only."""
    found = container(service)
    assert {found[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness")} == {"/livez"}
    assert found["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for probe in ("startup", "liveness", "readiness"):
        assert found[f"{probe}Probe"]["httpGet"]["port"] == "admin"
        # What counts as a blocked loop is worth a line in the log, no more.
        assert found[f"{probe}Probe"]["timeoutSeconds"] > health.LOOP_BLOCKED_S


@pytest.mark.parametrize("service", SERVICES)
def test_probes_are_patient_with_life_and_quick_with_work(service: str) -> None:
    """A restart costs every socket and stream; taking a stuck replica out of service costs nothing."""
    found = container(service)
    startup, liveness, readiness = (found[f"{probe}Probe"] for probe in ("startup", "liveness", "readiness"))
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 60
    assert 20 <= liveness["periodSeconds"] * (liveness["failureThreshold"] - 1) + liveness["timeoutSeconds"] <= 60
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 10


def test_memory_limits_leave_room_for_what_is_buffered() -> None:
    """Over what each takes at rest (at most 128 MiB): its documented buffers at their limits, all at once."""
    buffers = {
        "gateway": 5000 * 40 * 1024,  # TOWLINE_WAITERS_MAX, at what its description says of each
        "worker": WorkerSettings.model_fields["outcomes_pending_bytes_max"].default,
        "relay": RELAY_BYTES_MAX,
    }
    assert GatewaySettings.model_fields["waiters_max"].default == 5000
    for service in SERVICES:
        resources = container(service)["resources"]
        limit = _bytes(resources["limits"]["memory"])
        assert limit >= _bytes(resources["requests"]["memory"]) + buffers[service], service
        assert resources["requests"]["cpu"]
        assert "cpu" not in resources["limits"], "a throttled loop misses heartbeats on an idle node"


def test_the_migration_waits_for_exactly_what_is_unavailable() -> None:
    """Every other failure is the Job's."""
    (migrate,) = pod_of("Job/migrate", kind_objects()).containers
    assert f"-eq {Exit.UNAVAILABLE.value} ]" in migrate["command"][-1]
    assert commands.migrate.registered_commands[0].name == "migrate"


def _template(service: str) -> dict[str, Any]:
    template: dict[str, Any] = get(f"Deployment/{service}", kind_objects())["spec"]["template"]
    return template


def _bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)Mi", quantity)
    assert match
    return int(match[1]) * MIB
