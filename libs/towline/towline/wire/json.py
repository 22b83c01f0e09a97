"""JSON, strict both ways: what this module lets through, every store, language and peer can read back.

Refused, with the place named: broken UTF-8 or syntax, NaN and Infinity, numbers that no double or 64-bit integer holds,
lone surrogates, U+0000, duplicate members, and nesting beyond 64. What a *caller* sends goes through `loads`; what a
machine, model or upstream sends goes through `mend`, which repairs text instead of refusing it.
"""

import json
import re
from typing import Any

import msgspec

# Deep enough for any tool's arguments, far below every parser's recursion limit.
NESTING_MAX = 64
INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1
REPLACEMENT = "\ufffd"

_encoder = msgspec.json.Encoder()
_sorting_encoder = msgspec.json.Encoder(order="sorted")


class JsonProblem(ValueError):
    """What is wrong with a document, and where.

    Attributes:
        place: a path such as `$.args.rows[3]`, or `$` when the text is no JSON at all.
        reason: one readable clause.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{reason} at {place}")
        self.place = place
        self.reason = reason


class _Refused(float):
    """What the parser must not take, kept in its place as a NaN: whoever checks numbers finds it there."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, reason: str) -> "_Refused":
        refused = super().__new__(cls, "nan")
        refused.reason = reason
        return refused


def loads(data: bytes | str) -> Any:
    """Parse one JSON document into plain Python values.

    Raises:
        JsonProblem: the document breaks one of this module's rules.
    """
    value = _parse(data, strict=True)
    _check(value)
    return value


def dumps(value: Any) -> bytes:
    """Encode values of our own making compactly: plain values, structs, `msgspec.Raw`.

    What a caller or a tool made is checked elsewhere: NaN and Infinity come out as `null` here.

    Raises:
        JsonProblem: the value cannot be encoded at all (an unknown type, a lone surrogate, endless nesting).
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise JsonProblem("$", f"cannot be encoded ({type(error).__name__})") from error


def canonical(value: Any) -> bytes:
    """Encode with sorted members and no white space: equal values give equal bytes (`1` and `1.0` are different)."""
    return _sorting_encoder.encode(value)


def mend(data: bytes | str) -> tuple[Any, bool]:
    """Parse what a peer sent, repairing text; returns the value and whether anything was changed.

    Invalid UTF-8, lone surrogates and U+0000 become U+FFFD; of duplicate members the last one counts.

    Raises:
        JsonProblem: not JSON at all, nested too deeply, or a number that cannot be carried (NaN, Infinity, too large).
    """
    text = data if isinstance(data, str) else data.decode(errors="replace")
    mended = isinstance(data, bytes) and text.encode() != data
    value = _parse(text, strict=False)
    try:
        _check(value)
    except JsonProblem:
        value = _mended(value, "$", 0)
        mended = True
    return value, mended


def _parse(data: bytes | str, *, strict: bool) -> Any:
    try:
        text = data.decode() if isinstance(data, bytes) else data
        hooks = _STRICT if strict else _LENIENT
        try:
            return json.loads(text, **hooks)
        except json.JSONDecodeError:
            raise
        except ValueError:
            # CPython refuses integers of more than 4300 digits and does not say where: once more, slower.
            return json.loads(text, **hooks, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise JsonProblem("$", f"invalid UTF-8 in byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise JsonProblem("$", f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from error
    except RecursionError as error:
        raise JsonProblem("$", f"nested deeper than {NESTING_MAX}") from error


_CONSTANTS = {name: _Refused(f"the constant {name} is not JSON") for name in ("NaN", "Infinity", "-Infinity")}
_DUPLICATE = _Refused("duplicate member")
_ENDLESS = _Refused("a number is too large")


def _integer(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:
        return _ENDLESS


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                members[name] = _DUPLICATE
            seen.add(name)
    return members


_LENIENT: dict[str, Any] = {"parse_constant": _CONSTANTS.__getitem__}
_STRICT: dict[str, Any] = {**_LENIENT, "object_pairs_hook": _unique}


def _text_problem(text: str) -> str | None:
    if "\x00" in text:
        return "U+0000 in text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "lone surrogate in text"
    return None


def _number_problem(number: float) -> str | None:
    if isinstance(number, int):
        return None if INTEGER_MIN <= number <= INTEGER_MAX else "integer beyond 64 bit"
    if number - number == 0:
        return None
    # Overflowing literals such as 1e999 parse as infinity.
    return number.reason if isinstance(number, _Refused) else "a number is too large"


def _check(root: Any) -> None:
    """Walk iteratively, so that depth is a count of ours and never the interpreter's limit."""
    todo: list[tuple[Any, tuple[Any, ...]]] = [(root, ())]
    while todo:
        value, path = todo.pop()
        problem: str | None = None
        if isinstance(value, str):
            problem = _text_problem(value)
        elif isinstance(value, (dict, list)):
            if len(path) >= NESTING_MAX:
                problem = f"nested deeper than {NESTING_MAX}"
            elif isinstance(value, dict):
                for name, member in value.items():
                    if problem := _text_problem(name):
                        break
                    todo.append((member, (*path, name)))
            else:
                todo.extend((item, (*path, index)) for index, item in enumerate(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            problem = _number_problem(value)
        if problem:
            raise JsonProblem(_place(path), problem)


def _place(path: tuple[Any, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else "." + mend_text(step)[:40] for step in path)
    return ("$" + "".join(steps))[:200]


def mend_text(text: str) -> str:
    """Repair text that JSON or Postgres cannot carry: lone surrogates and U+0000 become U+FFFD."""
    return text.replace("\x00", REPLACEMENT).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _mended(value: Any, place: str, depth: int) -> Any:
    """Rebuild a value with repaired text; `_check` found something, so speed no longer matters."""
    if isinstance(value, str):
        return mend_text(value)
    if isinstance(value, (dict, list)) and depth >= NESTING_MAX:
        raise JsonProblem(place[:200], f"nested deeper than {NESTING_MAX}")
    if isinstance(value, dict):
        return {mend_text(k): _mended(v, f"{place}.{mend_text(k)[:40]}", depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_mended(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (problem := _number_problem(value)):
        raise JsonProblem(place[:200], problem)
    return value


# What may hide a problem in raw JSON that a syntax check does not see: an escaped NUL or surrogate, a long number.
_SUSPICIOUS = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])|[0-9]{19}|[eE][+]?[0-9]{3}")


def check_raw(raw: bytes) -> tuple[bytes, bool]:
    """Check JSON that a peer sent and a parser has passed over (`msgspec.Raw`); returns it, mended if need be.

    Nearly always this is one scan and the same bytes.

    Raises:
        JsonProblem: see `mend`.
    """
    if _SUSPICIOUS.search(raw) is None and raw.count(b"[") + raw.count(b"{") <= NESTING_MAX:
        return raw, False
    value, mended = mend(raw)
    return (dumps(value), True) if mended else (raw, False)
