"""Pods fit the `restricted` profile of the Pod Security Standards; network policies let through what has to pass.

Both are judged here as a cluster judges them, so that neither needs one.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from manifests import Object, Pod, get, kind_objects, of_kind, pod_of, pods

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
}
HOOKS = ("startupProbe", "livenessProbe", "readinessProbe")


def violations(pod: Pod) -> list[str]:
    """What the `restricted` profile refuses in a pod; empty: it is admitted."""
    spec = pod.spec
    security: Object = spec.get("securityContext", {})
    found = [flag for flag in ("hostNetwork", "hostPID", "hostIPC") if spec.get(flag)]
    for volume in spec.get("volumes", []):
        found += [f"volume {kind}" for kind in volume.keys() - {"name"} - VOLUMES]
    found += [f"sysctl {s['name']}" for s in security.get("sysctls", []) if s["name"] not in SYSCTLS]
    if security.get("runAsUser") == 0:
        found.append("runAsUser 0")
    for container in pod.containers:
        own: Object = container.get("securityContext", {})
        both = security | own
        capabilities: Object = own.get("capabilities", {})
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "appArmorProfile": both.get("appArmorProfile", {}).get("type") != "Unconfined",
            "capabilities.drop": "ALL" in capabilities.get("drop", []),
            "capabilities.add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "procMount": own.get("procMount", "Default") == "Default",
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
            "probe host": not any(
                "host" in container.get(hook, {}).get(how, {}) for hook in HOOKS for how in ("httpGet", "tcpSocket")
            ),
        }
        found += [f"{container['name']}: {name}" for name, fits in checks.items() if not fits]
    return found


def _set(path: str, value: Any) -> Callable[[Object], None]:
    """Change one field of a pod's spec; `container.` stands for its first container."""

    def change(spec: Object) -> None:
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = spec["containers"][0] if parent == "container" else place.setdefault(parent, {})
        place[last] = value

    return change


@pytest.mark.parametrize("pod", pods(kind_objects()), ids=lambda pod: pod.owner)
def test_every_pod_is_admitted(pod: Pod) -> None:
    """And none can write to its own root, which the profile does not ask for."""
    assert violations(pod) == []
    assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in pod.containers)


