"""What `towline agents create` makes of its options."""

from pathlib import Path
from typing import Any

import pytest
import typer

from towline.cli.agents import OPTIONS, check_members
from towline.cli.secrets import read_secret
from towline.wire.threads import AGENT_MEMBERS, AgentKind, AgentPut

NOTHING = dict.fromkeys(OPTIONS)


@pytest.mark.parametrize(
    ("kind", "members", "option"),
    [
        ("http", {}, "--endpoint"),
        ("openai", {"url": "https://api.test"}, "--model"),
        ("echo", {"url": "https://api.test"}, "--endpoint"),
        ("http", {"url": "https://x.test", "tools": []}, "--tool and --no-tools"),
        ("http", {"url": "https://x.test", "api_key": "@key"}, "--api-key"),
        ("openai", {"url": "https://x.test", "model": "m", "signing_secret": "@key"}, "--signing-secret"),
    ],
    ids=["no endpoint", "no model", "an endpoint too many", "tools", "a key", "a secret"],
)
def test_an_option_that_is_missing_or_too_many_is_named(kind: AgentKind, members: dict[str, Any], option: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        check_members(kind, {**NOTHING, **members})
    assert raised.value.param_hint == option


@pytest.mark.parametrize("kind", sorted(AGENT_MEMBERS))
def test_what_passes_here_passes_there(kind: AgentKind) -> None:
    """The check names options, the body's own names members; both know the same."""
    needed, optional = AGENT_MEMBERS[kind]
    for given in (needed, needed | optional):
        members = NOTHING | {name: ["x"] if name == "tools" else "x" for name in given}
        check_members(kind, members)
        assert AgentPut(kind, **members).kind == kind


def test_a_secret_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("from a file\r\n")
    monkeypatch.setenv("KEY", "from a variable")
    assert read_secret(f"@{tmp_path / 'key'}", "--api-key") == "from a file"
    assert read_secret("env:KEY", "--api-key") == "from a variable"


@pytest.mark.parametrize("where", ["sk-live-123", "@/no/such/file", "env:NO_SUCH_VARIABLE"])
def test_a_secret_that_is_given_otherwise_is_not_repeated(where: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        read_secret(where, "--api-key")
    assert raised.value.param_hint == "--api-key"
    assert "sk-live-123" not in str(raised.value)
