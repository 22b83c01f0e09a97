"""Headers and secrets that callers give us for their upstreams and agents, encrypted while they lie in Postgres.

Owns:     the form in which they are stored.
Promises: what is stored can be read with the keys alone; the first key encrypts, each of them decrypts, so that keys
          can be changed: put the new one first, and take the old one away when no run or agent of before is left.
Used by:  the gateway (encrypt), the relay and the worker (decrypt).
"""

from collections.abc import Mapping, Sequence

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from common.errors import Permanent


class SecretsUnreadable(Permanent):
    """None of our keys opens this, or it was changed. What it belongs to has to be given again."""


class Secrets:
    """The keys of `TOWLINE_SECRET_KEYS`."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Take Fernet keys: 32 bytes in URL-safe base64 each (`new_key`).

        Raises:
            ValueError: one of them is none; the message has its place, not its value.
        """
        fernets = []
        for place, key in enumerate(keys, 1):
            try:
                fernets.append(Fernet(key))
            except ValueError:
                raise ValueError(f"key {place} is not 32 bytes in URL-safe base64") from None
        self._fernets = MultiFernet(fernets) if fernets else None

    @property
    def is_usable(self) -> bool:
        """Whether there is a key at all; without one no secrets can be taken."""
        return self._fernets is not None

    def encrypt(self, secrets: Mapping[str, str]) -> bytes:
        """Encrypt named secrets. Twice the same ones give different bytes. Raises: ValueError when there is no key."""
        if self._fernets is None:
            raise ValueError("there is no key to encrypt with")
        return self._fernets.encrypt(msgspec.json.encode(dict(secrets)))

    def decrypt(self, stored: bytes) -> dict[str, str]:
        """Give back what was encrypted. Raises: SecretsUnreadable."""
        if self._fernets is None:
            raise SecretsUnreadable("there is no key to decrypt with")
        try:
            return msgspec.json.decode(self._fernets.decrypt(stored), type=dict[str, str])
        except InvalidToken:
            raise SecretsUnreadable("no key decrypts this") from None


def new_key() -> str:
    """A new key for `TOWLINE_SECRET_KEYS`."""
    return Fernet.generate_key().decode()
