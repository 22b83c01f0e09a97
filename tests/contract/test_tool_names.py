"""What a tool may be called is one rule: what a sidecar takes a worker takes, and what is announced can be called."""

import msgspec
import pytest

from towline.sidecar.tools import Registry, ToolError, tool
from towline.wire import frames
from towline.wire.api import JobSubmit
from towline.wire.threads import AgentPut
from worker.hello import read_catalogue


def is_registered(name: str) -> bool:
    """By the sidecar, when it starts."""

    def named() -> None: ...

    named.__name__ = name
    try:
        return Registry([tool(named)]).get(name) is not None
    except ToolError:
        return False


def is_taken(name: str) -> bool:
    """By the worker, when a machine announces it."""
    try:
        return bool(read_catalogue([frames.Tool(name)]))
    except frames.FrameError:
        return False


def is_callable(name: str) -> bool:
    """By a product, and may be given to an agent."""
    try:
        msgspec.convert({"name": name}, JobSubmit)
        msgspec.convert({"kind": "openai", "url": "http://model", "model": "m", "tools": [name]}, AgentPut)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(("name", "good"), [("t" * 128, True), ("t" * 129, False), ("t" * 200, False)])
def test_sidecar_worker_and_door_take_the_same_lengths(name: str, good: bool) -> None:
    assert is_registered(name) is good
    assert is_taken(name) is good
    assert is_callable(name) is good


@pytest.mark.parametrize("name", ["_private", "größe", "a b", ""])
def test_what_no_worker_takes_no_sidecar_announces(name: str) -> None:
    assert not is_taken(name)
    assert not is_registered(name)
