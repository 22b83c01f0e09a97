"""Stream tokens: short-lived credentials that a browser may hold, each good for exactly the streams that it names.

Owns:     their form and their signature.
Promises: what a token says was signed by one of the installation's keys and has not expired; nothing is stored, so
          every replica with these keys verifies it, and none can take it back: it ends by its time.
Used by:  `auth` (verify), `stream_token_routes` (mint). PURE: the time is a parameter.

`tls_` and two parts in base64url: the claims as JSON, and their HMAC-SHA-256.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence

import msgspec

from gateway.topics import Topic
from towline.wire.runs import STREAM_RUNS_MAX, STREAM_THREADS_MAX

PREFIX = "tls_"
# Below this a key can be guessed; 32 characters of hex are 128 bits.
KEY_CHARACTERS_MIN = 32
# Ids of 200 characters, and of threads, as many as a token may name, in base64; what is longer is not worth hashing.
TOKEN_CHARACTERS_MAX = 4 * ((STREAM_RUNS_MAX + 1) * 210 + STREAM_THREADS_MAX * 40) // 3


class Claims(msgspec.Struct, frozen=True):
    """What a token says: whose events may be read, until when (milliseconds since the Unix epoch)."""

    runs: list[str]
    expires_ms: int
    threads: list[str] = []


_decoder = msgspec.json.Decoder(Claims)


class StreamTokens:
    """The signer of one process.

    Args:
        keys: the first one signs, all verify: put a new key first, and take the old one out an hour later.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def is_configured(self) -> bool:
        """Whether there is a key to sign with."""
        return bool(self._keys)

    def mint(self, topics: Iterable[Topic], expires_ms: int) -> str:
        """Sign a token for the streams of these."""
        named: dict[str, list[str]] = {"run": [], "thread": []}
        for topic in topics:
            named[topic.noun].append(topic.id)
        claims = msgspec.json.encode(Claims(named["run"], expires_ms, named["thread"]))
        return f"{PREFIX}{_text(claims)}.{_text(_signature(self._keys[0], claims))}"

    def verify(self, token: str, now_ms: int) -> frozenset[Topic] | None:
        """What a token opens; None: it is not ours, was changed, or has expired."""
        if len(token) > TOKEN_CHARACTERS_MAX or not token.startswith(PREFIX) or not token.isascii():
            return None
        head, _, tail = token.removeprefix(PREFIX).partition(".")
        claims, signature = _bytes(head), _bytes(tail)
        # The signature first: nothing that a stranger wrote is parsed.
        if not any(hmac.compare_digest(_signature(key, claims), signature) for key in self._keys):
            return None
        try:
            said = _decoder.decode(claims)
        except msgspec.DecodeError:  # signed by a release that says it otherwise
            return None
        if now_ms >= said.expires_ms:
            return None
        return frozenset([Topic("run", run) for run in said.runs] + [Topic("thread", one) for one in said.threads])


def _signature(key: bytes, claims: bytes) -> bytes:
    # The purpose is part of what is signed: a key that serves another purpose one day makes no stream tokens.
    return hmac.digest(key, b"towline stream token\n" + claims, hashlib.sha256)


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
