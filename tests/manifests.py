"""The Kubernetes manifests as values: what is checked in, what kustomize renders, and the parts that tests ask about.

Owns:     how a rendered object is read: `deploy/kind.yaml` everywhere, a fresh rendering where a kustomize is found.
"""

import base64
import functools
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
KIND = ROOT / "deploy" / "kind.yaml"
SERVICES = ("gateway", "worker", "relay")
NOTHING_TO_RENDER_WITH = 3

Object = dict[str, Any]


class Pod(NamedTuple):
    """A pod's template, by the object that makes pods of it (`Deployment/gateway`)."""

    owner: str
    labels: Mapping[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """All that run in it, first the init containers."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def parse(text: str) -> list[Object]:
    """Read the objects of a stream of YAML documents, in their order."""
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def kind_objects() -> list[Object]:
    """Everything that `kubectl apply -f deploy/kind.yaml` makes. Not to be changed by tests."""
    return parse(KIND.read_text())


def render(directory: Path) -> str:
    """Build a kustomization; the test is skipped where nothing can."""
    command = [str(ROOT / "scripts" / "manifests"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == NOTHING_TO_RENDER_WITH:
        pytest.skip(f"{done.stderr.strip()} (deploy/kind.yaml is checked as it was rendered)")
    assert done.returncode == 0, done.stderr
    return done.stdout


def overlay(directory: Path, *, components: tuple[str, ...] = (), more: str = "") -> Path:
    """Write a user's own overlay of the base into `directory`; kustomize takes relative paths only."""
    base = os.path.relpath(KUSTOMIZE, directory)
    lines = ["resources:", f"  - {base}/base", "components:"]
    lines += [f"  - {base}/components/{name}" for name in components]
    (directory / "kustomization.yaml").write_text("\n".join([*lines, more]))
    return directory


def source_objects() -> Iterator[tuple[str, Object]]:
    """Every object that stands in deploy/kustomize as it is, with the file that holds it."""
    for path in sorted(KUSTOMIZE.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            for found in parse(path.read_text()):
                yield str(path.relative_to(KUSTOMIZE)), found


def name_of(found: Object) -> str:
    """`Kind/name`, as kubectl says it."""
    return f"{found['kind']}/{found['metadata']['name']}"


def of_kind(kind: str, objects: list[Object]) -> list[Object]:
    """Those of one kind."""
    return [found for found in objects if found["kind"] == kind]


def get(name: str, objects: list[Object]) -> Object:
    """The one object of this name (`Kind/name`)."""
    (found,) = [found for found in objects if name_of(found) == name]
    return found


def pods(objects: list[Object]) -> list[Pod]:
    """The templates of all pods, whatever makes them."""
    templates = [(found, found["spec"]["template"]) for found in objects if "template" in found.get("spec", {})]
    return [Pod(name_of(found), t["metadata"]["labels"], t["spec"]) for found, t in templates]


def pod_of(owner: str, objects: list[Object]) -> Pod:
    """The template of one owner's pods."""
    (pod,) = [pod for pod in pods(objects) if pod.owner == owner]
    return pod


def environment(container: Object, objects: list[Object]) -> dict[str, str]:
    """The variables that a container is started with, their references followed.

    Raises:
        KeyError: a ConfigMap, a Secret or a key of theirs is not there.
    """
    data: dict[tuple[str, str], dict[str, str]] = {}
    for found in objects:
        if found["kind"] in ("ConfigMap", "Secret"):
            data[found["kind"], found["metadata"]["name"]] = _contents(found)
    values: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for kind, reference in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference in source:
                values |= data[kind, source[reference]["name"]]
    for variable in container.get("env", []):
        if "value" in variable:
            values[variable["name"]] = variable["value"]
        for kind, reference in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
            if reference in variable.get("valueFrom", {}):
                key = variable["valueFrom"][reference]
                values[variable["name"]] = data[kind, key["name"]][key["key"]]
    return values


def _contents(found: Object) -> dict[str, str]:
    if found["kind"] == "ConfigMap":
        return dict(found.get("data", {}))
    coded = {key: base64.b64decode(value).decode() for key, value in found.get("data", {}).items()}
    return coded | found.get("stringData", {})
