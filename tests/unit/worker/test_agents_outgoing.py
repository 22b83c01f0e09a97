"""What calls to agents have in common: signatures, and what refusals mean."""

import pytest

from worker.agents import AgentFailed, AgentUnavailable
from worker.agents.outgoing import RETRY_AFTER_S_MAX, reason_of, refusal, signature


def test_a_signature_is_what_the_documents_say() -> None:
    """`printf '1790000000.{"a":1}' | openssl dgst -sha256 -hmac secret`: endpoints in any language rely on it."""
    expected = "v1=da8fe498621aaab99d5b11c51346b13d1a2bf2914b865b8d3edd3531cab25a3e"
    assert signature("secret", "1790000000", b'{"a":1}') == expected


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        (400, None, "agent-refused"),
        (404, None, "agent-refused"),
        (204, None, "agent-refused"),
        (302, None, "agent-redirected"),
        (408, None, 0.0),
        (429, "7", 7.0),
        (429, "later", 0.0),
        (500, None, 0.0),
        (503, "9999999999", RETRY_AFTER_S_MAX),
    ],
)
def test_a_refusal_is_final_or_not(status: int, retry_after: str | None, expected: str | float) -> None:
    error = refusal(status, "why", retry_after)
    assert f"answered {status}: why" in str(error)
    if isinstance(expected, str):
        assert isinstance(error, AgentFailed)
        assert error.code == expected
    else:
        assert isinstance(error, AgentUnavailable)
        assert error.retry_after_s == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"detail": "no such thread", "title": "Not found"}', "no such thread"),
        (b'{"title": "Not found"}', "Not found"),
        (b'{"error": {"message": "The model `x` does not exist", "type": "invalid"}}', "The model `x` does not exist"),
        (b'{"error": "quota"}', "quota"),
        (b'{"message": "stop\\u0000 it"}', "stop\ufffd it"),
        (b"plain  words\n", "plain words"),
        (b"<html><body>Bad gateway</body></html>", ""),
        (b'{"error": [1, 2]}', ""),
        (b"[" * 100_000, "[" * 500),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
    ],
    ids=["problem", "title", "openai", "error", "nul", "text", "html", "list", "deep", "bytes", "empty"],
)
def test_a_reason_is_found(body: bytes, expected: str) -> None:
    assert reason_of(body) == expected
