"""Credentials: API keys of products, machine tokens of sidecars, and the session epochs that tokens mint.

Owns:     the tables `api_keys`, `machine_tokens`, `session_epochs`, `machines`.
Promises: values are random 256 bits, shown once, stored as SHA-256; checking a machine token and minting its session's
          epoch are one statement.
Used by:  the gateway (API keys, token management), the worker's handshake (mint), `towline keys`.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from common.ids import MachineId, UserId, new_id
from common.store.postgres import Postgres
from towline.wire import json
from towline.wire.frames import Tool

SCOPES = ("jobs", "runs", "threads", "admin")
API_KEY_PREFIX = "tlk_"
MACHINE_TOKEN_PREFIX = "tlm_"  # noqa: S105 (no secret: what secrets begin with, for scanners that look for leaks)


class ApiKey(NamedTuple):
    """What an API key may do. `users`: None for every user."""

    key_id: str
    name: str
    scopes: frozenset[str]
    users: frozenset[str] | None

    def reaches(self, user: str | None) -> bool:
        """Whether this key may act for the user; what is nobody's (None) is beyond a key that is bound to some."""
        return self.users is None or user in self.users


class KeyRow(NamedTuple):
    """An API key in a list. Times in milliseconds."""

    key_id: str
    name: str
    scopes: list[str]
    users: list[str] | None
    created_ms: int
    revoked_ms: int | None


class TokenRow(NamedTuple):
    """A machine token in a list. Times in milliseconds."""

    token_id: str
    user_id: str
    name: str
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None


class Minted(NamedTuple):
    """A new session: whose, its epoch, and the token that opened it."""

    user: UserId
    epoch: int
    token_id: str


class Catalogue(NamedTuple):
    """What a machine announced last; `tools` is JSON text."""

    machine: MachineId
    name: str
    version: str
    tools: str
    seen_ms: int


def new_secret(prefix: str) -> str:
    """A credential's value: 256 random bits."""
    return prefix + secrets.token_urlsafe(32)


def hash_of(value: str) -> bytes:
    """How a credential is stored and looked up."""
    return hashlib.sha256(value.encode()).digest()


class Tokens:
    """The credential tables."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def find_api_key(self, value: str) -> ApiKey | None:
        """The key of this value, if it is good. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("find_api_key", {"hash": hash_of(value)})
        if not rows:
            return None
        row = rows[0]
        users = None if row.users is None else frozenset(row.users)
        return ApiKey(row.key_id, row.name, frozenset(row.scopes), users)

    async def add_api_key(
        self, name: str, scopes: Sequence[str], users: Sequence[str] | None, *, first_only: bool = False
    ) -> tuple[KeyRow, str] | None:
        """Make a key; returns it and its value, which is not stored. None: `first_only`, and there is a key already.

        Raises: StoreUnavailable.
        """
        value = new_secret(API_KEY_PREFIX)
        params = {
            "key_id": new_id(),
            "hash": hash_of(value),
            "name": name,
            "scopes": list(scopes),
            "users": None if users is None else list(users),
            "first_only": first_only,
        }
        rows = await self._postgres.fetch("add_api_key", params)
        return (KeyRow(*rows[0]), value) if rows else None

    async def list_api_keys(self, *, before: str | None, limit: int) -> list[KeyRow]:
        """Keys, newest first, before a key id. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("list_api_keys", {"before": before, "limit": limit})
        return [KeyRow(*row) for row in rows]

    async def revoke_api_key(self, key_id: str) -> bool:
        """End a key; gateways heed it within 10 s. False: no such key. Raises: StoreUnavailable."""
        return bool(await self._postgres.fetch("revoke_api_key", {"key_id": key_id}))

    async def add_machine_token(self, user: UserId, name: str, ttl_s: float | None) -> tuple[TokenRow, str]:
        """Make a machine token; returns it and its value, which is not stored. Raises: StoreUnavailable."""
        value = new_secret(MACHINE_TOKEN_PREFIX)
        params = {"token_id": new_id(), "hash": hash_of(value), "user": user, "name": name, "ttl_s": ttl_s}
        (row,) = await self._postgres.fetch("add_machine_token", params)
        return TokenRow(*row), value

    async def list_machine_tokens(self, user: UserId, *, before: str | None, limit: int) -> list[TokenRow]:
        """A user's machine tokens, newest first, before a token id. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("list_machine_tokens", {"user": user, "before": before, "limit": limit})
        return [TokenRow(*row) for row in rows]

    async def revoke_machine_token(self, user: UserId, token_id: str) -> bool:
        """End a token; its sockets are closed within a heartbeat. False: no such token. Raises: StoreUnavailable."""
        return bool(await self._postgres.fetch("revoke_machine_token", {"user": user, "token_id": token_id}))

    async def still_valid(self, token_ids: Sequence[str]) -> dict[str, bool]:
        """Which of these machine tokens are good, and whether each is due for renewal. Raises: StoreUnavailable."""
        if not token_ids:
            return {}
        rows = await self._postgres.fetch("valid_tokens", {"ids": list(token_ids)})
        return {row.token_id: row.is_due for row in rows}

    async def renew_machine_token(self, token_id: str) -> str | None:
        """Give a token that is due a new value, which is returned and not stored, and as long a life as at first.

        The old value stays good until it would have expired, so a machine that misses the new one is not shut out.
        None: not due, or renewed by someone else a moment ago. Raises: StoreUnavailable.
        """
        value = new_secret(MACHINE_TOKEN_PREFIX)
        rows = await self._postgres.fetch("renew_machine_token", {"token_id": token_id, "hash": hash_of(value)})
        return value if rows else None

    async def mint_session(self, value: str) -> Minted | None:
        """Check a machine token and mint its session's epoch. None: not a good token. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("mint_session", {"hash": hash_of(value)})
        return Minted(*rows[0]) if rows else None

    async def see_machine(
        self, user: UserId, machine: MachineId, *, name: str, version: str, tools: Sequence[Tool], epoch: int
    ) -> None:
        """Keep what a machine announced. Raises: StoreUnavailable."""
        params = {
            "user": user,
            "machine": machine,
            "name": name,
            "version": version,
            "tools": json.dumps(tools).decode(),
            "epoch": epoch,
        }
        await self._postgres.fetch("see_machine", params)

    async def catalogue(self, user: UserId) -> Catalogue | None:
        """The catalogue of the user's machine that connected last. Raises: StoreUnavailable."""
        rows = await self._postgres.fetch("catalogue", {"user": user})
        return Catalogue(*rows[0]) if rows else None
