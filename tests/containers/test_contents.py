"""What is inside an image, and what is not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from image_containers import Containers, image_name
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = {"towline", "towline-services"}
services = pytest.mark.parametrize("service", ["gateway", "worker", "relay"])

# Run inside: it prints one JSON document.
LOOK = """
import importlib.metadata, importlib.util, json, os, shutil, sysconfig
from pathlib import Path
site = Path(sysconfig.get_path("purelib"))
missing = [str(s) for s in site.rglob("*.py") if not Path(importlib.util.cache_from_source(str(s))).exists()]
writable = [
    os.path.join(folder, name)
    for top in ("/opt", "/usr", "/etc")
    for folder, folders, files in os.walk(top)
    for name in (*folders, *files)
    if not os.path.islink(os.path.join(folder, name)) and os.access(os.path.join(folder, name), os.W_OK)
]
print(json.dumps({
    "installed": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()},
    "importable": [n for n in ("pip", "setuptools", "hatchling", "pytest", "hypothesis", "mypy", "harness", "tests")
                   if importlib.util.find_spec(n)],
    "programs": [n for n in ("cc", "gcc", "g++", "clang", "make", "cargo", "go", "git", "curl", "wget")
                 if shutil.which(n)],
    "left_over": [p for p in ("/build", "/wheels", "/code", os.path.expanduser("~root/.cache")) if os.path.exists(p)],
    "uncompiled": missing,
    "writable": writable,
    "environment": sorted(os.environ),
}))
"""


def look(containers: Containers, image: str) -> Any:
    container = containers.start(image, "-c", LOOK, options=["--entrypoint", "python"])
    assert container.exit_code(60) == 0, container.logs()
    return json.loads(container.logs())


def pins(name: str) -> dict[str, Requirement]:
    text = (ROOT / f"requirements/{name}.txt").read_text()
    found = [Requirement(line.rstrip(" \\")) for line in text.splitlines() if re.match(r"[a-z0-9]", line)]
    return {canonicalize_name(each.name): each for each in found}


@services
def test_a_service_holds_what_is_pinned_for_it_and_nothing_else(containers: Containers, service: str) -> None:
    seen = look(containers, service)
    pinned = pins(service)
    installed = {canonicalize_name(name): version for name, version in seen["installed"].items()}
    assert set(installed) >= OURS
    assert set(installed) - OURS <= set(pinned)
    for name, requirement in pinned.items():
        if name in installed:
            assert requirement.specifier.contains(installed[name]), name
        else:
            assert requirement.marker is not None, f"{name} is pinned and not installed"
    assert seen["importable"] == []
    assert seen["programs"] == []
    assert seen["left_over"] == []


@services
def test_its_code_is_compiled_and_not_its_users_to_change(containers: Containers, service: str) -> None:
    """A read-only root takes no compiled files later: each start would compile everything anew."""
    seen = look(containers, service)
    assert seen["uncompiled"] == []
    assert seen["writable"] == []


@services
def test_only_the_worker_brings_a_client_of_models(containers: Containers, service: str) -> None:
    assert ("openai" in look(containers, service)["installed"]) == (service == "worker")


def test_the_development_image_can_run_tests_and_every_service(containers: Containers) -> None:
    seen = look(containers, "dev")
    assert seen["importable"] == ["pytest", "hypothesis", "harness"]
    assert set(pins("harness")) >= {name for service in ("gateway", "worker", "relay") for name in pins(service)}


@services
def test_an_image_says_which_commit_it_is(containers: Containers, service: str) -> None:
    image = containers.engine.inspect("image", image_name(service))["Config"]
    labels = image["Labels"]
    revision = labels["org.opencontainers.image.revision"]
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", revision)
    assert f"TOWLINE_REVISION={revision}" in image["Env"]
    assert labels["org.opencontainers.image.title"] == f"towline-{service}"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", labels["org.opencontainers.image.version"])
    assert image["User"] == "10001:10001"
