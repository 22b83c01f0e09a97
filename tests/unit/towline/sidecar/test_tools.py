"""Functions as tools: schemas from signatures, arguments by their types."""

import sys
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest

from towline.sidecar.builtin import builtin_tools
from towline.sidecar.tools import BadArgs, Registry, ToolError, load, tool
from towline.wire import frames, json


class Point(msgspec.Struct):
    x: int
    y: int = 0


@tool
async def everything(
    text: str,
    count: Annotated[int, msgspec.Meta(ge=1)] = 3,
    *,
    point: Point | None = None,
    tags: list[str] = [],  # noqa: B006
) -> None:
    """First line,
    same paragraph.

    More.
    """


def read(args: Any) -> dict[str, Any]:
    found = Registry([everything]).get("everything")
    assert found is not None
    return found.read_args(msgspec.Raw(json.dumps(args)))


def test_the_catalogue_says_what_the_signature_says() -> None:
    (entry,) = Registry([everything]).catalogue()
    assert (entry.name, entry.description) == ("everything", "First line, same paragraph.")
    assert entry.hints == frames.Hints()
    jsonschema.Draft202012Validator.check_schema(entry.input_schema)
    assert entry.input_schema["required"] == ["text"]
    assert entry.input_schema["additionalProperties"] is False
    assert set(entry.input_schema["$defs"]) == {"Point"}
    msgspec.json.encode(entry)


@pytest.mark.parametrize(
    "args",
    [
        {"text": "a"},
        {"text": "a", "count": 9, "point": {"x": 1}, "tags": ["b"]},
        {},
        {"text": 1},
        {"text": "a", "count": 0},
        {"text": "a", "more": 1},
        {"text": "a", "point": {"x": "1"}},
        {"text": "a", "tags": ["b", 2]},
        [],
        None,
    ],
)
def test_arguments_are_taken_exactly_when_the_schema_takes_them(args: Any) -> None:
    (entry,) = Registry([everything]).catalogue()
    valid = jsonschema.Draft202012Validator(entry.input_schema).is_valid(args)
    if valid:
        read(args)
    else:
        with pytest.raises(BadArgs):
            read(args)


def test_arguments_arrive_typed_with_defaults() -> None:
    assert read({"text": "a", "point": {"x": 1}}) == {"text": "a", "count": 3, "point": Point(1, 0), "tags": []}
    with pytest.raises(BadArgs, match=r"\$\.tags\[1\]"):
        read({"text": "a", "tags": ["b", 2]})


def test_a_marked_function_stays_a_function() -> None:
    @tool(read_only=True, destructive=True)
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2) == 3
    (entry,) = Registry([add]).catalogue()
    assert entry.hints == frames.Hints(read_only=True, destructive=True)


def test_signatures_that_cannot_be_described_are_refused_by_name() -> None:
    def with_star(*values: int) -> None: ...
    def with_stars(**values: int) -> None: ...
    def by_position(a: int, /) -> None: ...
    def strange(a: "no_such_type") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function in (with_star, with_stars, by_position, strange):
        with pytest.raises(ToolError, match=function.__name__):
            tool(function)


def test_a_registry_takes_marked_functions_once() -> None:
    with pytest.raises(ToolError, match="two tools"):
        Registry([everything, everything])
    with pytest.raises(ToolError, match="not marked"):
        Registry([len])


def test_a_module_or_file_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from towline.sidecar import tool\n\n@tool\ndef mine() -> int:\n    return 1\n"
    file = tmp_path / "my_tools_for_a_test.py"
    file.write_text(source)
    assert [function.__name__ for function in load(str(file))] == ["mine"]
    del sys.modules["my_tools_for_a_test"]
    monkeypatch.syspath_prepend(tmp_path)
    assert [function.__name__ for function in load("my_tools_for_a_test")] == ["mine"]


@pytest.mark.parametrize("source", ["x = 1\n", "1 / 0\n", "from towline.sidecar.builtin import echo\n"])
def test_a_file_without_tools_of_its_own_is_refused(tmp_path: Path, source: str) -> None:
    file = tmp_path / "empty.py"
    file.write_text(source)
    with pytest.raises(ToolError, match=r"empty\.py"):
        load(str(file))
    with pytest.raises(ToolError, match="cannot load"):
        load("no_such_module_at_all")


def test_builtin_tools_change_nothing() -> None:
    catalogue = Registry(builtin_tools()).catalogue()
    assert [entry.name for entry in catalogue] == [
        "http_get",
        "files_list",
        "files_read",
        "system_info",
        "echo",
        "sleep",
    ]
    assert all(entry.hints.read_only for entry in catalogue)
