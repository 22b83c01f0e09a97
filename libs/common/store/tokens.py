"""Credentials: API keys of products, machine tokens of sidecars, and the session epochs that tokens mint.

Owns:     the tables `api_keys`, `machine_tokens`, `machine_token_values`, `session_epochs`, `machines`.
Promises: values are random 256 bits, shown once, stored as SHA-256; checking a machine token and minting its session's
          epoch are one statement.
Used by:  the gateway (API keys, token management), the worker's handshake (mint) and upkeep (renew), `towline keys`.

How a machine token with a life is renewed:

Problem:  a new value travels once, in a frame, and nobody can know that it arrived: the socket may be cut just then,
          the worker killed, the answer of Postgres lost, the machine's disk full. A machine that was missed would be
          locked out when its old value ends.
Decision: a token has several values (`machine_token_values`), each good until its own end. A session knows which one
          its machine holds: the one that opened it, then the last one that was sent over it. Once four fifths of the
          life of *that* value are over, the session is offered a new one. What a session sends arrives, or the session
          breaks; the next one then shows by its opening value what the machine has, and is offered again if need be. So
          an offer is repeated per session and not per heartbeat, and the last one may be made just before the end.
Bounds:   `OTHER_VALUES_MAX`. Where there are more, unused values go first, then old ones, and never the one that is
          held. What has ended goes with the next renewal. The token itself ends with its newest value (`expires_at`),
          or when it is revoked, and all values with it.
Price:    a thief of a value has it for as long as before, and is offered new ones as the machine is: revoke the token.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from common.ids import MachineId, UserId, new_id
from common.store.postgres import Postgres
from towline.wire import json
from towline.wire.frames import Tool

API_KEY_PREFIX = "tlk_"
MACHINE_TOKEN_PREFIX = "tlm_"  # noqa: S105 (no secret: what secrets begin with, for scanners that look for leaks)

# Values of a token beside the newest and the one that the asking session holds. A machine has two at a time; the rest
# are offers that were lost, one per session that broke in the last fifth of a life.
OTHER_VALUES_MAX = 14


class ApiKey(NamedTuple):
    """What an API key may do. `users`: None for every user."""

    key_id: str
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


class Held(NamedTuple):
    """The value of a machine token that a session's machine has, as far as the session knows."""

    token_id: str
    hash: bytes


class Minted(NamedTuple):
    """A new session: whose, its epoch, and the token and the value that opened it."""

    user: UserId
    epoch: int
    token_id: str
    hash: bytes


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
        return ApiKey(row.key_id, frozenset(row.scopes), users)

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

    async def still_valid(self, held: Sequence[Held]) -> dict[Held, bool]:
        """Of which of these the token is good, and whether the value is due for renewal. Raises: StoreUnavailable."""
        if not held:
            return {}
        params = {"ids": [one.token_id for one in held], "hashes": [one.hash for one in held]}
        rows = await self._postgres.fetch("valid_tokens", params)
        return {Held(row.token_id, row.hash): row.is_due for row in rows}

    async def renew_machine_token(self, held: Held) -> str | None:
        """Give a token a new value, which is returned and not stored, and as long a life as at first.

        Every other value stays good until it would have expired, so a machine that misses the new one is not shut out.
        None: the value that is held is not due. Raises: StoreUnavailable.
        """
        value = new_secret(MACHINE_TOKEN_PREFIX)
        params = {
            "token_id": held.token_id,
            "held": held.hash,
            "hash": hash_of(value),
            "others_max": OTHER_VALUES_MAX,
        }
        rows = await self._postgres.fetch("renew_machine_token", params)
        return value if rows else None

    async def mint_session(self, value: str) -> Minted | None:
        """Check a machine token and mint its session's epoch. None: not a good token. Raises: StoreUnavailable."""
        hashed = hash_of(value)
        rows = await self._postgres.fetch("mint_session", {"hash": hashed})
        return Minted(rows[0].user_id, rows[0].epoch, rows[0].token_id, hashed) if rows else None

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
