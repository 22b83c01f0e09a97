"""Built-in tools that look at files, in folders that the user has allowed and nowhere else.

Owns:     the way from a path that an agent wrote to an open file.
Promises: nothing outside an allowed folder is opened: a path is walked from that folder downwards, name by name, each
          opened relative to the one before and never through a link. Whoever swaps a folder for a link meanwhile gains
          nothing. Devices, pipes and sockets are not opened either, and what is returned is bounded.
Used by:  sidecar.builtin.

(Hard links are files like any other: who can make one in the folder has the file.)
"""

import base64
import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from towline.sidecar.tools import tool

ENTRIES_MAX = 1000
# As JSON a byte may take six characters, and a result has room for 1 MiB.
READ_BYTES_MAX = 128 * 1024

# Not blocking: a pipe that took the place of a file must not hold us up before we have looked at it.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

AbsolutePath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class FileNotAllowed(Exception):
    """A path that leads out of the allowed folders, or to what is neither a file nor a folder."""


def file_tools(allowed_folders: Sequence[Path]) -> list[Callable[..., Any]]:
    """The tools `files_list` and `files_read`.

    Args:
        allowed_folders: what they may look into, absolute.
    """
    # A folder may be named as the user wrote it, or by what it is: /tmp is a link to /private/tmp on macOS.
    roots = {name: folder.resolve() for folder in allowed_folders for name in (folder, folder.resolve())}

    @tool(read_only=True)
    def files_list(path: AbsolutePath) -> dict[str, Any]:
        """List a folder on this machine: name, kind, size and time of each entry.

        Only folders that the user has allowed. Links are shown and not followed.
        """
        with _opened(roots, path) as handle:
            if not stat.S_ISDIR(os.fstat(handle).st_mode):
                raise FileNotAllowed(f"{path} is no folder")
            with os.scandir(handle) as found:
                some = list(itertools.islice(found, ENTRIES_MAX + 1))
            entries = [_describe(entry) for entry in sorted(some[:ENTRIES_MAX], key=lambda entry: entry.name)]
        return {"path": path, "entries": entries, "truncated": len(some) > ENTRIES_MAX}

    @tool(read_only=True)
    def files_read(
        path: AbsolutePath,
        offset: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0,
        max_bytes: Annotated[int, msgspec.Meta(ge=4, le=READ_BYTES_MAX)] = 65536,
    ) -> dict[str, Any]:
        """Read a part of a file on this machine: as `text` if it is UTF-8, else as `base64`. Continue at `next_offset`.

        Only in folders that the user has allowed.
        """
        with _opened(roots, path) as handle:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise FileNotAllowed(f"{path} is no file")
            content = _read(handle, offset, max_bytes)
        text = _text(content)
        if text is not None:
            content = text.encode()
        end = offset + len(content)
        return {
            "path": path,
            "bytes": facts.st_size,
            **({"base64": base64.b64encode(content).decode()} if text is None else {"text": text}),
            "next_offset": end if content and end < facts.st_size else None,
        }

    return [files_list, files_read]


@contextlib.contextmanager
def _opened(roots: dict[Path, Path], path: str) -> Iterator[int]:
    """The descriptor of a file or folder inside one of the roots, closed at the end of the block.

    Raises:
        FileNotAllowed: not inside, or on the way there is a link or what is neither file nor folder.
        OSError: it is not there, or the user may not read it.
    """
    root, names = _locate(roots, path)
    handle = os.open(root, _OPEN | os.O_DIRECTORY)
    try:
        for name in names:
            # For a clear answer, and because merely opening a device can do something.
            mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise FileNotAllowed(f"{path}: {name!r} is a link, and links are not followed")
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise FileNotAllowed(f"{path}: {name!r} is neither a file nor a folder")
            # By now the name may mean something else; O_NOFOLLOW, and the caller's fstat, have the last word.
            inner = os.open(name, _OPEN, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _locate(roots: dict[Path, Path], path: str) -> tuple[Path, Sequence[str]]:
    """The root that a path lies in, and the names that lead from there to it."""
    given = Path(path)
    if ".." in given.parts or "\x00" in path:
        raise FileNotAllowed("a path must not contain '..' or U+0000")
    for name, root in roots.items():
        if given.is_relative_to(name):
            return root, given.relative_to(name).parts
    allowed = ", ".join(sorted({str(root) for root in roots.values()})) or "none"
    raise FileNotAllowed(f"{path} is in no folder that this machine's user has allowed; allowed: {allowed}")


def _describe(entry: os.DirEntry[str]) -> dict[str, Any]:
    try:
        facts = entry.stat(follow_symlinks=False)
    except OSError:
        return {"name": entry.name, "kind": "other"}  # it has just gone, or nobody may ask
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    return {
        "name": entry.name,
        "kind": next((kind for is_kind, kind in kinds if is_kind(facts.st_mode)), "other"),
        "bytes": facts.st_size,
        "modified_at": datetime.fromtimestamp(facts.st_mtime, UTC).isoformat(timespec="milliseconds"),
    }


def _read(handle: int, offset: int, max_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < max_bytes and (chunk := os.pread(handle, max_bytes - len(content), offset + len(content))):
        content += chunk
    return bytes(content)


def _text(content: bytes) -> str | None:
    """The content as text, less a character that was cut at its end; None if it is no text that JSON can carry."""
    for cut in range(min(4, len(content)) or 1):
        with contextlib.suppress(UnicodeDecodeError):
            text = content[: len(content) - cut].decode()
            return None if "\x00" in text else text
    return None
