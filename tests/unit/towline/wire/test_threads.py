"""Bodies of agents, threads and turns: what the door lets through."""

from typing import Any

import msgspec
import pytest

from towline.wire.threads import (
    AgentPut,
    EntryPost,
    ThreadCreate,
)

HTTP = {"kind": "http", "url": "https://product.test/turns"}
OPENAI = {"kind": "openai", "url": "https://api.test/v1", "model": "m"}


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "echo"},
        {"kind": "echo", "url": None, "turn_cap_s": 10},
        HTTP,
        {**HTTP, "signing_secret": "s3cret"},
        OPENAI,
        {**OPENAI, "instructions": "", "tools": [], "api_key": "sk-1"},
    ],
    ids=["echo", "echo with nulls", "http", "http signed", "openai", "openai with all"],
)
def test_an_agent_as_its_kind_has_it(body: dict[str, Any]) -> None:
    assert msgspec.convert(body, AgentPut).kind == body["kind"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"kind": "echo", "url": "https://x.test"}, "kind 'echo' has no 'url'"),
        ({"kind": "http"}, "kind 'http' needs 'url'"),
        ({**HTTP, "model": "m"}, "kind 'http' has no 'model'"),
        ({**HTTP, "api_key": "k"}, "kind 'http' has no 'api_key'"),
        ({"kind": "openai", "url": "https://api.test/v1"}, "kind 'openai' needs 'model'"),
        ({**OPENAI, "signing_secret": "k"}, "kind 'openai' has no 'signing_secret'"),
        ({"kind": "human"}, "human"),
        ({"kind": "echo", "name": "x"}, "name"),
        ({"kind": "echo", "turn_cap_s": 9.9}, "turn_cap_s"),
        ({"kind": "echo", "turn_cap_s": 3600.5}, "turn_cap_s"),
        ({**OPENAI, "api_key": "two words"}, "api_key"),
        ({**OPENAI, "api_key": "line\n"}, "api_key"),
        ({**OPENAI, "tools": [""]}, "tools"),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, dict) else value,
)
def test_an_agent_that_is_refused_says_why(body: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(body, AgentPut)


@pytest.mark.parametrize(
    ("struct", "body"),
    [
        (EntryPost, {"text": ""}),
        (EntryPost, {"text": "x", "on_busy": "wait"}),
        (EntryPost, {"text": "x", "role": "agent"}),
        (ThreadCreate, {}),
        (ThreadCreate, {"agent": "a/b"}),
        (ThreadCreate, {"agent": "a", "user": ""}),
        (ThreadCreate, {"agent": "a", "model": ""}),
        (ThreadCreate, {"agent": "a", "thread": "mine"}),
    ],
    ids=["no text", "no such on_busy", "a role", "no agent", "no agent's id", "no user's id", "no model", "an id"],
)
def test_threads_and_entries_that_are_refused(struct: type[msgspec.Struct], body: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(body, struct)
