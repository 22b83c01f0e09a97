"""`--key`: an idempotency key that was meant to be given is never replaced by a fresh one."""

import pytest
import typer
from typer.testing import CliRunner

from towline.cli import entries, jobs, threads
from towline.cli.connection import API_KEY_VARIABLE

NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize("key", ["", " "])
@pytest.mark.parametrize(
    ("app", "arguments"),
    [
        (jobs.app, ["submit", "alice", "echo"]),
        (threads.app, ["say", "a-thread", "hello"]),
        (entries.app, ["create", "a-thread", "hello"]),
    ],
)
def test_an_empty_key_is_wrong_usage(app: typer.Typer, arguments: list[str], key: str) -> None:
    """As of `--key "$ORDER"` with no such variable: under a fresh key each repetition would be new work."""
    runner = CliRunner(env={API_KEY_VARIABLE: "tlk_x", "TOWLINE_URL": NOWHERE})
    ended = runner.invoke(app, [*arguments, "--key", key])
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "the key is empty" in ended.stderr
