"""The root command: which commands it has depends on what is installed."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from towline.cli import GROUP, root


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def names(app: typer.Typer) -> set[str | None]:
    return {group.name for group in app.registered_groups} | {command.name for command in app.registered_commands}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an importable module with apps of both kinds, and of modules that import what is not there."""
    (tmp_path / "some_commands.py").write_text(
        "import typer\n"
        "nouns = typer.Typer()\n"
        "@nouns.command()\n"
        "def only(): ...\n"
        "verb = typer.Typer()\n"
        "@verb.command('verb')\n"
        "def verb_(): print('done')\n"
    )
    (tmp_path / "some_commands_of_a_service.py").write_text("import gateway.no_such_module\n")
    (tmp_path / "some_broken_commands.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_commands"
    for name in ("some_commands", "some_commands_of_a_service", "some_broken_commands"):
        sys.modules.pop(name, None)


def test_an_app_becomes_a_group_and_a_command_of_its_own_name_a_command(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = root([entry_point("nouns", f"{module}:nouns"), entry_point("verb", f"{module}:verb")])
    assert [group.name for group in app.registered_groups] == ["nouns"]
    assert [command.name for command in app.registered_commands] == ["verb"]
    with pytest.raises(SystemExit) as ended:
        app(["verb"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "done\n"


def test_commands_of_a_distribution_that_is_not_installed_are_left_out(module: str) -> None:
    app = root(
        [
            entry_point("up", "harness.no_such_module:up"),
            entry_point("drain", "some_commands_of_a_service:drain"),
            entry_point("nouns", f"{module}:nouns"),
        ]
    )
    assert names(app) == {"nouns"}


def test_a_command_that_lacks_a_library_says_so(module: str) -> None:
    """Otherwise a broken installation would look like a smaller one."""
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        root([entry_point("broken", "some_broken_commands:app")])


def test_all_commands_are_listed_with_the_exit_codes_and_so_are_those_of_a_noun(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = root([entry_point("nouns", f"{module}:nouns"), entry_point("verb", f"{module}:verb")])
    with pytest.raises(SystemExit):
        app(["--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("nouns", "verb", "Exit codes"))
    with pytest.raises(SystemExit):
        app(["nouns", "--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("only", "Exit codes"))
