"""What a person types and sees: arguments of tools, exit codes, and text that cannot steer the terminal."""

from typing import Any

import msgspec
import pytest
import typer

from towline.cli.jobs import exit_code, parse_arguments, write_job
from towline.cli.terminal import Exit, plain
from towline.wire.api import Job


def job(state: str, outcome: Any = msgspec.UNSET, **members: Any) -> Job:
    ended = {} if state in ("queued", "processing") else {"ended_at": "2026-01-02T03:04:06.500Z"}
    return msgspec.convert(
        {
            "job": "j",
            "user": "alice",
            "name": "echo",
            "state": state,
            "attempts": 1,
            "accepted_at": "2026-01-02T03:04:05.000Z",
            "deadline_at": "2026-01-02T03:09:05.000Z",
            "replayed": False,
            **({} if outcome is msgspec.UNSET else {"outcome": msgspec.Raw(msgspec.json.encode(outcome))}),
            **ended,
            **members,
        },
        Job,
    )


@pytest.mark.parametrize(
    ("document", "pairs", "arguments"),
    [
        ("{}", [], {}),
        ('{"a": 1}', ["b=2"], {"a": 1, "b": 2}),
        ('{"a": 1}', ["a=2"], {"a": 2}),
        ("{}", ["text=hello world"], {"text": "hello world"}),
        ("{}", ['text="5"'], {"text": "5"}),
        ("{}", ["url=http://h/?a=b"], {"url": "http://h/?a=b"}),
        ("{}", ["flag=true", "none=null", "list=[1, 2]"], {"flag": True, "none": None, "list": [1, 2]}),
        ("{}", ["empty="], {"empty": ""}),
        ("{}", ["number=NaN"], {"number": "NaN"}),
    ],
)
def test_arguments_are_json_where_they_can_be(document: str, pairs: list[str], arguments: dict[str, Any]) -> None:
    assert parse_arguments(document, pairs) == arguments


@pytest.mark.parametrize(
    ("document", "pairs", "reason"),
    [
        ("[1]", [], "must be a JSON object"),
        ("{", [], "not JSON"),
        ('{"a": NaN}', [], "NaN"),
        ('{"a": 1, "a": 2}', [], "duplicate"),
        ("{}", ["a"], "'a' is not NAME=VALUE"),
        ("{}", ["=a"], "'=a' is not NAME=VALUE"),
    ],
)
def test_arguments_that_cannot_be_read_are_named(document: str, pairs: list[str], reason: str) -> None:
    with pytest.raises(typer.BadParameter, match=reason):
        parse_arguments(document, pairs)


@pytest.mark.parametrize(
    ("state", "waited", "code"),
    [
        ("completed", True, Exit.OK),
        ("completed", False, Exit.OK),
        ("failed", False, Exit.NOT_DONE),
        ("unknown", True, Exit.NOT_DONE),
        ("expired", True, Exit.NOT_DONE),
        ("cancelled", True, Exit.NOT_DONE),
        ("queued", False, Exit.OK),
        ("queued", True, Exit.STILL_OPEN),
        ("processing", True, Exit.STILL_OPEN),
    ],
)
def test_the_exit_code_says_how_the_job_ended(state: str, waited: bool, code: Exit) -> None:
    assert exit_code(job(state), waited=waited) is code


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (job("completed", {"result": {"a": [1, "é"]}}), ["completed", "(after 1.500 s)", '"a": [', '"é"']),
        (job("completed", {"result": None}), ["completed", "null"]),
        (job("failed", {"error": {"code": "tool-error", "message": "no"}}), ["failed", "tool-error: no"]),
        (job("completed", {"result": "\ufffd", "mended": True}), ["completed", "mended", "U+FFFD"]),
        (job("expired", {"error": {"code": "e", "message": "m", "retryable": True}}), ["may be tried again"]),
        (job("queued", machine="offline"), ["queued", "offline; the job stays accepted"]),
        (job("queued", replayed=True, payload_matches=False), ["yes: this key", "not the same as"]),
    ],
)
def test_a_job_is_shown_with_what_is_remarkable_about_it(
    shown: Job, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(shown)
    text = capsys.readouterr().out
    assert [part for part in expected if part not in text] == []


def test_text_of_a_machine_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A tool's error message is the machine's own words: escape sequences, control characters, Rich's markup."""
    message = "\x1b[2J\x9b31m\rgone [red]not markup[/red]"
    write_job(job("failed", {"error": {"code": "tool-error", "message": message}}))
    text = capsys.readouterr().out
    assert not any(c in text for c in "\x1b\x9b\r")
    assert "[red]not markup[/red]" in text
    assert plain("lines\nand\ttabs stay") == "lines\nand\ttabs stay"
