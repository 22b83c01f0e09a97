"""What `docker inspect` said of one container that ran, was killed, and was started again (shortened)."""

import json

import msgspec
import pytest

from harness.drills.containers import Container, read_containers

ID = "45dcf2f5118e660cee540a82974d56ef93a9a54142a61d8608f59170f214e885"
RUNNING = {
    "Id": ID,
    "Name": "/towline-worker-2",
    "State": {
        "Status": "running",
        "Running": True,
        "Paused": False,
        "Pid": 26397,
        "ExitCode": 0,
        "StartedAt": "2026-11-30T02:45:33.826613103Z",
        "FinishedAt": "0001-01-01T00:00:00Z",
    },
    "Config": {"Labels": {"com.docker.compose.container-number": "2", "com.docker.compose.service": "worker"}},
    "NetworkSettings": {
        "Ports": {
            "8081/tcp": [{"HostIp": "127.0.0.1", "HostPort": "32769"}],
            "9090/tcp": [{"HostIp": "127.0.0.1", "HostPort": "32768"}],
            "9443/tcp": None,
        }
    },
}
KILLED = RUNNING | {
    "State": {
        "Status": "exited",
        "Running": False,
        "Paused": False,
        "Pid": 0,
        "ExitCode": 137,
        "StartedAt": "2026-11-30T02:45:33.826613103Z",
        "FinishedAt": "2026-11-30T02:45:36.031726246Z",
    },
    "NetworkSettings": {"Ports": {}},
}


def read(*containers: object) -> list[Container]:
    return read_containers(json.dumps(containers))


def test_one_that_runs_has_its_published_ports() -> None:
    (container,) = read(RUNNING)
    assert container == Container(
        id=ID,
        name="towline-worker-2",
        number=2,
        is_running=True,
        is_paused=False,
        exit_code=0,
        started_at="2026-11-30T02:45:33.826613103Z",
        ports={8081: 32769, 9090: 32768},
    )


def test_one_that_was_killed_has_an_exit_code_and_no_ports() -> None:
    (container,) = read(KILLED)
    assert (container.is_running, container.exit_code, container.ports) == (False, 137, {})


def test_one_that_is_paused_runs() -> None:
    (container,) = read(RUNNING | {"State": {**RUNNING["State"], "Status": "paused", "Paused": True}})  # type: ignore[dict-item]
    assert (container.is_running, container.is_paused) == (True, True)


def test_they_are_in_the_order_of_their_numbers() -> None:
    others = [
        RUNNING | {"Id": str(number), "Config": {"Labels": {"com.docker.compose.container-number": str(number)}}}
        for number in (10, 9)
    ]
    assert [container.number for container in read(*others, RUNNING)] == [2, 9, 10]


def test_one_that_compose_did_not_make_has_no_number() -> None:
    (container,) = read(RUNNING | {"Config": {"Labels": None}})
    assert container.number == 0


def test_an_answer_of_another_shape_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        read_containers('[{"Id": "x"}]')
