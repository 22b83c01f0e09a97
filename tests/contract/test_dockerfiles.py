"""What the Dockerfiles promise, read from their text: no engine is needed.

The same images, run: `tests/containers/`.
"""

import importlib.util
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from common.process import probe
from common.process.settings import CommonSettings
from gateway.settings import GatewaySettings
from relay.settings import RelaySettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
DOCKERFILES = {
    "gateway": ROOT / "services/gateway/Dockerfile",
    "worker": ROOT / "services/worker/Dockerfile",
    "relay": ROOT / "services/relay/Dockerfile",
    "dev": ROOT / "libs/harness/Dockerfile",
}
SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "relay": RelaySettings,
}
PUBLIC_PORT = {"gateway": ["http_port"], "worker": ["bridge_port"], "relay": []}
PINS = {"gateway": "gateway", "worker": "worker", "relay": "relay", "dev": "harness"}
# Anything else that an image is told stays in it for everybody to read.
ARGUMENTS = {"BASE_IMAGE", "VERSION", "REVISION"}
VARIABLES = {"PATH", "TOWLINE_REVISION", "PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
BUILD_VARIABLES = {"PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_CACHE_DIR", "PIP_NO_COMPILE", "PIP_ROOT_USER_ACTION"}

images = pytest.mark.parametrize("image", DOCKERFILES)
services = pytest.mark.parametrize("service", SETTINGS)


class Instruction(NamedTuple):
    word: str
    rest: str


def stages(image: str) -> list[list[Instruction]]:
    """The instructions of each stage, its FROM first; what stands before the first FROM is left out."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILES[image].read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[Instruction]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(word, " ".join(rest.split())))
    return found


def last_stage(image: str) -> list[Instruction]:
    """What the image itself is made of; the other stages only make parts of it."""
    return stages(image)[-1]


def only(instructions: list[Instruction], word: str) -> str:
    (found,) = [instruction.rest for instruction in instructions if instruction.word == word]
    return found


def exec_form(text: str) -> list[str]:
    """An argument vector, not a line for a shell, which would be process 1 and keep the signals for itself."""
    argv: Any = json.loads(text)
    assert isinstance(argv, list)
    return argv


def variables(instructions: list[Instruction], word: str) -> dict[str, str]:
    pairs = [re.findall(r'([\w.]+)=("[^"]*"|\S+)', each.rest) for each in instructions if each.word == word]
    return {name: value.strip('"') for found in pairs for name, value in found}


def pins_in(name: str) -> set[tuple[str, str]]:
    """Name and version of everything that `requirements/{name}.txt` holds."""
    text = (ROOT / f"requirements/{name}.txt").read_text()
    return {
        (canonicalize_name(each), version) for each, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    }


@images
def test_every_base_is_the_argument_and_no_name_floats(image: str) -> None:
    made = {"${BASE_IMAGE}"}
    for stage in stages(image):
        base, _, name = stage[0].rest.partition(" AS ")
        assert base in made
        made.add(name)
    text = DOCKERFILES[image].read_text()
    assert re.search(r"^ARG BASE_IMAGE=python:3\.\d+-slim$", text, flags=re.MULTILINE)
    assert "latest" not in text
    assert not re.search(r"^#\s*syntax=", text), "asks for an image that not every engine and not every site has"


@images
def test_it_runs_as_a_numbered_user_that_owns_nothing(image: str) -> None:
    """By number: `runAsNonRoot` of Kubernetes cannot know who a name is."""
    stage = last_stage(image)
    assert only(stage, "USER") == "10001:10001"
    after = stage[[instruction.word for instruction in stage].index("USER") :]
    assert not {"COPY", "ADD", "RUN"} & {instruction.word for instruction in after}
    assert not any("--chown" in instruction.rest for instruction in stage)


@services
def test_the_service_is_process_1_and_gets_its_signals(service: str) -> None:
    stage = last_stage(service)
    assert exec_form(only(stage, "ENTRYPOINT")) == ["python", "-m", service]
    assert only(stage, "STOPSIGNAL") == "SIGTERM"
    assert "CMD" not in {instruction.word for instruction in stage}


def test_the_development_image_starts_nothing_by_itself() -> None:
    stage = last_stage("dev")
    assert exec_form(only(stage, "CMD")) == ["towline", "--help"]
    assert not {"ENTRYPOINT", "HEALTHCHECK", "EXPOSE"} & {instruction.word for instruction in stage}


@services
def test_its_health_check_ends_before_the_engine_ends_it(service: str) -> None:
    options, _, command = only(last_stage(service), "HEALTHCHECK").partition(" CMD ")
    python, flag, module = exec_form(command)
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    timeout = re.search(r"--timeout=(\d+)s", options)
    assert timeout is not None
    assert float(timeout[1]) > probe.TIMEOUT_S


@services
def test_the_ports_are_those_that_the_settings_have(service: str) -> None:
    fields = SETTINGS[service].model_fields
    expected = [fields[name].default for name in (*PUBLIC_PORT[service], "admin_port")]
    assert [int(port) for port in only(last_stage(service), "EXPOSE").split()] == expected
    assert fields["admin_port"].default == probe.PORT


@images
def test_the_labels_say_what_it_is(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = variables(last_stage(image), "LABEL")
    prefix = "org.opencontainers.image."
    assert labels.pop(f"{prefix}description")
    assert labels == {
        f"{prefix}title": f"towline-{image}",
        f"{prefix}version": "${VERSION}",
        f"{prefix}revision": "${REVISION}",
        f"{prefix}licenses": project["license"],
    }


@images
def test_it_is_told_nothing_that_could_be_a_secret(image: str) -> None:
    text = DOCKERFILES[image].read_text()
    assert set(re.findall(r"^ARG (\w+)", text, flags=re.MULTILINE)) <= ARGUMENTS
    *building, running = stages(image)
    assert set(variables(running, "ENV")) <= VARIABLES
    assert {name for stage in building for name in variables(stage, "ENV")} <= BUILD_VARIABLES
    assert "--mount" not in text, "older engines know no mounts of a build"


@images
def test_nothing_is_installed_that_is_not_pinned_by_hash(image: str) -> None:
    commands = [each.rest for stage in stages(image) for each in stage if each.word == "RUN"]
    installs = [part for command in commands for part in command.split("&&") if " install " in part and "pip" in part]
    assert len(installs) == 3  # what makes wheels, what others wrote, our own wheels
    for install in installs:
        assert "--require-hashes" in install or {"--no-deps", "--no-index"} <= set(install.split())
    assert not re.search(r"\b(apt|apt-get|apk|curl|wget|git)\b", " ".join(commands))
    assert "ADD" not in {each.word for stage in stages(image) for each in stage}


@images
def test_each_pins_its_own_and_every_pin_has_a_hash(image: str) -> None:
    text = DOCKERFILES[image].read_text()
    own = f"requirements/{PINS[image]}.txt"
    assert set(re.findall(r"requirements/\w+\.txt", text)) == {own, "requirements/build.txt"}
    for name in (own, "requirements/build.txt"):
        entries = re.split(r"\n(?=\S)", (ROOT / name).read_text())
        pins = [entry for entry in entries if "==" in entry and not entry.startswith("#")]
        assert pins
        assert all("--hash=sha256:" in entry for entry in pins)


@pytest.mark.parametrize("name", [*PINS.values(), "build"])
def test_what_is_shipped_is_what_is_tested(name: str) -> None:
    """`make test` runs on dev.txt: another version of anything would be shipped unseen."""
    assert pins_in(name)
    assert pins_in(name) <= pins_in("dev")


@services
def test_it_gets_its_own_extra_and_no_other(service: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    library = tomllib.loads((ROOT / "libs/towline/pyproject.toml").read_text())["project"]

    def asked(requirements: list[str]) -> set[str]:
        return {canonicalize_name(Requirement(each).name) for each in requirements}

    extras = {name: asked(project["optional-dependencies"][name]) for name in SETTINGS}
    wanted = asked(project["dependencies"]) | asked(library["dependencies"]) | extras[service]
    pinned = {name for name, _ in pins_in(PINS[service])}
    assert wanted - {"towline"} <= pinned
    others = set[str]().union(*extras.values()) - wanted
    assert others, "the extras do not differ, so this proves nothing"
    assert not others & pinned
    assert not asked(["pytest", "hypothesis", "mypy", "hatchling"]) & pinned


def test_the_wheels_are_made_by_the_same_lines_everywhere() -> None:
    """So that an engine makes them once: the cache goes by the instructions."""
    made = [stages(image)[0] for image in DOCKERFILES]
    assert made[0][0].rest == "${BASE_IMAGE} AS wheels"
    assert all(stage == made[0] for stage in made)


@images
def test_the_builder_may_read_what_is_copied_and_nothing_else(image: str) -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for stage in stages(image)
        for each in stage
        if each.word == "COPY" and not each.rest.startswith("--from")
        for source in each.rest.split()[:-1]
    }
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert source.split("/")[0] in allowed
    assert not allowed & {"tests", "docs", "deploy", "scripts", ".git", ".towline"}
    again = [line for line in lines[1:] if not line.startswith("!")]
    assert any(fnmatch("libs/common/__pycache__", pattern) for pattern in again)
    assert any(fnmatch("services/.env", pattern) for pattern in again)
