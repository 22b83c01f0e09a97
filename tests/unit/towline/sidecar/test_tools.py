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


class Shift(msgspec.Struct):
    x: int


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
    def ambiguous(a: Point | Shift) -> None: ...
    def senseless(a: Annotated[int, msgspec.Meta(min_length=1)]) -> None: ...
    def mangled(__a: int) -> None: ...

    for function in (with_star, with_stars, by_position, strange, ambiguous, senseless, mangled):
        with pytest.raises(ToolError, match=function.__name__):
            tool(function)


def test_a_type_may_be_called_as_the_arguments_are() -> None:
    """Both are one schema's definitions then, and told apart by their modules."""

    class move_args(msgspec.Struct):  # noqa: N801
        x: int

    def move(to: move_args) -> None: ...

    move.__annotations__ = {"to": move_args}
    (entry,) = Registry([tool(move)]).catalogue()
    jsonschema.Draft202012Validator(entry.input_schema).validate({"to": {"x": 1}})
    assert not jsonschema.Draft202012Validator(entry.input_schema).is_valid({"x": 1})


@pytest.mark.parametrize("name", ["_private", "größe", "<lambda>", "t" * 129])
def test_a_name_that_no_worker_takes_is_refused(name: str) -> None:
    """Else the worker would close the socket for good (4501), and the machine stay off."""

    def named() -> None: ...

    named.__name__ = name
    with pytest.raises(ToolError, match=f"tool '{name}': a name has 1-128 characters of A-Z"):
        tool(named)


@pytest.mark.parametrize(
    ("default", "reason"), [(2**70, r"integer beyond 64 bit at \$\.tools\[0\]\."), ("\ud800", "cannot be encoded")]
)
def test_a_tool_that_cannot_be_carried_is_refused_by_name(default: Any, reason: str) -> None:
    """A schema has the defaults in it, and they are JSON like all else."""

    def odd(value: Any = default) -> None: ...

    with pytest.raises(ToolError, match=f"'odd' cannot be announced: {reason}"):
        Registry([tool(odd)])


def test_a_catalogue_larger_than_a_frame_is_refused_and_names_the_largest_tool() -> None:
    """Else every hello would be cut off (1009), and dialled again for ever. What just fits does fit."""

    def long() -> None: ...

    def described(size: int) -> Registry:
        long.__doc__ = "x" * size
        return Registry([everything, tool(long)])

    fits = frames.CATALOGUE_BYTES_MAX - 2_000
    longest_hello = frames.Hello(
        "m" * 200, "j" * 200, "n" * 255, "v" * 40, described(fits).catalogue(), ["j" * 36] * 64
    )
    assert len(frames.encode(longest_hello)) <= frames.FRAME_BYTES_MAX
    with pytest.raises(ToolError, match="at most 1048576 fit; the largest are those of tool 'long', "):
        described(frames.CATALOGUE_BYTES_MAX)


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
