"""JSON, strict both ways: what is refused and where, what is mended, and that nothing else is touched."""

import json as stdlib_json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from towline.wire import json

# Values that every one of our rules lets through.
good_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
good_numbers = st.integers(json.INTEGER_MIN, json.INTEGER_MAX) | st.floats(allow_nan=False, allow_infinity=False)
good_values = st.recursive(
    st.none() | st.booleans() | good_numbers | good_text,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(good_text, children, max_size=4),
    max_leaves=12,
)
# What a sloppy peer may send: text of any code points, numbers of any size.
any_text = st.text(st.characters())
any_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(any_text, children, max_size=4),
    max_leaves=12,
)


def nested(depth: int) -> str:
    """Arrays in arrays, `depth` of them."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "$", "not JSON"),
        ("{", "$", "line 1, column 2"),
        ("{} {}", "$", "not JSON: Extra data"),
        ("{'a': 1}", "$", "not JSON"),
        ('"a\nb"', "$", "Invalid control character"),
        (b'"\xff"', "$", "invalid UTF-8 in byte 1"),
        (b'"\xed\xa0\x80"', "$", "invalid UTF-8"),
        ("NaN", "$", "the constant NaN is not JSON"),
        ('{"x": [1, NaN]}', "$.x[1]", "the constant NaN is not JSON"),
        ("[Infinity]", "$[0]", "the constant Infinity is not JSON"),
        ("[-Infinity]", "$[0]", "the constant -Infinity is not JSON"),
        ('{"a": {"b": [0, 1e999]}}', "$.a.b[1]", "a number is too large"),
        ("[-1e999]", "$[0]", "a number is too large"),
        ("[18446744073709551616]", "$[0]", "integer beyond 64 bit"),
        ("[-9223372036854775809]", "$[0]", "integer beyond 64 bit"),
        ('{"a": [0, ' + "9" * 5000 + "]}", "$.a[1]", "a number is too large"),
        ('{"a": [1, ' + "9" * 5000 + ", NaN}", "$", "not JSON"),
        (r'{"a": "\ud800"}', "$.a", "lone surrogate in text"),
        (r'{"a": "\udc00\ud800"}', "$.a", "lone surrogate in text"),
        ('["\ud800"]', "$[0]", "lone surrogate in text"),
        (r'{"a": ["x\u0000"]}', "$.a[0]", "U+0000 in text"),
        (r'{"a": {"\u0000": 1}}', "$.a", "U+0000 in text"),
        (r'{"\ud800": 1}', "$", "lone surrogate in text"),
        ('{"a": 1, "b": 2, "a": 3}', "$.a", "duplicate member"),
        (r'{"a": 1, "\u0061": 3}', "$.a", "duplicate member"),
        ('[{"b": {"a": 1, "a": 1}}]', "$[0].b.a", "duplicate member"),
        ('{"a": NaN, "a": 1}', "$.a", "duplicate member"),
        ('{"a": 1, "a": {"a": NaN}}', "$.a", "duplicate member"),
        (nested(65), "$" + "[0]" * 64, "nested deeper than 64"),
        (nested(100_000), "$", "nested deeper than 64"),
        ('{"a":' * 100_000, "$", "nested deeper than 64"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_place(text: str | bytes, place: str, reason: str) -> None:
    """The place is a path, so that the caller can find it; `$` where the text is no JSON."""
    with pytest.raises(json.JsonProblem) as caught:
        json.loads(text)
    assert caught.value.place == place
    assert reason in caught.value.reason
    assert str(caught.value) == f"{caught.value.reason} at {caught.value.place}"


@pytest.mark.parametrize(
    "text",
    [
        "18446744073709551615",
        "-9223372036854775808",
        "1e308",
        "5e-324",
        r'"\ud83d\ude00"',
        r'"\u0001 \u007f"',
        nested(64),
        '{"": 0}',
        " [1 , 2]\n",
    ],
)
def test_the_edges_are_let_through(text: str) -> None:
    """The last value before each limit is a good one."""
    assert json.loads(text) == stdlib_json.loads(text)
    assert json.mend(text) == (stdlib_json.loads(text), False)


def test_a_place_is_short_and_printable_whatever_the_members_are_called() -> None:
    """Member names come from outside: they must not make an error of megabytes, nor one that cannot be encoded."""
    long, name = "x" * 10_000, "\\ud800"
    with pytest.raises(json.JsonProblem) as caught:
        json.loads(f'{{"{long}": {{"{long}": {{"{long}": {{"{long}": {{"{long}": 1e999}}}}}}}}}}')
    assert len(caught.value.place) <= 200
    with pytest.raises(json.JsonProblem) as caught:
        json.mend(f'{{"{name}": 1e999}}')
    assert caught.value.place.encode() == "$.\ufffd".encode()


@given(good_values)
def test_good_values_come_back_as_they_were(value: Any) -> None:
    """Encoded by us and by others, read strictly and leniently: the same value, nothing mended."""
    for text in (json.dumps(value), stdlib_json.dumps(value), stdlib_json.dumps(value, ensure_ascii=False).encode()):
        assert json.loads(text) == value
        assert json.mend(text) == (value, False)


@given(good_values)
def test_equal_values_have_equal_canonical_bytes(value: Any) -> None:
    """Member order and white space say nothing about the work, so they do not change its fingerprint."""

    def reversed_members(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: reversed_members(member) for name, member in reversed(value.items())}
        return [reversed_members(item) for item in value] if isinstance(value, list) else value

    spread = stdlib_json.dumps(reversed_members(value), indent=2)
    assert json.canonical(json.loads(spread)) == json.canonical(value)


def test_canonical_tells_integers_from_floats() -> None:
    """A tool may care, so they are different work."""
    assert json.canonical({"b": 1, "a": 1.0}) == b'{"a":1.0,"b":1}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"a": "x\u0000y"}', {"a": "x\ufffdy"}),
        (r'["\ud800", "\udc00x", "\ud83d\ude00"]', ["\ufffd", "\ufffdx", "\U0001f600"]),
        (r'{"\u0000": {"\ud800": [1, null, true]}}', {"\ufffd": {"\ufffd": [1, None, True]}}),
        (b'"a\xff\xfeb"', "a\ufffd\ufffdb"),
    ],
)
def test_text_is_mended(text: str | bytes, value: Any) -> None:
    """What cannot be stored becomes U+FFFD, and it is said so."""
    assert json.mend(text) == (value, True)


def test_of_duplicate_members_the_last_one_counts() -> None:
    """A peer's habit, and nothing to be repaired; what does not count does no harm."""
    assert json.mend('{"a": 1, "a": 2}') == json.mend('{"a": NaN, "a": 2}') == ({"a": 2}, False)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[1, NaN]", "$[1]"),
        ('{"a": ["\ud800", ' + "9" * 5000 + "]}", "$.a[1]"),
        ('{"a": [0, 1e999]}', "$.a[1]"),
        (r'{"a\u0000": [36893488147419103232]}', "$.a\ufffd[0]"),
        (nested(65), "$" + "[0]" * 64),
        (nested(100_000), "$"),
        ("nonsense", "$"),
    ],
)
def test_what_cannot_be_mended_is_refused_with_its_place(text: str, place: str) -> None:
    """A number has no replacement character."""
    with pytest.raises(json.JsonProblem) as caught:
        json.mend(text)
    assert caught.value.place == place


