"""Identifiers and header values: what callers may choose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.wire.ids import KEY_CHARACTERS_MAX, is_id, is_tool_name, is_traceparent, parse_idempotency_key


@pytest.mark.parametrize("text", ["a", "0", "ada@example.org", "A.b_c:d@e-f", "x" * 200])
def test_ids(text: str) -> None:
    """The first a letter or digit, 200 characters at most."""
    assert is_id(text)


@pytest.mark.parametrize("text", ["", ".a", "-a", "_a", "@a", "a b", "a/b", "a\n", "a\x00", "ä", "a{b}", "x" * 201])
def test_not_ids(text: str) -> None:
    """Nothing that means something in a key, a path or a log line, and no trailing newline."""
    assert not is_id(text)


def test_names_of_tools() -> None:
    """Ids, and shorter: so that whatever a machine announces can be called."""
    assert is_tool_name("x" * 128)
    assert not is_tool_name("x" * 129)
    assert not is_tool_name("_x")


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"01-{TRACE}-{SPAN}-00", True),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        (f"00-{TRACE}-{SPAN}-01\n", False),
        ("", False),
    ],
)
def test_traceparent(text: str, good: bool) -> None:
    """W3C Trace Context, level 1: version ff and ids of zeroes are invalid."""
    assert is_traceparent(text) is good


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("order-17", "order-17"),
        ('"order-17"', "order-17"),
        (' \t"order-17"\t ', "order-17"),
        (" order-17 ", "order-17"),
        ("order 17", "order 17"),
        ('a"b', 'a"b'),
        ('"a\\"b"', 'a"b'),
        ('"a\\\\b"', "a\\b"),
        ("a\\b", "a\\b"),
        ('" a "', " a "),
        ("k" * KEY_CHARACTERS_MAX, "k" * KEY_CHARACTERS_MAX),
        ('"' + "k" * KEY_CHARACTERS_MAX + '"', "k" * KEY_CHARACTERS_MAX),
        ('"' + '\\"' * KEY_CHARACTERS_MAX + '"', '"' * KEY_CHARACTERS_MAX),
    ],
)
def test_idempotency_key(value: str, key: str) -> None:
    """A quoted structured-field string and a bare value name the same key."""
    assert parse_idempotency_key([value]) == key


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "is missing"),
        (["a", "a"], "more than once"),
        ([""], "is empty"),
        (["  "], "is empty"),
        (['""'], "is empty"),
        (['"  "'], "is empty"),
        (['"'], "without a closing one"),
        (['"abc'], "without a closing one"),
        (['"a"b"'], "unescaped quote inside"),
        (['"a"; p=1'], "without a closing one"),
        (['"a\\"'], "backslash that escapes nothing"),
        (['"a\\n"'], "backslash that escapes nothing"),
        (["k" * (KEY_CHARACTERS_MAX + 1)], "has 256 characters"),
        (["schlüssel"], "visible ASCII"),
        (["a\x7fb"], "visible ASCII"),
        (["a\tb"], "visible ASCII"),
        (["a\x00b"], "visible ASCII"),
    ],
)
def test_bad_idempotency_keys_are_refused_by_name(values: list[str], reason: str) -> None:
    """Every reason names the header."""
    with pytest.raises(ValueError, match="header Idempotency-Key") as caught:
        parse_idempotency_key(values)
    assert reason in str(caught.value)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=100).filter(str.strip))
def test_quoting_a_key_does_not_change_it(key: str) -> None:
    """Whatever is escaped by the rule of RFC 8941 is read back."""
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse_idempotency_key([quoted]) == key
