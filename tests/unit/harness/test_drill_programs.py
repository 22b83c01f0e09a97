"""Programs of others: how they are found, and what is said of one that fails."""

import sys
import time

import pytest

from harness.drills.programs import call, find
from harness.drills.target import DrillFailed


def test_a_program_is_found_by_its_name() -> None:
    (path,) = find("sh")
    assert path.endswith("/sh")


def test_a_variable_names_another_one_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "sh -x")
    path, option = find("not-installed", variable="OTHER")
    assert (path.endswith("/sh"), option) == (True, "-x")


def test_an_empty_variable_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "")
    assert find("sh", variable="OTHER") == find("sh")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(DrillFailed, match="`not-installed` is needed"):
        find("not-installed")


async def test_what_it_prints_is_returned() -> None:
    assert await call(sys.executable, "-c", "print('here')") == "here\n"


async def test_its_last_complaint_is_told() -> None:
    with pytest.raises(DrillFailed, match=r"ended with 3: no such pod$"):
        await call(sys.executable, "-c", "import sys; print('hm\\nno such pod', file=sys.stderr); sys.exit(3)")


async def test_one_that_does_not_end_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(DrillFailed, match=r"took more than 0\.2 s"):
        await call(sys.executable, "-c", "import time; time.sleep(60)", within_s=0.2)
    assert time.monotonic() - began < 30
