"""How a service starts: settings that are wrong end it, and a variable that nobody reads stands in its log."""

import json
import os
import subprocess
import sys

import pytest

SERVICES = ("gateway", "worker", "relay")
PASSWORD = "hunter2"
STORES = {"REDIS_URL": "redis://127.0.0.1:1", "DATABASE_URL": "postgresql://127.0.0.1:1/none"}


def _run(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TOWLINE_") and name not in STORES}
    return subprocess.run(
        [sys.executable, *words], env=bare | variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("service", SERVICES)
def test_wrong_settings_are_named_all_at_once_and_no_secret_is_shown(service: str) -> None:
    wrong = {"REDIS_URL": f"http://:{PASSWORD}@localhost", "TOWLINE_ADMIN_PORT": "seventy"}
    ended = _run(["-m", service], wrong)
    assert ended.returncode == 2
    for name in ("REDIS_URL", "DATABASE_URL", "TOWLINE_ADMIN_PORT"):
        assert name in ended.stderr
    assert PASSWORD not in ended.stderr + ended.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_a_variable_that_nobody_reads_stands_in_the_log(service: str) -> None:
    code = (
        "from common.process.startup import start;"
        f" from {service}.settings import {service.capitalize()}Settings as S; start({service!r}, S)"
    )
    ended = _run(["-c", code], STORES | {"TOWLINE_ADMIN_PROT": "9091"})
    assert ended.returncode == 0, ended.stderr
    (line,) = [json.loads(line) for line in ended.stdout.splitlines()]
    assert line["event"] == "settings_unknown"
    assert line["service"] == service
    assert line["names"] == ["TOWLINE_ADMIN_PROT (did you mean TOWLINE_ADMIN_PORT?)"]
