"""A service as process 1 of a hardened container: how it starts, is probed, stops and is killed."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from image_containers import Container, Containers, image_name

ROOT = Path(__file__).parents[2]
services = pytest.mark.parametrize("service", ["gateway", "worker", "relay"])

# What an idle service needs to leave with is a moment; the limit is for machines that build images at the same time.
SHORT = {"TOWLINE_UNREADY_S": "0.2", "TOWLINE_DRAIN_S": "2"}
LEAVES_WITHIN_S = 60.0
NO_STORES = {"DATABASE_URL": "postgresql://127.0.0.1:1/none", "REDIS_URL": "redis://127.0.0.1:1"}

ITSELF = """
import json, os
status = dict(line.split(":\\t", 1) for line in open("/proc/1/status").read().splitlines() if ":\\t" in line)
print(json.dumps({"argv": open("/proc/1/cmdline").read().split("\\0")[1:-1], "uid": os.getuid(), "gid": os.getgid(),
                  "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
                  "no_new_privileges": status["NoNewPrivs"] == "1",
                  "takes_files": [path for path in ("/", "/tmp", "/var/tmp", "/run", "/opt/towline", "/root", "/home")
                                  if os.access(path, os.W_OK)]}))
"""


def health_check(container: Container, image: str) -> list[str]:
    """The argument vector of an image's HEALTHCHECK; an engine runs it as `exec` does."""
    found: Any = container.engine.inspect("image", image_name(image))
    kind, *argv = (found.get("Healthcheck") or found["Config"]["Healthcheck"])["Test"]
    assert kind == "CMD"
    return argv


@services
def test_it_serves_on_a_read_only_root_and_leaves_when_told(
    containers: Containers, stores: dict[str, str], service: str
) -> None:
    container = containers.start(service, env={**stores, **SHORT})
    container.wait_for("/readyz")

    assert container.python(ITSELF) == {
        "argv": ["-m", service],
        "uid": 10001,
        "gid": 10001,
        "capabilities": 0,
        "no_new_privileges": True,
        "takes_files": [],
    }

    container.signal("TERM")
    assert container.exit_code(LEAVES_WITHIN_S) == 0
    assert '"event":"stopped"' in container.logs()
    assert "drain_step_overran" not in container.logs()


@services
def test_it_is_told_to_stop_in_its_first_moments(containers: Containers, service: str) -> None:
    """A pod is deleted as soon as it was made: it must not use up its grace period and then be killed."""
    container = containers.start(service, env=NO_STORES)
    deadline = time.monotonic() + LEAVES_WITHIN_S
    # Again and again: what comes before the interpreter has reached our first line is lost, and only that.
    while container.engine.inspect("container", container.name)["State"]["Running"]:
        assert time.monotonic() < deadline, container.logs()
        container.signal("TERM")
    assert container.exit_code(0) == 0


@services
def test_its_health_check_asks_the_port_that_it_was_given(
    containers: Containers, stores: dict[str, str], service: str
) -> None:
    container = containers.start(
        service, env={**stores, "HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1"}
    )
    container.wait_for("/readyz")
    check = health_check(container, service)

    assert container.run(*check).returncode == 0
    assert container.run(*check, "/readyz").returncode == 0
    assert container.run(*check, "/nothing").returncode == 1
    assert container.run(*check, env={"TOWLINE_ADMIN_PORT": "1"}).returncode == 1


@services
def test_it_is_alive_and_not_ready_while_its_stores_are_away(containers: Containers, service: str) -> None:
    container = containers.start(service, env=NO_STORES)
    container.wait_for("/livez")
    check = health_check(container, service)

    assert container.run(*check).returncode == 0
    assert container.run(*check, "/readyz").returncode == 1


@services
def test_wrong_settings_end_it_with_2_and_every_name(containers: Containers, service: str) -> None:
    container = containers.start(service, env={"TOWLINE_DRAIN_S": "soon", "REDIS_URL": "http://127.0.0.1"})
    assert container.exit_code(LEAVES_WITHIN_S) == 2
    for name in ("TOWLINE_DRAIN_S", "REDIS_URL", "DATABASE_URL"):
        assert name in container.logs()


@services
def test_an_environment_is_checked_by_its_own_image(
    containers: Containers, stores: dict[str, str], service: str
) -> None:
    def check(**env: str) -> int:
        options = ["--entrypoint", "towline"]
        container = containers.start(service, "config", "--check", service, env={**stores, **env}, options=options)
        return container.exit_code(LEAVES_WITHIN_S)

    assert check() == 0
    assert check(TOWLINE_HEARTBEAT_S="never") == 2


def test_the_gateways_image_migrates(containers: Containers, stores: dict[str, str]) -> None:
    """Over a schema that is there already too: the Job is run again with each release."""
    container = containers.start("gateway", "migrate", env=stores, options=["--entrypoint", "towline"])
    assert container.exit_code(60) == 0
    assert "up to date" in container.logs()


@services
def test_killed_and_started_again_it_shows_the_present_process_and_leaves_no_file(
    containers: Containers, stores: dict[str, str], service: str
) -> None:
    """Metrics that are kept in files need a folder that is wiped, grow without end, or show the values of the dead."""
    labels = containers.engine.inspect("image", image_name(service))["Config"]["Labels"]
    container = containers.start(service, env=stores)
    started_at: list[float] = []
    changed_files: list[str] = []
    for _ in range(5):
        container.wait_for("/readyz")
        status, metrics = container.get("/metrics")
        assert status == 200
        assert f'revision="{labels["org.opencontainers.image.revision"]}"' in metrics
        (started,) = re.findall(r"^process_start_time_seconds (\S+)$", metrics, flags=re.MULTILINE)
        started_at.append(float(started))
        changed_files.append(container.engine("diff", container.name).stdout)
        container.signal("KILL")
        assert container.exit_code(LEAVES_WITHIN_S) == 137
        container.engine("start", container.name)
    assert started_at == sorted(set(started_at))
    # The engine's own: names and addresses in /etc.
    assert len(set(changed_files)) == 1
    assert not re.search(r"/(opt|tmp|var)\b", changed_files[0])


def test_lifecycle_tests_pass_in_the_development_image(containers: Containers) -> None:
    """On the Python that is shipped, as the user that is shipped."""
    container = containers.start(
        "dev",
        *("python", "-m", "pytest", "-p", "no:cacheprovider", "tests/integration/test_lifecycle.py"),
        options=[
            "--tmpfs=/tmp",
            f"--volume={ROOT}/tests:/checkout/tests:ro",
            f"--volume={ROOT}/pyproject.toml:/checkout/pyproject.toml:ro",
            "--workdir=/checkout",
        ],
    )
    code = container.exit_code(240)
    assert code == 0, container.logs()
    assert re.search(r"\d+ passed", container.logs())