@given(any_values)
@example(["\x00"])
@example({"\ud800": 2.0**1000})
def test_what_mend_returns_every_other_reader_takes(value: Any) -> None:
    """Whatever Python's own lenient encoder can write is either refused by name or made good, and good means good."""
    text = stdlib_json.dumps(value)
    try:
        mended, changed = json.mend(text)
    except json.JsonProblem:
        return
    assert json.loads(json.dumps(mended)) == mended
    assert json.mend(json.dumps(mended)) == (mended, False)
    if not changed:
        assert json.loads(text) == mended


@given(any_values)
@example(10**18)
@example(1e100)
@example("0" * 19)
@example(["\\u0000"])
@example(2**63)
@example(2**64)
def test_check_raw_agrees_with_mend(value: Any) -> None:
    """The one-scan shortcut never lets through what the careful way would mend or refuse."""
    text = stdlib_json.dumps(value).encode()
    assume(b"NaN" not in text and b"Infinity" not in text)  # the parser before `check_raw` refuses those

    def mend() -> tuple[Any, bool]:
        return json.mend(text)

    def check() -> tuple[Any, bool]:
        raw, changed = json.check_raw(text)
        assert changed or raw == text
        return json.loads(raw), changed

    assert outcome_of(check) == outcome_of(mend)


def outcome_of(call: Callable[[], tuple[Any, bool]]) -> object:
    """What a call returns, or the problem that it names."""
    try:
        return call()
    except json.JsonProblem as problem:
        return str(problem)


@pytest.mark.parametrize("number", ["1e400", "1E+999", "-1e0999", "123456789012345678901234567890", "9" * 310 + ".0"])
def test_check_raw_finds_every_number_that_cannot_be_carried(number: str) -> None:
    """Each way to write too much."""
    with pytest.raises(json.JsonProblem):
        json.check_raw(f'{{"a": [{number}]}}'.encode())


def test_check_raw_refuses_deep_nesting_and_not_wide_documents() -> None:
    """Only depth counts, though many brackets are cause to look."""
    wide = b"[" + b",".join([b"[{}]"] * 1000) + b"]"
    assert json.check_raw(wide) == (wide, False)
    with pytest.raises(json.JsonProblem):
        json.check_raw(nested(65).encode())


@pytest.mark.parametrize("value", [[object()], {"a": object()}, {object(): 1}])
def test_what_is_no_json_is_not_encoded(value: Any) -> None:
    """The encoder's own errors are translated."""
    with pytest.raises(json.JsonProblem):
        json.dumps(value)
