"""The protocol's models (docs/protocol/models): the rules hold, and without any one of them something breaks.

Each model states what comes out of each of its variants, and ends non-zero where that is not what came out. Played
here are the variants of up to `STATES_MAX` states; `make models` plays all.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROTOCOL = TESTS.parent / "docs" / "protocol"
MODELS = PROTOCOL / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.cpp"))
# Some twenty seconds on two cores, half of it the compiler's.
STATES_MAX = 400_000
WITHIN_S = 100.0
LINE = re.compile(
    r"^(?P<as>expected|UNEXPECTED) +(?P<came_out>holds|breaks|no end) +\d+  (?P<variant>[^:\n]+)", re.MULTILINE
)

Played = subprocess.CompletedProcess[str]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the models need g++")


def play(source: Path, directory: Path) -> Played:
    """Compile a model and play its quick variants."""
    program = directory / source.stem
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-I", str(MODELS), "-o", str(program), str(source)],
        check=True,
        timeout=WITHIN_S,
    )
    command = [str(program), "--states-max", str(STATES_MAX)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=WITHIN_S)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Future[Played]"]]:
    """All models, as many at a time as there are cores."""
    directory = tmp_path_factory.mktemp("models")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(play, MODELS / f"{name}.cpp", directory) for name in NAMES}


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_the_rules_hold_and_each_is_needed(name: str, played: dict[str, "Future[Played]"]) -> None:
    """A variant called X-… has a rule taken away, and must break; every other one must hold."""
    result = played[name].result()
    lines = list(LINE.finditer(result.stdout))
    assert {line["came_out"] for line in lines} == {"holds", "breaks"}, result.stdout
    for line in lines:
        assert (line["came_out"] == "breaks") == line["variant"].startswith("X-"), line[0]
    assert "UNEXPECTED" not in result.stdout, result.stdout
    assert result.returncode == 0, result.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("model", "rule", "without_it", "variant"),
    [
        pytest.param("door", "Way way = ASK_FIRST", "Way way = UNDO_ANYWAY", "ask-first", id="rule 9"),
        pytest.param("window", "own_entries_claimed = true", "own_entries_claimed = false", "serve-UHU", id="rule 13"),
        pytest.param("parking", "bool park = true", "bool park = false", "window-1", id="rule 4"),
        pytest.param("selftest", "holds(11)", "holds(12)", "two-laps", id="another number of states"),
    ],
)
def test_a_model_that_lost_a_rule_is_noticed(
    model: str, rule: str, without_it: str, variant: str, tmp_path: Path
) -> None:
    """Taken out of the model itself, a rule takes its variants with it, and the model ends with 1."""
    changed = 0
    for source in MODELS.glob(f"{model}*"):
        text = source.read_text()
        changed += text.count(rule)
        (tmp_path / source.name).write_text(text.replace(rule, without_it))
    assert changed == 1
    result = play(tmp_path / f"{model}.cpp", tmp_path)
    assert result.returncode == 1
    unexpected = {line["variant"] for line in LINE.finditer(result.stdout) if line["as"] == "UNEXPECTED"}
    assert variant in unexpected, result.stdout


def test_the_tests_that_the_rules_name_are_there() -> None:
    """`file.py::test`, and `::test` for a further one of the same file."""
    names = re.findall(r"`(\w+\.py)?::(\w+)`", (PROTOCOL / "rules.md").read_text())
    assert len(names) > 50
    sources = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    file = ""
    for named, test in names:
        file = named or file
        assert f"def {test}(" in sources[file], f"{file}::{test}"


def test_the_variants_that_the_documents_name_are_there() -> None:
    """`X-…`, with or without its model before it."""
    variants = {name for path in MODELS.glob("*.cpp") for name in re.findall(r'\{"([^"]+)", ', path.read_text())}
    for document in ("rules.md", "findings.md", "README.md"):
        named = re.findall(r"`(?:\w+ )?(X-[\w-]+)`", (PROTOCOL / document).read_text())
        assert set(named) <= variants, document
    in_rules = set(re.findall(r"`(X-[\w-]+)`", (PROTOCOL / "rules.md").read_text()))
    assert len(in_rules) > 40
