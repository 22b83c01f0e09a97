"""What `towline runs start` makes of its options, and that no secret stands on the command line."""

from pathlib import Path

import pytest
import typer

from towline.cli.sources import parse_sources
from towline.client import SourceFollow

ONE = ["a=https://a/stream"]


def parse(sources: list[str], resumes: list[str], headers: list[str] | None = None) -> list[SourceFollow]:
    return parse_sources(sources, resumes, headers or [], idle_timeout_s=60.0)


def test_what_is_said_for_one_source_wins_over_what_is_said_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL", "for all=1")
    (tmp_path / "b").write_text("for b\r\n")
    found = parse(
        ["a=https://a/?q=1", "b=https://b"], ["replay", "b=live"], ["X-Key=env:ALL", f"b/X-Key=@{tmp_path / 'b'}"]
    )
    assert found == [
        SourceFollow("a", "https://a/?q=1", "replay", {"X-Key": "for all=1"}, 60.0),
        SourceFollow("b", "https://b", "live", {"X-Key": "for b"}, 60.0),
    ]


@pytest.mark.parametrize(
    ("sources", "resumes", "headers", "says"),
    [
        (["https://a"], ["ids"], [], "not NAME=URL"),
        (["=https://a"], ["ids"], [], "not NAME=URL"),
        ([*ONE, "a=https://b"], ["ids"], [], "same name"),
        (ONE, ["sometimes"], [], "none of ids, replay, live"),
        (ONE, ["a="], [], "none of"),
        (ONE, ["b=ids"], [], "no source 'b'"),
        ([*ONE, "b=https://b"], ["a=ids"], [], "nothing is said for source 'b'"),
        (ONE, ["ids"], ["b/X=env:PATH"], "no source 'b'"),
        (ONE, ["ids"], ["Authorization=secret"], "not the value"),
        (ONE, ["ids"], ["Authorization: secret"], "not NAME=@FILE"),
        (ONE, ["ids"], ["X=env:NO_SUCH_VARIABLE_AT_ALL"], "NO_SUCH_VARIABLE_AT_ALL is not set"),
        (ONE, ["ids"], ["X=@/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_what_cannot_be_read_is_named(sources: list[str], resumes: list[str], headers: list[str], says: str) -> None:
    with pytest.raises(typer.BadParameter, match=says) as raised:
        parse(sources, resumes, headers)
    assert "secret" not in str(raised.value)
