"""Rules for the identifiers and header values that callers may choose."""

import re

# User, run, agent and thread ids: the caller's own words, safe in keys, paths and logs.
ID_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}"
_ID = re.compile(ID_PATTERN)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
KEY_CHARACTERS_MAX = 255
TOOL_NAME_CHARACTERS_MAX = 128


def is_id(text: str) -> bool:
    """Whether `text` may name a user, run, agent or thread.

    1-200 characters of `A-Z a-z 0-9 . _ : @ -`, the first a letter or digit.
    """
    return _ID.fullmatch(text) is not None


def is_tool_name(text: str) -> bool:
    """Whether a machine's tool may be called `text`: an id of at most 128 characters."""
    return len(text) <= TOOL_NAME_CHARACTERS_MAX and is_id(text)


def is_traceparent(text: str) -> bool:
    """Whether `text` is a W3C `traceparent` value."""
    return _TRACEPARENT.fullmatch(text) is not None and not text.startswith("ff")


def parse_idempotency_key(values: list[str]) -> str:
    """Read the `Idempotency-Key` header: a quoted structured-field string and a bare value name the same key.

    Raises:
        ValueError: missing, given twice, empty, too long, or with characters that are not visible ASCII or spaces.
    """
    if not values:
        raise ValueError("the header Idempotency-Key is missing")
    if len(values) > 1:
        raise ValueError("the header Idempotency-Key is given more than once")
    text = values[0].strip(" \t")
    if text.startswith('"'):
        if len(text) < 2 or not text.endswith('"'):
            raise ValueError("the header Idempotency-Key has an opening quote without a closing one")
        text = _unquote(text[1:-1])
    if not text.strip():
        raise ValueError("the header Idempotency-Key is empty")
    if len(text) > KEY_CHARACTERS_MAX:
        raise ValueError(
            f"the header Idempotency-Key has {len(text)} characters, at most {KEY_CHARACTERS_MAX} are allowed"
        )
    if not all(" " <= c <= "~" for c in text):
        raise ValueError("the header Idempotency-Key has characters other than visible ASCII and spaces")
    return text


def _unquote(text: str) -> str:
    out: list[str] = []
    characters = iter(text)
    for c in characters:
        if c == '"':
            raise ValueError("the header Idempotency-Key has an unescaped quote inside")
        plain = next(characters, "") if c == "\\" else c
        if c == "\\" and plain not in ('"', "\\"):
            raise ValueError("the header Idempotency-Key has a backslash that escapes nothing")
        out.append(plain)
    return "".join(out)
