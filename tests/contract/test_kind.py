"""What kind/ and the scripts around it take for granted about deploy/kind.yaml, which is rendered from elsewhere."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = yaml.safe_load((ROOT / "kind/cluster.yaml").read_text())
MACHINE = yaml.safe_load((ROOT / "kind/machine.yaml").read_text())
MANIFEST = [each for each in yaml.safe_load_all((ROOT / "deploy/kind.yaml").read_text()) if each]
SCRIPTS = ("kind-up", "kind-smoke", "kind-down")


def _all(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in MANIFEST if each["kind"] == kind}


def _pod_specs() -> Iterator[dict[str, Any]]:
    for each in MANIFEST:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield each["spec"]["template"]["spec"]


def test_every_node_runs_the_same_pinned_release() -> None:
    """Not kind's default, which changes with kind: the newest kubelet does not start on every host."""
    assert [node["role"] for node in CLUSTER["nodes"]] == ["control-plane", "worker", "worker"]
    images = {node["image"] for node in CLUSTER["nodes"]}
    assert len(images) == 1
    assert re.fullmatch(r"kindest/node:v1\.\d+\.\d+@sha256:[0-9a-f]{64}", images.pop())


def test_the_ports_of_this_machine_lead_to_the_node_ports_of_the_services() -> None:
    """8080 to the gateway and 8081 to the worker, from the loopback alone."""
    mapped = {
        port["hostPort"]: port["containerPort"]
        for node in CLUSTER["nodes"]
        for port in node.get("extraPortMappings", [])
    }
    services = _all("Service")
    assert mapped == {
        port["port"]: port["nodePort"] for name in ("gateway", "worker") for port in services[name]["spec"]["ports"]
    }
    assert {port["listenAddress"] for node in CLUSTER["nodes"] for port in node.get("extraPortMappings", [])} == {
        "127.0.0.1"
    }


def test_kind_up_waits_for_all_that_is_deployed() -> None:
    """A workload that it does not know of would not be part of "everything is ready"."""
    script = (ROOT / "scripts/kind-up").read_text()
    listed = re.search(r"^workloads='([^']*)'$", script, re.MULTILINE)
    assert listed
    deployed = {
        f"{each['kind'].lower()}/{each['metadata']['name']}" for each in MANIFEST if "template" in each.get("spec", {})
    }
    assert {*listed[1].split(), "job/migrate"} == deployed
    assert "job/migrate" in script


def test_the_machine_of_the_smoke_fits_into_the_namespace() -> None:
    """It is loaded with the rest, allowed to talk with the workers, and as restricted as Pod Security asks for."""
    spec = MACHINE["spec"]
    (container,) = spec["containers"]
    assert container["image"] in {each["image"] for pod in _pod_specs() for each in pod["containers"]}
    assert MACHINE["metadata"]["namespace"] in _all("Namespace")
    policy = _all("NetworkPolicy")["development"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= MACHINE["metadata"]["labels"].items()
    assert {"to": [{"podSelector": {}}]} in policy["egress"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    bridge = next(each["value"] for each in container["env"] if each["name"] == "TOWLINE_BRIDGE_URL")
    (port,) = _all("Service")["worker"]["spec"]["ports"]
    assert bridge == f"ws://worker:{port['port']}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_run_and_is_a_target_of_make(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    assert re.search(rf"^{script}:.*\n\t@scripts/{script}$", (ROOT / "Makefile").read_text(), re.MULTILINE)
