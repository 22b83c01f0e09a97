"""The wheel `towline` alone: what it declares is all that it needs."""

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "libs" / "towline"

# Imports every module and prints the help, with only those top-level modules to be found that it is told. Started
# without `site`: what an editable installation puts on the path is not there.
ALONE = """
import importlib, json, pkgutil, sys

paths, hidden = json.loads(sys.argv[1])
sys.path += paths

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not declared", name=name)

sys.meta_path.insert(0, Hide())
import towline
for module in pkgutil.walk_packages(towline.__path__, "towline."):
    if module.name != "towline.cli.__main__":
        importlib.import_module(module.name)
sys.argv = ["towline", "--help"]
towline.cli.main()
"""


def closure(requirements: list[str]) -> set[str]:
    """The distributions that these bring along."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            todo += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_the_package_declares_is_all_it_needs(tmp_path: Path) -> None:
    """Client, sidecar and command line, where nothing else is installed."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    there = closure(project["dependencies"])
    hidden = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module != "towline" and there.isdisjoint(canonical(owner) for owner in owners)
    ]
    assert {"msgspec", "typer"} <= there
    assert {"hypothesis", "pytest"} <= set(hidden)
    paths = [str(PROJECT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    alone = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, json.dumps([paths, hidden])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert alone.returncode == 0, alone.stderr
    nouns = project["entry-points"]["towline.commands"]
    assert [noun for noun in nouns if f" {noun} " not in alone.stdout] == []
    assert " migrate " not in alone.stdout
