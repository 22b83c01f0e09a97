"""What calls to agents have in common: the secrets that go along, and what a refusal means for the turn."""

import hashlib
import hmac

from common.process.secrets import Secrets, SecretsUnreadable
from towline.wire import json
from worker.agents import AgentFailed, AgentUnavailable

# Statuses of requests that may go well later, though nothing is wrong with the server.
AGAIN_STATUSES = frozenset({408, 425, 429})
# An agent that asks for more patience is asked again all the same: the turn's cap is short.
RETRY_AFTER_S_MAX = 120.0
REASON_CHARACTERS_MAX = 500


def secret_of(secrets: Secrets, stored: bytes | None, name: str) -> str | None:
    """A secret of an agent, as it was given; None: it has none. Raises: AgentFailed."""
    if stored is None:
        return None
    try:
        return secrets.decrypt(stored)[name]
    except (SecretsUnreadable, KeyError) as error:
        raise AgentFailed("secret-unreadable", f"the agent's {name} cannot be read; give it again") from error


def signature(secret: str, sent_at: str, body: bytes) -> str:
    """`Towline-Signature` of a request: HMAC-SHA256 over `Towline-Timestamp`, a dot and the body, in hex."""
    return f"v1={hmac.digest(secret.encode(), sent_at.encode() + b'.' + body, hashlib.sha256).hex()}"


def refusal(status: int, reason: str, retry_after: str | None) -> AgentFailed | AgentUnavailable:
    """What an answer with a status that is no success means for the turn."""
    message = f"the agent answered {status}{': ' + reason if reason else ''}"
    if status >= 500 or status in AGAIN_STATUSES:
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
        return AgentUnavailable(message, retry_after_s=min(seconds, RETRY_AFTER_S_MAX))
    if status in range(300, 400):
        return AgentFailed("agent-redirected", f"{message}; redirects are not followed")
    return AgentFailed("agent-refused", message)


def reason_of(body: bytes) -> str:
    """Why, in the words of an error's body: a problem (RFC 9457), an `error` or `message` member, or plain text."""
    try:
        value, _ = json.mend(body)
    except json.JsonProblem:
        text = json.mend_text(body.decode(errors="replace"))
        return "" if text.lstrip().startswith("<") else _short(text)
    for _ in range(2):
        if not isinstance(value, dict):
            break
        value = next((value[name] for name in ("detail", "error", "message", "title") if value.get(name)), "")
    return _short(value) if isinstance(value, str) else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:REASON_CHARACTERS_MAX]
