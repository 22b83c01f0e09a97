"""The Compose files: each waits for what it needs, nothing has more than it needs, and numbers fit the services."""

import ipaddress
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable

import pytest
import yaml
from compose_files import COMPOSE, SECRETS, Object, development, is_once, networks_of, public, seconds, services
from drain_budgets import drain_budget_s

from common.process.outbound import CONNECT_TIMEOUT_S
from common.process.settings import CommonSettings, load, unknown_variables
from gateway.settings import GatewaySettings
from relay.settings import RelaySettings
from towline.wire.api import WAIT_S_MAX
from towline.wire.runs import DURATION_S_MAX, SourceFollow
from worker.settings import WorkerSettings

STACKS = pytest.mark.parametrize("stack", [development, public], ids=["development", "public"])
SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "relay": RelaySettings,
}
# They show no health: a laptop's sidecar, and what runs to its end.
WITHOUT_PROBE = {"sidecar"}
# Docker's own default would cut a drain short.
MARGIN_S = 5.0

Stack = Callable[[], Object]


def setting_max(name: str) -> float:
    """The largest value that a setting of the gateway may have."""
    return next(float(meta.le) for meta in GatewaySettings.model_fields[name].metadata if hasattr(meta, "le"))


# ---- what waits for what


@STACKS
def test_everything_shows_its_health_and_is_waited_for_by_it(stack: Stack) -> None:
    found = services(stack())
    for name, service in found.items():
        has_probe = "test" in service.get("healthcheck", {})
        assert has_probe == (not is_once(service) and name not in WITHOUT_PROBE), name
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if is_once(found[needed]) else "service_healthy"
            assert how["condition"] == expected, f"{name} → {needed}"


@STACKS
def test_what_runs_once_is_waited_for_by_what_stays(stack: Stack) -> None:
    """Without that `up --wait` takes its orderly end for a failure."""
    found = services(stack())
    waited_for = {
        needed for service in found.values() if not is_once(service) for needed in service.get("depends_on", {})
    }
    assert {name for name, service in found.items() if is_once(service) and "profiles" not in service} <= waited_for


@STACKS
def test_two_of_each_service_behind_one_proxy(stack: Stack) -> None:
    found = services(stack())
    assert {name: service.get("scale", 1) for name, service in found.items() if name in SETTINGS} == dict.fromkeys(
        SETTINGS, 2
    )
    # A name or a port of its own, and there could be no second one.
    assert not any("container_name" in service for service in found.values())


# ---- numbers and names of the services


