"""`files_list` and `files_read` on a real tree that somebody made to get out of it."""

import base64
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from towline.sidecar.files import ENTRIES_MAX, FileNotAllowed, file_tools

SECRET = "secret of the neighbour"


class Files:
    """Both tools on one allowed folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools: list[Callable[..., dict[str, Any]]] = file_tools([folder])
        self.list, self.read = tools

    def text(self, name: str, **limits: int) -> str:
        content: str = self.read(str(self.folder / name), **limits)["text"]
        return content


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """`allowed/` with a neighbour `allowed-not/` that has a secret."""
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "secret").write_text(SECRET)
    folder = tmp_path / "allowed"
    (folder / "sub").mkdir(parents=True)
    (folder / "note.txt").write_text("schön")
    (folder / "sub" / "deep.txt").write_text("deep")
    return Files(folder)


def test_a_folder_is_listed_with_kinds_and_sizes(files: Files) -> None:
    (files.folder / "link").symlink_to("note.txt")
    os.mkfifo(files.folder / "pipe")
    listed = files.list(str(files.folder))
    assert not listed["truncated"]
    assert [(entry["name"], entry["kind"]) for entry in listed["entries"]] == [
        ("link", "link"),
        ("note.txt", "file"),
        ("pipe", "other"),
        ("sub", "folder"),
    ]
    assert listed["entries"][1]["bytes"] == 6
    assert [entry["name"] for entry in files.list(f"{files.folder}/sub/")["entries"]] == ["deep.txt"]


def test_a_large_folder_is_cut_and_says_so(files: Files) -> None:
    for number in range(ENTRIES_MAX + 1):
        (files.folder / "sub" / f"{number}").touch()
    listed = files.list(str(files.folder / "sub"))
    assert (len(listed["entries"]), listed["truncated"]) == (ENTRIES_MAX, True)


def test_a_file_is_read_in_pieces_without_cutting_characters(files: Files) -> None:
    (files.folder / "long").write_text("aü€𝄞" * 10)
    text, offset = "", 0
    while offset is not None:
        piece = files.read(str(files.folder / "long"), offset=offset, max_bytes=7)
        assert len(piece["text"].encode()) <= 7
        text, offset = text + piece["text"], piece["next_offset"]
    assert text == "aü€𝄞" * 10
    assert files.read(str(files.folder / "long"), offset=10**9)["text"] == ""


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"text with \x00", bytes(range(256))])
def test_what_is_no_text_comes_as_base64(files: Files, content: bytes) -> None:
    (files.folder / "binary").write_bytes(content)
    read = files.read(str(files.folder / "binary"))
    assert base64.b64decode(read["base64"]) == content
    assert "text" not in read


def test_an_empty_file_is_text(files: Files) -> None:
    (files.folder / "empty").touch()
    assert files.text("empty") == ""


@pytest.mark.parametrize(
    "path",
    [
        "{folder}/../allowed-not/secret",
        "{folder}/sub/../../allowed-not/secret",
        "{folder}-not/secret",
        "{folder}/../allowed/note.txt",
        "{parent}/allowed-not/secret",
        "{parent}",
        "/",
        "/etc/passwd",
        "note.txt",
        "sub/deep.txt",
        "~/x",
        "{folder}/note.txt\x00.png",
        "//{folder}/../allowed-not/secret",
    ],
)
def test_no_path_leads_out(files: Files, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files.folder)
    path = path.format(folder=files.folder, parent=files.folder.parent)
    for tool in (files.list, files.read):
        with pytest.raises(FileNotAllowed):
            tool(path)


@pytest.mark.parametrize("target", ["{parent}/allowed-not/secret", "../allowed-not/secret", "/proc/self/environ"])
def test_a_link_is_not_followed(files: Files, target: str) -> None:
    (files.folder / "link").symlink_to(target.format(parent=files.folder.parent))
    with pytest.raises(FileNotAllowed, match="link"):
        files.read(str(files.folder / "link"))


def test_a_linked_folder_on_the_way_is_not_followed(files: Files) -> None:
    """Not even one that leads back inside: there is no telling them apart that could not be raced."""
    (files.folder / "out").symlink_to("../allowed-not")
    (files.folder / "in").symlink_to("sub")
    for path in ("out/secret", "in/deep.txt", "sub/../out/secret"):
        with pytest.raises(FileNotAllowed):
            files.read(f"{files.folder}/{path}")
    with pytest.raises(FileNotAllowed, match="link"):
        files.list(str(files.folder / "out"))


def test_a_hard_link_is_a_file(files: Files) -> None:
    (files.folder / "hard").hardlink_to(files.folder.parent / "allowed-not" / "secret")
    assert files.text("hard") == SECRET


def test_pipes_sockets_and_devices_are_not_opened(files: Files) -> None:
    """And nothing waits for the other end of a pipe."""
    os.mkfifo(files.folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(files.folder / "sock"))
        names = ["pipe", "sock"]
        if os.geteuid() == 0:
            with contextlib.suppress(PermissionError):  # in a container without the right to
                os.mknod(files.folder / "device", 0o600 | 0o020000, os.makedev(1, 5))
                names.append("device")
        for name in names:
            with pytest.raises(FileNotAllowed, match="neither"):
                files.read(str(files.folder / name))


def test_kinds_are_not_mixed_up(files: Files) -> None:
    with pytest.raises(FileNotAllowed, match="no folder"):
        files.list(str(files.folder / "note.txt"))
    with pytest.raises(FileNotAllowed, match="no file"):
        files.read(str(files.folder / "sub"))
    with pytest.raises(FileNotFoundError):
        files.read(str(files.folder / "nothing"))
    with pytest.raises(NotADirectoryError):
        files.read(str(files.folder / "note.txt" / "below"))


def test_an_allowed_folder_may_be_named_by_its_link(files: Files, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to("allowed")
    by_alias = Files(tmp_path / "alias")
    assert by_alias.text("note.txt") == "schön"
    assert by_alias.read(str(tmp_path / "allowed" / "note.txt"))["text"] == "schön"


def test_without_folders_nothing_is_read(files: Files) -> None:
    listing, reading = file_tools([])
    for tool in (listing, reading):
        with pytest.raises(FileNotAllowed, match="allowed: none"):
            tool(str(files.folder))


@pytest.mark.parametrize("swapped", ["secret", "folder", "pipe"])
def test_swapping_a_name_after_it_was_looked_at_gains_nothing(
    files: Files, swapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst instant, between the look at a name and its opening, it becomes a link to the secret, or a pipe."""
    folder = files.folder / "folder"
    folder.mkdir()
    (folder / "secret").write_text("harmless")
    assert files.text("folder/secret") == "harmless"
    look = os.stat

    def look_then_swap(name: str, **how: Any) -> os.stat_result:
        facts = look(name, **how)
        if name == ("folder" if swapped == "folder" else "secret"):
            if swapped == "folder":
                folder.rename(files.folder / "away")
                folder.symlink_to("../allowed-not")
            else:
                (folder / "secret").unlink()
                if swapped == "pipe":
                    os.mkfifo(folder / "secret")
                else:
                    (folder / "secret").symlink_to("../../allowed-not/secret")
        return facts

    monkeypatch.setattr(os, "stat", look_then_swap)
    with pytest.raises((FileNotAllowed, OSError)):
        files.read(str(folder / "secret"))
