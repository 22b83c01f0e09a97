"""Headers at rest: only our keys open them, and keys can be changed."""

import pytest

from common.process.secrets import Secrets, SecretsUnreadable, new_key

HEADERS = {"Authorization": "Bearer ünicode", "X-Empty": ""}


def test_headers_come_back_and_are_not_seen() -> None:
    secrets = Secrets([new_key()])
    stored = secrets.encrypt(HEADERS)
    assert b"Bearer" not in stored
    assert secrets.decrypt(stored) == HEADERS
    assert secrets.encrypt(HEADERS) != stored


def test_the_first_key_encrypts_and_each_decrypts() -> None:
    old, new = new_key(), new_key()
    stored = Secrets([old]).encrypt(HEADERS)
    assert Secrets([new, old]).decrypt(stored) == HEADERS
    assert Secrets([new]).decrypt(Secrets([new, old]).encrypt(HEADERS)) == HEADERS
    with pytest.raises(SecretsUnreadable):
        Secrets([new]).decrypt(stored)


@pytest.mark.parametrize("damage", [lambda s: s[:-1] + b"?", lambda _: b"", lambda _: b"plain"])
def test_what_was_changed_is_not_read(damage: object) -> None:
    secrets = Secrets([new_key()])
    with pytest.raises(SecretsUnreadable):
        secrets.decrypt(damage(secrets.encrypt(HEADERS)))  # type: ignore[operator]


def test_without_a_key_nothing_is_taken_or_given() -> None:
    secrets = Secrets([])
    assert not secrets.is_usable
    with pytest.raises(ValueError, match="no key"):
        secrets.encrypt(HEADERS)
    with pytest.raises(SecretsUnreadable):
        secrets.decrypt(Secrets([new_key()]).encrypt(HEADERS))


@pytest.mark.parametrize("wrong", ["", "short", "é" * 44, "A" * 42])
def test_a_wrong_key_is_named_by_its_place_alone(wrong: str) -> None:
    with pytest.raises(ValueError, match="key 2 is not") as caught:
        Secrets([new_key(), wrong])
    assert not wrong or wrong not in str(caught.value)
