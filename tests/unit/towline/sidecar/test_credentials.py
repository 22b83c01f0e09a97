"""The token file: a renewed token is used though the file cannot take it, and somebody's new one goes before it."""

from pathlib import Path

import pytest

from towline.sidecar import credentials
from towline.sidecar.credentials import Credentials


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("first\n")
    return path


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Full from the start; `undo` makes room."""

    def is_full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(credentials, "_replace", is_full)
    return monkeypatch


def test_a_token_that_cannot_be_stored_is_used_all_the_same(file: Path, disk: pytest.MonkeyPatch) -> None:
    """A full disk, or a mounted secret; once there is room, the next dial stores it."""
    found = Credentials(None, file)
    assert found.read() == "first"
    for token in ("second", "third"):
        found.renew(token)
        assert [found.read(), found.read()] == [token, token]
    assert file.read_text() == "first\n"
    disk.undo()
    assert found.read() == "third"
    assert file.read_text() == "third\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_token_that_somebody_puts_into_the_file_is_used(file: Path, disk: pytest.MonkeyPatch) -> None:
    """Before the one in memory, which may have been revoked; also where it came before the renewal was tried."""
    found = Credentials(None, file)
    found.read()
    found.renew("second")
    file.write_text("from-an-operator\n")
    assert [found.read(), found.read()] == ["from-an-operator"] * 2
    file.write_text("another")
    found.renew("third")
    assert found.read() == "another"
    disk.undo()
    assert found.read() == "another"


def test_a_disk_that_fills_up_between_two_renewals_takes_nothing_back(file: Path) -> None:
    """The file has the token before the newest: that is not somebody's new one."""
    found = Credentials(None, file)
    found.read()
    found.renew("second")
    with pytest.MonkeyPatch.context() as patch:

        def is_full(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(credentials, "_replace", is_full)
        found.renew("third")
        assert found.read() == "third"
    assert file.read_text() == "second\n"
    assert found.read() == "third"
    assert file.read_text() == "third\n"
