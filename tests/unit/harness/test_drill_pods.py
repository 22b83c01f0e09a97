"""What `kubectl get pods -o json` said of pods in several states (shortened)."""

import json

import msgspec
import pytest

from harness.drills.pods import Pod, read_pod, read_pods

SERVING = {
    "metadata": {"name": "gateway-9599ccdd6-2b2hj"},
    "spec": {"nodeName": "towline-kind-worker"},
    "status": {
        "phase": "Running",
        "conditions": [
            {"lastTransitionTime": "2026-11-30T02:53:51Z", "status": "True", "type": "Initialized"},
            {"lastTransitionTime": "2026-11-30T02:54:10Z", "status": "True", "type": "Ready"},
        ],
        "containerStatuses": [
            {
                "containerID": "containerd://f6ca6fc3c316acf04ddb92770d57675a941a2cb41a3fc1e69ae5c961327a5348",
                "name": "gateway",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": "2026-11-30T02:53:56Z"}},
            }
        ],
    },
}
LEAVING = SERVING | {
    "metadata": {"name": "gateway-9599ccdd6-2b2hj", "deletionTimestamp": "2026-11-30T03:01:00Z"},
}
# Kept by a finalizer after its container has ended.
LEFT = LEAVING | {
    "status": {
        "phase": "Running",
        "conditions": [{"lastTransitionTime": "2026-11-30T03:00:35Z", "status": "False", "type": "Ready"}],
        "containerStatuses": [
            {
                "containerID": "containerd://f6ca6fc3c316acf04ddb92770d57675a941a2cb41a3fc1e69ae5c961327a5348",
                "name": "gateway",
                "ready": False,
                "state": {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": "2026-11-30T02:53:56Z"}},
            }
        ],
    }
}
UNSCHEDULED = {"metadata": {"name": "gateway-9599ccdd6-new"}, "spec": {}, "status": {"phase": "Pending"}}


def read(pod: object) -> Pod:
    return read_pod(json.dumps(pod))


def test_one_that_serves() -> None:
    assert read(SERVING) == Pod(
        name="gateway-9599ccdd6-2b2hj",
        node="towline-kind-worker",
        container="f6ca6fc3c316acf04ddb92770d57675a941a2cb41a3fc1e69ae5c961327a5348",
        is_running=True,
        is_ready=True,
        is_leaving=False,
        exit_code=None,
    )


def test_one_that_leaves_is_ready_until_it_says_otherwise() -> None:
    pod = read(LEAVING)
    assert (pod.is_leaving, pod.is_ready, pod.is_running) == (True, True, True)


def test_one_that_has_left_has_an_exit_code() -> None:
    pod = read(LEFT)
    assert (pod.is_leaving, pod.is_ready, pod.is_running, pod.exit_code) == (True, False, False, 0)


def test_one_that_is_nowhere_yet() -> None:
    pod = read(UNSCHEDULED)
    assert (pod.node, pod.container, pod.is_running, pod.is_ready, pod.exit_code) == ("", "", False, False, None)


def test_a_list_is_in_the_order_of_the_names() -> None:
    pods = read_pods(json.dumps({"kind": "List", "items": [UNSCHEDULED, SERVING]}))
    assert [pod.name for pod in pods] == ["gateway-9599ccdd6-2b2hj", "gateway-9599ccdd6-new"]


def test_an_answer_of_another_shape_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        read_pods('{"kind": "Status"}')