@pytest.mark.parametrize(
    "change",
    [
        _set("hostNetwork", True),
        _set("volumes", [{"name": "host", "hostPath": {"path": "/"}}]),
        _set("securityContext.runAsNonRoot", False),
        _set("securityContext.runAsUser", 0),
        _set("securityContext.seccompProfile", {"type": "Unconfined"}),
        _set("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
        _set("container.securityContext.privileged", True),
        _set("container.securityContext.runAsUser", 0),
        _set("container.securityContext.allowPrivilegeEscalation", None),
        _set("container.securityContext.capabilities", {"drop": ["KILL"]}),
        _set("container.securityContext.capabilities", {"drop": ["ALL"], "add": ["NET_ADMIN"]}),
        _set("container.ports", [{"containerPort": 1, "hostPort": 1}]),
        _set("container.livenessProbe", {"httpGet": {"host": "10.0.0.1", "port": 1}}),
    ],
)
def test_a_looser_pod_is_not(change: Callable[[Object], None]) -> None:
    """Each field of the profile is looked at."""
    pod = copy.deepcopy(pod_of("Deployment/gateway", kind_objects()))
    change(pod.spec)
    assert len(violations(pod)) >= 1


def test_the_namespace_asks_for_the_same() -> None:
    """Whatever is started there later, too."""
    labels = get("Namespace/towline", kind_objects())["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_no_pod_gets_a_token_of_the_cluster_or_its_services_addresses() -> None:
    """Each has an account of its own, to which rights could be given without giving them to others."""
    everything = pods(kind_objects())
    for pod in everything:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
        assert pod.spec["serviceAccountName"] == pod.owner.split("/")[1]
    for account in of_kind("ServiceAccount", kind_objects()):
        assert account["automountServiceAccountToken"] is False


# ---- network policies


def test_every_pod_is_under_a_default_that_lets_nothing_through() -> None:
    """The default names no pods, so it holds for those of tomorrow."""
    default = get("NetworkPolicy/default-deny", kind_objects())["spec"]
    assert default["podSelector"] == {}
    assert set(default["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in default


@pytest.mark.parametrize(
    ("source", "target", "port", "passes"),
    [
        ("elsewhere", "gateway", 8080, True),
        ("elsewhere", "worker", 8081, True),
        ("elsewhere", "gateway", 9090, False),
        ("elsewhere", "worker", 9090, False),
        ("elsewhere", "worker", 8080, False),
        ("elsewhere", "redis", 6379, False),
        ("elsewhere", "postgres", 5432, False),
        ("monitoring", "gateway", 9090, True),
        ("monitoring", "worker", 9090, True),
        ("monitoring", "relay", 9090, True),
        ("monitoring", "redis", 6379, False),
        ("prometheus", "gateway", 9090, True),
        ("prometheus", "relay", 9090, True),
        ("prometheus", "gateway", 8080, False),
        ("prometheus", "postgres", 5432, False),
        ("prometheus", "world", 443, False),
        ("elsewhere", "prometheus", 9090, False),
        ("gateway", "redis", 6379, True),
        ("gateway", "postgres", 5432, True),
        ("gateway", "worker", 8081, False),
        ("gateway", "stand-in", 9102, False),
        ("gateway", "world", 443, False),
        ("worker", "redis", 6379, True),
        ("worker", "postgres", 5432, True),
        ("worker", "stand-in", 9102, True),
        ("worker", "world", 443, True),
        ("worker", "metadata", 80, False),
        ("relay", "redis", 6379, True),
        ("relay", "postgres", 5432, True),
        ("relay", "stand-in", 9100, True),
        ("relay", "world", 443, True),
        ("migrate", "postgres", 5432, True),
        ("migrate", "redis", 6379, False),
        ("redis", "postgres", 5432, False),
        ("redis", "world", 443, False),
        ("postgres", "world", 443, False),
        ("stand-in", "gateway", 8080, True),
        ("stand-in", "worker", 8081, True),
        ("stand-in", "postgres", 5432, False),
        ("redis", "world", 53, True),
    ],
)
def test_who_reaches_whom(source: str, target: str, port: int, passes: bool) -> None:
    """`elsewhere` and `monitoring` are namespaces, `world` is outside, `metadata` where clouds keep credentials."""
    assert (leaves(source, target, port) and enters(source, target, port)) is passes


def leaves(source: str, target: str, port: int) -> bool:
    """Whether the source's policies let it out."""
    if source in ("elsewhere", "monitoring"):
        return True
    return _passes(_pod(source), "Egress", "to", target, port)


def enters(source: str, target: str, port: int) -> bool:
    """Whether the target's policies let it in."""
    if target in ("world", "metadata"):
        return True
    return _passes(_pod(target), "Ingress", "from", source, port)


def _passes(pod: Pod, way: str, side: str, peer: str, port: int) -> bool:
    policies = [found["spec"] for found in of_kind("NetworkPolicy", kind_objects())]
    holding = [p for p in policies if way in p["policyTypes"] and _selects(p["podSelector"], pod.labels)]
    rules = [rule for policy in holding for rule in policy.get(way.lower(), [])]
    listener = pod if way == "Ingress" else _pod(peer) if peer not in ("world", "metadata") else None
    return not holding or any(
        (side not in rule or any(_is(peer, who) for who in rule[side]))
        and ("ports" not in rule or any(_number(p["port"], listener) == port for p in rule["ports"]))
        for rule in rules
    )


def _is(peer: str, who: Object) -> bool:
    if "ipBlock" in who:
        # An address range does not mean pods to every network plugin, so it is never what a pod is reached by.
        link_local = who["ipBlock"]["cidr"] == "0.0.0.0/0" and "169.254.0.0/16" not in who["ipBlock"].get("except", [])
        return peer == "world" or (peer == "metadata" and link_local)
    if "namespaceSelector" in who:
        return _selects(who["namespaceSelector"], {"kubernetes.io/metadata.name": peer})
    return peer in _names() and _selects(who["podSelector"], _pod(peer).labels)


def _selects(selector: Object, labels: Any) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def _number(port: int | str, pod: Pod | None) -> int | None:
    if isinstance(port, int):
        return port
    ports = {} if pod is None else {p["name"]: p["containerPort"] for c in pod.containers for p in c.get("ports", [])}
    return ports.get(port)


def _names() -> dict[str, Pod]:
    return {pod.owner.split("/")[1]: pod for pod in pods(kind_objects())}


def _pod(name: str) -> Pod:
    return _names()[name]
