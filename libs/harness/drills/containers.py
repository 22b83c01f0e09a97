"""What `docker inspect` says of containers (PURE)."""

from typing import NamedTuple

import msgspec


class Container(NamedTuple):
    """One container of a service.

    Attributes:
        exit_code: of its last run; 0 also while it runs.
        started_at: its last start, as Docker writes times.
        ports: host's loopback ports by the container's own; only those of a running container are there.
    """

    id: str
    name: str
    number: int
    is_running: bool
    is_paused: bool
    exit_code: int
    started_at: str
    ports: dict[int, int]


class _State(msgspec.Struct, rename="pascal"):
    running: bool
    paused: bool
    exit_code: int
    started_at: str


class _Config(msgspec.Struct, rename="pascal"):
    labels: dict[str, str] | None = None


class _Binding(msgspec.Struct, rename="pascal"):
    host_port: str


class _Network(msgspec.Struct, rename="pascal"):
    ports: dict[str, list[_Binding] | None] | None = None


class _Inspected(msgspec.Struct, rename="pascal"):
    id: str
    name: str
    state: _State
    config: _Config
    network_settings: _Network


def read_containers(text: str) -> list[Container]:
    """Read the answer of `docker inspect`, in the order of their numbers."""
    found = [
        Container(
            each.id,
            each.name.removeprefix("/"),
            int((each.config.labels or {}).get("com.docker.compose.container-number", "0")),
            each.state.running,
            each.state.paused,
            each.state.exit_code,
            each.state.started_at,
            _ports(each.network_settings),
        )
        for each in msgspec.json.decode(text, type=list[_Inspected])
    ]
    return sorted(found, key=lambda container: container.number)


def _ports(network: _Network) -> dict[int, int]:
    published = {}
    for name, bindings in (network.ports or {}).items():
        port, _, protocol = name.partition("/")
        if bindings and protocol == "tcp":
            published[int(port)] = int(bindings[0].host_port)
    return published
