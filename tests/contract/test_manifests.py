"""The manifests are what clusters of several versions take, whole in themselves, and up to date."""

import copy
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from manifests import (
    KIND,
    KUSTOMIZE,
    ROOT,
    SERVICES,
    environment,
    get,
    kind_objects,
    name_of,
    of_kind,
    overlay,
    parse,
    pod_of,
    pods,
    render,
    source_objects,
)

# From the oldest that knows every field used here to the newest known; kind/cluster.yaml's lies between.
VERSIONS = ["1.27", "1.31", "1.34", "1.37"]
# Kinds of an operator, which no version of Kubernetes has a schema of.
CUSTOM_KINDS = {"PodMonitor", "PrometheusRule"}
COMPONENTS = tuple(sorted(path.name for path in (KUSTOMIZE / "components").iterdir()))
RECOMMENDED = {"name", "component", "part-of", "version", "managed-by"}


def validate(found: dict[str, Any], version: str) -> None:
    """Check an object strictly: a field that this version does not know is an error."""
    if found["kind"] not in CUSTOM_KINDS:
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    """Those of the overlay, and those of components that it leaves out."""
    rendered = {name_of(found) for found in kind_objects()}
    others = [found for _, found in source_objects() if name_of(found) not in rendered]
    for found in [*kind_objects(), *others]:
        validate(found, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_validation_is_strict(version: str) -> None:
    """A misspelt field would be dropped by the API server, in silence."""
    found = copy.deepcopy(get("Deployment/gateway", kind_objects()))
    found["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(found, version)


def test_the_rendered_file_is_up_to_date() -> None:
    """Comments of its head aside."""
    rendered = render(KUSTOMIZE / "overlays" / "kind")
    checked_in = KIND.read_text()
    head = checked_in[: checked_in.index("apiVersion:")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert checked_in.removeprefix(head) == rendered, "run `make manifests`"


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_goes_with_the_base(component: str, tmp_path: Path) -> None:
    """And brings all that it has."""
    names = {name_of(found) for found in parse(render(overlay(tmp_path, components=(component,))))}
    held = {name_of(found) for path, found in source_objects() if path.startswith(f"components/{component}/")}
    assert held
    assert held <= names


def test_the_overlay_of_ones_own_in_the_readme_renders(tmp_path: Path) -> None:
    """It names registry and tag once, the migration's Job carries the tag, and nothing of kind's secrets is in it."""
    text = (ROOT / "deploy" / "README.md").read_text()
    (example,) = re.findall(r"```yaml\n(# .*?kustomization\.yaml\n.*?)```", text, re.DOTALL)
    example = example.replace("../towline/deploy", os.path.relpath(ROOT / "deploy", tmp_path))
    (tmp_path / "kustomization.yaml").write_text(example)
    rendered = render(tmp_path)
    objects = parse(rendered)
    images = {container["image"] for pod in pods(objects) for container in pod.containers}
    assert images == {f"registry.example.com/towline/towline-{service}:0.1.0" for service in SERVICES}
    assert [found["metadata"]["name"] for found in of_kind("Job", objects)] == ["migrate-0.1.0"]
    assert not of_kind("Secret", objects)
    assert "kind-only" not in rendered


def test_the_namespace_comes_first_and_nothing_comes_twice() -> None:
    """Then one `kubectl apply` is enough on an empty cluster, and a second one changes nothing."""
    objects = kind_objects()
    assert name_of(objects[0]) == "Namespace/towline"
    names = [(found["apiVersion"], name_of(found)) for found in objects]
    assert len(set(names)) == len(names)
    assert {found["metadata"].get("namespace") for found in objects[1:]} == {"towline"}
    assert not any("generateName" in found["metadata"] for found in objects)


def test_recommended_labels() -> None:
    """On every workload and its pods; selectors hold on to those that never change."""
    wanted = {f"app.kubernetes.io/{label}" for label in RECOMMENDED}
    for name in SERVICES:
        found = get(f"Deployment/{name}", kind_objects())
        for labels in (found["metadata"]["labels"], found["spec"]["template"]["metadata"]["labels"]):
            assert wanted <= labels.keys()
            assert labels["app.kubernetes.io/name"] == name
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for found in kind_objects():
        assert found["metadata"].get("labels", {}).get("app.kubernetes.io/version", version) == version
        if found["kind"] in ("Deployment", "StatefulSet"):
            selector = found["spec"]["selector"]["matchLabels"]
            assert selector.keys() == {"app.kubernetes.io/name", "app.kubernetes.io/part-of"}
            assert selector.items() <= found["spec"]["template"]["metadata"]["labels"].items()


def test_every_selector_meets_its_pods() -> None:
    """Of Services, budgets and spread constraints: exactly the pods of the same name."""
    everything = pods(kind_objects())
    selectors = [
        (name_of(found), found["spec"]["selector"].get("matchLabels", found["spec"]["selector"]))
        for found in kind_objects()
        if found["kind"] in ("Service", "PodDisruptionBudget")
    ]
    selectors += [
        (pod.owner, constraint["labelSelector"]["matchLabels"])
        for pod in everything
        for constraint in pod.spec.get("topologySpreadConstraints", [])
    ]
    assert len(selectors) >= 8
    for name, selector in selectors:
        met = [pod.owner.split("/")[1] for pod in everything if selector.items() <= pod.labels.items()]
        assert met == [name.split("/")[1].removesuffix("-metrics")], name


def test_every_reference_is_there() -> None:
    """ConfigMaps, Secrets and their keys, volumes, accounts, and the ports that Services and probes name."""
    objects = kind_objects()
    accounts = {found["metadata"]["name"] for found in of_kind("ServiceAccount", objects)}
    claims = {
        f"StatefulSet/{found['metadata']['name']}": {
            claim["metadata"]["name"] for claim in found["spec"]["volumeClaimTemplates"]
        }
        for found in of_kind("StatefulSet", objects)
    }
    for pod in pods(objects):
        assert pod.spec["serviceAccountName"] in accounts
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | claims.get(pod.owner, set())
        for container in pod.containers:
            environment(container, objects)  # raises
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [container[probe] for probe in container if probe.endswith("Probe")]
            assert {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes} <= ports
    for service in of_kind("Service", objects):
        selector = service["spec"]["selector"]
        (pod,) = [pod for pod in pods(objects) if selector.items() <= pod.labels.items()]
        ports = {port["name"] for container in pod.containers for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_images_are_pinned_and_are_not_pulled_again() -> None:
    """A cluster into which they were loaded has no registry to ask."""
    for pod in pods(kind_objects()):
        for container in pod.containers:
            assert re.fullmatch(r"[a-z0-9./-]+:[a-z0-9.-]+", container["image"])
            assert not container["image"].endswith(":latest")
            assert container["imagePullPolicy"] == "IfNotPresent"


def test_kind_opens_the_ports_that_are_documented() -> None:
    """The gateway's and the worker's; nothing else leaves the cluster."""
    services = of_kind("Service", kind_objects())
    opened = {
        service["metadata"]["name"]: port["nodePort"]
        for service in services
        for port in service["spec"]["ports"]
        if service["spec"].get("type", "ClusterIP") != "ClusterIP"
    }
    assert opened == {"gateway": 30080, "worker": 30081}


@pytest.mark.parametrize("name", SERVICES)
def test_a_roll_out_and_a_drain_leave_no_service_without_replicas(name: str) -> None:
    """Nor does either wait for ever: one replica more for the first, any number of replicas for the second."""
    objects = kind_objects()
    spec = get(f"Deployment/{name}", objects)["spec"]
    assert spec["replicas"] >= 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    budget = get(f"PodDisruptionBudget/{name}", objects)["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget
    (constraint,) = pod_of(f"Deployment/{name}", objects).spec["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


def test_what_there_is_once_gathers_on_one_node() -> None:
    """So that kind has a node that can be lost without a store; whichever of them is placed first draws the others."""
    objects = kind_objects()
    single = [pod for pod in pods(objects) if get(pod.owner, objects)["spec"].get("replicas") == 1]
    assert {pod.owner.split("/")[1] for pod in single} == {"postgres", "redis", "stand-in", "prometheus"}
    for pod in single:
        (wish,) = pod.spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        term = wish["podAffinityTerm"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        wanted = term["labelSelector"]["matchExpressions"]
        assert all(other.labels[each["key"]] in each["values"] for other in single for each in wanted)


def test_the_migration_runs_the_gateways_image_and_ends() -> None:
    """It is tried again, but not for ever, and goes by itself."""
    objects = kind_objects()
    job = get("Job/migrate", objects)["spec"]
    (migrate,) = pod_of("Job/migrate", objects).containers
    (gateway,) = pod_of("Deployment/gateway", objects).containers
    assert migrate["image"] == gateway["image"]
    assert "towline migrate" in migrate["command"][-1]
    assert job["backoffLimit"] <= 6
    assert job["activeDeadlineSeconds"] <= 3600
    assert job["ttlSecondsAfterFinished"] > 0