@STACKS
@pytest.mark.parametrize("service", SETTINGS)
def test_the_environment_is_one_that_the_service_starts_with(
    stack: Stack, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variable is a setting of its own; the time to stop fits what it promises to do in it."""
    found = services(stack())[service]
    for name, value in found["environment"].items():
        monkeypatch.setenv(name, value)
    settings = load(SETTINGS[service])
    assert not unknown_variables(SETTINGS[service], found["environment"])
    budget_s = drain_budget_s(settings)
    assert budget_s + MARGIN_S <= seconds(found["stop_grace_period"]) <= budget_s + 20


@STACKS
def test_secrets_are_given_to_those_who_need_them(stack: Stack) -> None:
    holders: dict[str, set[str]] = {secret: set() for secret in SECRETS.values()}
    for name, service in services(stack()).items():
        text = yaml.safe_dump(service, width=10_000)
        for secret, names in holders.items():
            if secret in text:
                names.add(name)
    assert holders == {
        SECRETS["POSTGRES_PASSWORD"]: {"postgres", "migrate", "gateway", "worker", "relay", "api-key"},
        SECRETS["REDIS_PASSWORD"]: {"redis", "gateway", "worker", "relay"},
        SECRETS["TOWLINE_TOKEN_KEYS"]: {"gateway"},
        SECRETS["TOWLINE_SECRET_KEYS"]: {"gateway", "worker", "relay"},
    }


@pytest.mark.skipif(not shutil.which("git") or not (COMPOSE.parents[1] / ".git").exists(), reason="no checkout of git")
def test_files_of_secrets_are_ignored() -> None:
    """By git: what `make compose-up` writes beside the files cannot be committed by accident."""
    for name in (".env", "services.env", "tls/tls.key"):
        ignored = subprocess.run(["git", "check-ignore", "--quiet", str(COMPOSE / name)], cwd=COMPOSE, check=False)
        assert ignored.returncode == 0, name


def test_no_secret_is_in_the_repository() -> None:
    """They are required."""
    written = (COMPOSE / "compose.yaml").read_text()
    example = (COMPOSE / ".env.example").read_text()
    for name in SECRETS:
        assert f"${{{name}:?" in written
        assert re.search(rf"^{name}=$", example, re.MULTILINE), name


def test_every_variable_of_the_files_is_explained() -> None:
    used = {
        name
        for file in ("compose.yaml", "public.yaml")
        for name in re.findall(r"\$\{([A-Z_]+)", (COMPOSE / file).read_text())
    }
    explained = set(re.findall(r"^#?([A-Z_]+)=", (COMPOSE / ".env.example").read_text(), re.MULTILINE))
    assert explained - {"COMPOSE_FILE"} == used


def test_redis_keeps_what_it_was_given() -> None:
    redis = services(development())["redis"]
    assert "--maxmemory-policy noeviction" in redis["command"]
    assert "--appendonly yes" in redis["command"]
    megabytes = re.search(r"--maxmemory (\d+)mb", redis["command"])
    assert megabytes
    # A rewrite of the append-only file forks: pages that change meanwhile are there twice.
    assert int(megabytes[1]) * 2 <= _megabytes(redis["mem_limit"])
    assert "redis:/data" in redis["volumes"]


def test_images_of_others_can_be_replaced_and_ours_are_never_pulled() -> None:
    written = yaml.safe_load(re.sub(r"!(override|reset)", "", (COMPOSE / "public.yaml").read_text()))
    for document in (yaml.safe_load((COMPOSE / "compose.yaml").read_text()), written):
        for name, service in services(document).items():
            image = service.get("image", "")
            if image.startswith("towline-"):
                assert image.endswith(":${TAG:-dev}"), name
                assert service["pull_policy"] == "never", name
            elif image:
                assert re.fullmatch(r"\$\{[A-Z_]+_IMAGE:-[a-z/]+:[^}]+\}", image), name


# ---- nothing has more than it needs


@STACKS
def test_every_container_is_locked_up(stack: Stack) -> None:
    for name, service in services(stack()).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service, name
        assert "privileged" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert _megabytes(service["mem_limit"]) <= 1024, name
        assert 0 < service["pids_limit"] <= 400, name
        assert not [volume for volume in service.get("volumes", ()) if "docker.sock" in str(volume)], name
        # Ours have their user in the image.
        assert service.get("user", "root") not in ("root", "0") or service["image"].startswith("towline-"), name


@STACKS
def test_what_is_writable_for_a_while_has_an_owner(stack: Stack) -> None:
    """Its mode may be another one after a restart, and what stays is restarted."""
    for name, service in services(stack()).items():
        for entry in service.get("tmpfs", ()):
            assert is_once(service) or re.search(r":uid=\d+,gid=\d+,mode=0", entry), f"{name}: {entry}"


def test_the_development_stack_is_published_on_the_loopback_alone() -> None:
    published = {name: service["ports"] for name, service in services(development()).items() if "ports" in service}
    assert published.keys() == {"proxy", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_the_public_one_publishes_its_proxy_and_nothing_else() -> None:
    published = {name: service["ports"] for name, service in services(public()).items() if service.get("ports")}
    assert {name: [port.rpartition(":")[2] for port in ports] for name, ports in published.items()} == {
        "proxy": ["443", "80"]
    }


def test_only_the_egress_proxy_of_the_public_one_has_a_way_out() -> None:
    document = public()
    ways_out = {name for name, network in document["networks"].items() if not (network or {}).get("internal")}
    assert ways_out == {"edge", "outside"}
    # The one that ports are published by lets nothing out that was not asked for from outside.
    options = document["networks"]["edge"]["driver_opts"]
    assert options == {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    # And the others have no address of this machine in them.
    for name in document["networks"].keys() - ways_out:
        assert document["networks"][name]["driver_opts"] == {"com.docker.network.bridge.inhibit_ipv4": "true"}, name
    members = {
        network: {name for name, service in services(document).items() if network in networks_of(service)}
        for network in document["networks"]
    }
    assert members["outside"] == {"egress-proxy"}
    assert members["edge"] == {"proxy"}
    assert members["machines"] == {"proxy", "sidecar", "smoke"}
    # Gateways call nobody.
    for name in ("worker", "relay"):
        assert services(document)[name]["environment"]["TOWLINE_EGRESS_PROXY"] == "http://egress-proxy:3128"


@STACKS
def test_stores_are_reached_by_services_alone(stack: Stack) -> None:
    found = services(stack())
    assert {name for name, service in found.items() if "stores" in networks_of(service)} == {
        *SETTINGS,
        *("redis", "postgres", "migrate", "api-key"),
    }
    assert networks_of(found["redis"]) == networks_of(found["postgres"]) == {"stores"}


# ---- the proxies' own files


def nginx(name: str) -> str:
    """One file, without its comments."""
    text = (COMPOSE / "nginx" / f"{name}.conf").read_text()
    return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)


def location(text: str, start: str) -> str:
    """What stands in the first location whose line contains `start`."""
    found = re.search(rf"location [^{{]*{re.escape(start)}[^{{]*\{{(.*?)\n\s*\}}", text, re.DOTALL)
    assert found, start
    return found[1]


def timeout_s(text: str, directive: str) -> int:
    found = re.search(rf"\b{directive} (\d+)s;", text)
    assert found, directive
    return int(found[1])


def test_waits_and_streams_are_held_open_for_longer_than_they_are_silent() -> None:
    gateway = nginx("gateway")
    assert timeout_s(gateway, "proxy_read_timeout") > WAIT_S_MAX
    streams = location(gateway, "/events$")
    assert timeout_s(streams, "proxy_read_timeout") >= 2 * setting_max("sse_keepalive_s")
    assert "proxy_buffering off;" in streams
    bridge = nginx("bridge")
    assert timeout_s(bridge, "proxy_read_timeout") >= 2 * setting_max("heartbeat_s")
    assert timeout_s(bridge, "proxy_send_timeout") >= 2 * setting_max("heartbeat_s")


def test_a_body_is_as_large_as_the_gateway_takes_it() -> None:
    assert GatewaySettings.model_fields["body_bytes_max"].default == 256 * 1024
    assert "client_max_body_size 256k;" in nginx("http")


def test_what_may_hold_a_token_is_not_logged() -> None:
    """The path without its query is; and nginx' own error log, which quotes whole requests, says next to nothing."""
    http = nginx("http")
    logged = re.search(r"log_format access(.*?);", http, re.DOTALL)
    assert logged
    assert "$uri" in logged[1]
    assert not re.search(r"\$(request\b|request_uri|args|arg_|query_string|http_|cookie_)", logged[1])
    assert "error_log /dev/stderr crit;" in http
    for name in ("gateway", "bridge", "problems", "public", "development"):
        levels = re.findall(r"error_log \S+ (\w+);", nginx(name))
        assert set(levels) <= {"notice"}, "and that one outside of http"
        assert "log_format" not in nginx(name)
        assert "access_log" not in nginx(name)


def test_only_the_api_is_passed_on() -> None:
    """What repeats a POST that a gateway may have seen is one with an idempotency key."""
    gateway = nginx("gateway")
    assert re.findall(r"location ([^{]*?) \{", gateway) == [
        "/",
        "/v1/",
        "~ ^/v1/(users/[^/]+/jobs|threads/[^/]+/entries)$",
        "~ ^/v1/(events$|(runs|threads)/[^/]+/events$)",
        "= /openapi.json",
        "/problems/",
    ]
    assert "return 404;" in location(gateway, "/ ")
    assert gateway.count("non_idempotent") == 1
    assert "non_idempotent" in location(gateway, "users/[^/]+/jobs")


def egress_proxy() -> str:
    return (COMPOSE / "egress-proxy" / "squid.conf").read_text()


def test_only_sockets_of_sidecars_change_their_protocol() -> None:
    """On any other connection that did, requests would pass by limits, locations and the log."""
    gateway = nginx("gateway")
    assert set(re.findall(r"proxy_set_header (?:Connection|Upgrade) (.*);", gateway)) == {'""'}
    # Directives of the level above hold where a location has none of its own.
    assert "proxy_set_header" not in "".join(re.findall(r"location [^{]*\{(.*?)\}", gateway, re.DOTALL))
    assert "proxy_set_header Upgrade $http_upgrade;" in location(nginx("bridge"), "= /v1/bridge")


def test_squid_ignores_none_of_the_networks_inside() -> None:
    """Of two that overlap it keeps one, which differs by version; and an IPv4-mapped one is for it one of IPv4."""
    written = " ".join(re.findall(r"^acl inside dst (.*)$", egress_proxy(), re.MULTILINE)).split()
    networks = [ipaddress.ip_network(network) for network in written]
    assert {network.version for network in networks} == {4, 6}
    mapped = ipaddress.ip_network("::ffff:0:0/96")
    for a, b in itertools.combinations([*networks, mapped], 2):
        assert a.version != b.version or not a.overlaps(b), f"{a} and {b}"  # type: ignore[arg-type]


def test_the_egress_proxy_waits_as_long_as_a_source_may_be_silent() -> None:
    squid = egress_proxy()
    read = re.search(r"^read_timeout (\d+) minutes$", squid, re.MULTILINE)
    lifetime = re.search(r"^client_lifetime (\d+) days$", squid, re.MULTILINE)
    forward = re.search(r"^forward_timeout (\d+) seconds$", squid, re.MULTILINE)
    assert read
    assert lifetime
    assert forward
    assert int(read[1]) * 60 > SourceFollow("s", "http://s", "ids").idle_timeout_s
    assert int(lifetime[1]) * 86_400 > DURATION_S_MAX
    assert int(forward[1]) < CONNECT_TIMEOUT_S


def _megabytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(m|g)", text)
    assert found, text
    return int(found[1]) * {"m": 1, "g": 1024}[found[2]]
