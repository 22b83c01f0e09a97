"""What `kubectl get pods -o json` says of pods (PURE)."""

from typing import NamedTuple

import msgspec


class Pod(NamedTuple):
    """One pod of one container.

    Attributes:
        node: where it runs; empty: nowhere yet.
        container: its container's id, without the runtime's name; empty: there is none yet.
        is_running: its container is.
        is_ready: it gets what its Service takes in.
        is_leaving: it was deleted and is not gone yet.
        exit_code: of its container, if that has ended for good; else None.
    """

    name: str
    node: str
    container: str
    is_running: bool
    is_ready: bool
    is_leaving: bool
    exit_code: int | None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    deletion_timestamp: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class _Ended(msgspec.Struct, rename="camel"):
    exit_code: int


class _State(msgspec.Struct, rename="camel"):
    running: dict[str, str] | None = None
    terminated: _Ended | None = None


class _Container(msgspec.Struct):
    id: str = msgspec.field(name="containerID", default="")
    state: _State = msgspec.field(default_factory=_State)


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct, rename="camel"):
    conditions: list[_Condition] = []
    container_statuses: list[_Container] = []


class _Item(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _List(msgspec.Struct):
    items: list[_Item]


def read_pods(text: str) -> list[Pod]:
    """Read a list of pods, by name."""
    return sorted(_pod(item) for item in msgspec.json.decode(text, type=_List).items)


def read_pod(text: str) -> Pod:
    """Read one pod."""
    return _pod(msgspec.json.decode(text, type=_Item))


def _pod(item: _Item) -> Pod:
    container = (item.status.container_statuses or [_Container()])[0]
    ended = container.state.terminated
    return Pod(
        name=item.metadata.name,
        node=item.spec.node_name,
        container=container.id.rpartition("/")[2],
        is_running=container.state.running is not None,
        is_ready=any(each.type == "Ready" and each.status == "True" for each in item.status.conditions),
        is_leaving=item.metadata.deletion_timestamp is not None,
        exit_code=None if ended is None else ended.exit_code,
    )
