"""Who calls, and what they may: API keys, checked against Postgres and remembered for a few seconds; stream tokens.

Promises: a verdict, good or bad, is at most `VERDICT_TTL_S` old; however many requests arrive with a key, one look-up
          is under way for it; memory is bounded, and a flood of wrong keys pushes out no right ones.
Used by:  every handler but the public documents. What lies outside a key's reach is answered like what does not exist.
"""

import asyncio
import time
from collections.abc import Collection

from common.ids import UserId
from common.store.tokens import API_KEY_PREFIX, ApiKey, Tokens, hash_of
from gateway import problems, stream_tokens
from gateway.problems import Refusal
from gateway.request import Request
from gateway.stream_tokens import StreamTokens
from gateway.topics import Topic

# How long a revoked key may still work, and a new one that was tried too early may not.
VERDICT_TTL_S = 10.0
VERDICTS_MAX = 10_000
# `tlk_` and 256 bits in base64: what is longer by far is not worth hashing.
KEY_CHARACTERS_MAX = 100


class Auth:
    """The credential check of one process."""

    def __init__(self, tokens: Tokens, stream_tokens: StreamTokens) -> None:
        self._tokens = tokens
        self._stream_tokens = stream_tokens
        self._good: dict[bytes, tuple[float, ApiKey]] = {}
        self._bad: dict[bytes, float] = {}
        self._lookups: dict[bytes, asyncio.Task[ApiKey | None]] = {}

    async def require(self, request: Request, *scopes: str) -> ApiKey:
        """The caller's key, if it covers one of `scopes`.

        Raises:
            Refusal: no good key, or none of these scopes.
            StoreUnavailable: the key is not remembered and cannot be looked up.
        """
        key = await self._verdict(_api_key(request))
        if key is None:
            raise _unauthenticated("the API key is not known, or was revoked", error=b'error="invalid_token"')
        if key.scopes.isdisjoint(scopes):
            raise Refusal(
                problems.INSUFFICIENT_SCOPE,
                f"this needs an API key with the scope {' or '.join(map(repr, scopes))}",
                headers=((b"www-authenticate", b'Bearer realm="towline", error="insufficient_scope"'),),
            )
        return key

    async def require_for_user(self, request: Request, scope: str) -> UserId:
        """The user in the path, if the caller's key covers `scope` and reaches the user. Raises: as `require`."""
        key = await self.require(request, scope)
        user = request.id("user")
        if not key.reaches(user):
            raise problems.not_found("user")
        return UserId(user)

    async def require_unbound(self, request: Request, scope: str) -> ApiKey:
        """The caller's key, if it covers `scope` and is bound to no users: runs and agents belong to none.

        Raises: as `require`.
        """
        key = await self.require(request, scope)
        if key.users is not None:
            raise Refusal(problems.INSUFFICIENT_SCOPE, "this needs an API key that is not bound to users")
        return key

    async def require_for_streams(self, request: Request, topics: Collection[Topic]) -> ApiKey | None:
        """Let the caller read the events of these, all runs or all threads.

        Returns:
            The API key, which may yet not reach a thread's user; None: a stream token names all of them.

        Raises:
            Refusal: no good credential, or one for other streams.
            StoreUnavailable: as `require`.
        """
        in_query = request.query("access_token")
        if in_query is not None and request.values(b"authorization"):
            raise Refusal(problems.INVALID_REQUEST, "a credential is given both in Authorization and in access_token")
        token = _bearer(request) if in_query is None else in_query
        if in_query is None and not token.startswith(stream_tokens.PREFIX):
            if any(topic.noun == "thread" for topic in topics):
                return await self.require(request, "threads")
            return await self.require_unbound(request, "runs")
        # An API key is refused here: a query string ends up in the logs of everything on the way.
        opens = self._stream_tokens.verify(token, time.time_ns() // 1_000_000)
        if opens is None:
            raise _unauthenticated("the stream token is not valid, or has expired", error=b'error="invalid_token"')
        if not opens.issuperset(topics):
            raise problems.not_found(next(iter(topics)).noun)
        return None

    async def _verdict(self, value: str) -> ApiKey | None:
        digest = hash_of(value)
        now = time.monotonic()
        if (known := self._good.get(digest)) and known[0] > now:
            return known[1]
        if self._bad.get(digest, 0.0) > now:
            return None
        lookup = self._lookups.get(digest)
        if lookup is None:
            lookup = self._lookups[digest] = asyncio.create_task(self._look_up(value, digest), name="auth-lookup")
        # Shared: a caller who goes away must not cancel it for the others.
        return await asyncio.shield(lookup)

    async def _look_up(self, value: str, digest: bytes) -> ApiKey | None:
        try:
            key = await self._tokens.find_api_key(value)
        finally:
            del self._lookups[digest]
        expires_at = time.monotonic() + VERDICT_TTL_S
        # Deleted first, so that the oldest verdict is always the first of the dictionary.
        self._good.pop(digest, None)
        self._bad.pop(digest, None)
        if key is None:
            self._bad[digest] = expires_at
            if len(self._bad) > VERDICTS_MAX:
                del self._bad[next(iter(self._bad))]
        else:
            self._good[digest] = (expires_at, key)
            if len(self._good) > VERDICTS_MAX:
                del self._good[next(iter(self._good))]
        return key


def _bearer(request: Request) -> str:
    values = request.values(b"authorization")
    if not values:
        raise _unauthenticated("the header Authorization is missing")
    if len(values) > 1:
        raise _unauthenticated("the header Authorization is given more than once")
    kind, _, value = values[0].partition(" ")
    value = value.strip(" ")
    if kind.lower() != "bearer" or not value:
        raise _unauthenticated("the header Authorization is not `Bearer` and a credential")
    return value


def _api_key(request: Request) -> str:
    value = _bearer(request)
    if not value.startswith(API_KEY_PREFIX) or len(value) > KEY_CHARACTERS_MAX or not value.isascii():
        raise _unauthenticated(f"this is no API key: those begin with {API_KEY_PREFIX}", error=b'error="invalid_token"')
    return value


def _unauthenticated(detail: str, *, error: bytes = b"") -> Refusal:
    challenge = b'Bearer realm="towline"' + (b", " + error if error else b"")
    return Refusal(problems.UNAUTHENTICATED, detail, headers=((b"www-authenticate", challenge),))
