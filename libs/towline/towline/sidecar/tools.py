"""Tools: what a user's machine can be asked to do.

    @tool(read_only=True)
    def list_files(folder: str, pattern: str = "*") -> list[str]:
        '''Names of the files in a folder.'''

Owns:     the `@tool` decorator, the registry, JSON Schemas from signatures, loading of a user's module.
Promises: arguments that reach a function have the types its signature states; a tool that cannot be described, or that
          no worker takes, is refused when the sidecar starts, not when it dials or when the first job comes.
Used by:  sidecar.lane (calls), sidecar.app (catalogue), cli.sidecar (loading).
"""

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

import msgspec

from towline.wire import frames, json
from towline.wire.ids import TOOL_NAME_CHARACTERS_MAX, is_tool_name

# Asked before anything is marked or run; a false answer refuses the job.
Confirm = Callable[[str, dict[str, Any]], bool | Awaitable[bool]]
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__towline_tool__"


class ToolError(Exception):
    """A tool cannot be registered or loaded; `str()` says which and why."""


class BadArgs(ValueError):
    """Arguments that do not fit the signature; `str()` says which field and why."""


class LocalTool:
    """A function with what the catalogue says of it.

    Attributes:
        description: the first paragraph of its docstring.
        is_async: False: it runs in a thread, and cannot be cancelled.
    """

    def __init__(self, function: Callable[..., Any], hints: frames.Hints, confirm: Confirm | None) -> None:
        """
        Raises:
            ToolError: its name or its signature.
        """
        self.function = function
        self.name: str = function.__name__
        if not is_tool_name(self.name):
            raise ToolError(
                f"tool {self.name!r}: a name has 1-{TOOL_NAME_CHARACTERS_MAX} characters of A-Z a-z 0-9 . _ : @ -, the"
                " first a letter or digit"
            )
        self.hints = hints
        self.confirm = confirm
        self.is_async = inspect.iscoroutinefunction(function)
        self.description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        try:
            args = _args_type(self.name, function)
            self._decoder = msgspec.json.Decoder(args)
            self.input_schema = _schema(args)
        except (TypeError, NameError, ValueError, RuntimeError) as error:
            raise ToolError(f"tool {self.name!r}: its signature cannot be described: {error}") from error

    def read_args(self, raw: msgspec.Raw) -> dict[str, Any]:
        """Turn a job's arguments into keyword arguments, defaults filled in.

        Raises:
            BadArgs: missing, unknown or of another type.
        """
        try:
            args = self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadArgs(str(error)) from error
        return {name: getattr(args, name) for name in args.__struct_fields__}


class Registry:
    """The tools of one sidecar by name."""

    def __init__(self, tools: Iterable[Callable[..., Any]]) -> None:
        """Take functions marked with `@tool`.

        Raises:
            ToolError: not marked, a name given twice, or more than a frame carries.
        """
        self._tools: dict[str, LocalTool] = {}
        for function in tools:
            local = getattr(function, _MARK, None)
            if not isinstance(local, LocalTool):
                raise ToolError(f"{function!r} is not marked with @tool")
            if local.name in self._tools:
                raise ToolError(f"two tools are named {local.name!r}")
            self._tools[local.name] = local
        if len(self._tools) > frames.TOOLS_MAX:
            raise ToolError(f"{len(self._tools)} tools, at most {frames.TOOLS_MAX} fit")
        sizes = {entry.name: _announced_bytes(entry) for entry in self.catalogue()}
        if sum(sizes.values()) > frames.CATALOGUE_BYTES_MAX:
            largest = max(sizes, key=sizes.__getitem__)
            raise ToolError(
                f"descriptions and schemas have {sum(sizes.values())} bytes, at most {frames.CATALOGUE_BYTES_MAX} fit;"
                f" the largest are those of tool {largest!r}, {sizes[largest]} bytes"
            )

    def get(self, name: str) -> LocalTool | None:
        """The tool of that name."""
        return self._tools.get(name)

    def catalogue(self) -> list[frames.Tool]:
        """What the server is told."""
        return [frames.Tool(t.name, t.description, t.input_schema, t.hints) for t in self._tools.values()]


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *, read_only: bool = False, idempotent: bool = False, destructive: bool = False, confirm: Confirm | None = None
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    /,
    *,
    read_only: bool = False,
    idempotent: bool = False,
    destructive: bool = False,
    confirm: Confirm | None = None,
) -> F | Callable[[F], F]:
    """Mark a function, async or plain, as a tool; it stays callable as before.

    Without a hint a job runs at most once, also across a crash of the sidecar; the price is two fsyncs. A tool that is
    `read_only` or `idempotent` may run again if the sidecar died in the middle.

    Args:
        read_only: changes nothing.
        idempotent: a second run with the same arguments changes nothing more.
        destructive: may delete or overwrite; for the agent to know.
        confirm: called with the tool's name and arguments before anything is marked or run; False refuses the job.

    Raises:
        ToolError: the signature cannot be described (no `*args`, no positional-only parameters, types msgspec knows).
    """

    def mark(marked: F) -> F:
        setattr(marked, _MARK, LocalTool(marked, frames.Hints(read_only, idempotent, destructive), confirm))
        return marked

    return mark if function is None else mark(function)


def load(source: str) -> list[Callable[..., Any]]:
    """Import a module by name, or a `.py` file by path, and return the tools it defines, in their order.

    Raises:
        ToolError: not found, fails on import, or holds no tool.
    """
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except ToolError:
        raise
    except Exception as error:
        raise ToolError(f"cannot load tools from {source!r}: {type(error).__name__}: {error}") from error
    found = [
        member
        for member in vars(module).values()
        if isinstance(getattr(member, _MARK, None), LocalTool) and member.__module__ == module.__name__
    ]
    if not found:
        raise ToolError(f"{source!r} defines no function marked with @tool")
    return found


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ToolError(f"cannot load tools from {str(path)!r}: no such file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and type hints look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _args_type(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with a field for each parameter."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"tool {name!r}: parameter {str(parameter)!r} cannot be passed by name")
        kind = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind, parameter.default))
    return msgspec.defstruct(f"{name}_args", fields, kw_only=True, forbid_unknown_fields=True)


def _schema(args: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema of the arguments, the struct itself inlined."""
    (reference,), definitions = msgspec.json.schema_components([args], ref_template="#/$defs/{name}")
    # Not under the struct's own name, if a type of the signature has the same one.
    schema: dict[str, Any] = definitions.pop(reference["$ref"].removeprefix("#/$defs/"))
    del schema["title"]
    if definitions:
        schema["$defs"] = definitions
    return schema


def _announced_bytes(entry: frames.Tool) -> int:
    """How much of a frame a tool takes. Raises: ToolError, if no worker would take it."""
    try:
        raw, _ = json.check_raw(json.dumps({"tools": [entry]}))
    except json.JsonProblem as problem:
        raise ToolError(f"tool {entry.name!r} cannot be announced: {problem}") from problem
    return len(raw)
