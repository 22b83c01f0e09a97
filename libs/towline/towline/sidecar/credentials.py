"""The machine token: from a file that only its owner can read, or given once by the environment.

Owns:     the token file.
Promises: never logged, never on a command line; a token that the server renewed is used from the next dial on and put
          into the file. Where the file cannot be written (a full disk, a read-only mount), the token is kept in memory,
          each dial tries again to store it, and another token that somebody puts into the file goes before it.
Used by:  sidecar.app.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import structlog

_logger = structlog.get_logger("towline.sidecar")


class TokenUnusable(Exception):
    """There is no token to dial with; `str()` says why, without it."""


class Credentials:
    """Where the token comes from; exactly one of the two is given."""

    def __init__(self, token: str | None, token_file: Path | None) -> None:
        self._given = token
        self._file = token_file
        self._text = ""  # what the file said when it was last read, or what was put into it since
        self._is_stored = True  # False: the file could not take the newest token

    def read(self) -> str:
        """The token to dial with now; the file is read anew each time.

        Raises:
            TokenUnusable: no such file, open to others, or not one line of visible ASCII.
        """
        text = self._given if self._file is None else self._newest(self._file)
        token = (text or "").strip()
        if not token or not all("!" <= c <= "~" for c in token):
            raise TokenUnusable("the token is empty or has characters that no token has")
        return token

    def renew(self, token: str) -> None:
        """Use `token` from now on."""
        self._given = token
        if self._file is None:
            return
        try:
            self._store(self._file, token)
        except OSError as error:
            self._is_stored = False
            _logger.warning("token_not_stored", file=str(self._file), error=str(error))

    def _newest(self, path: Path) -> str | None:
        text = self._read_file(path)
        if self._is_stored or text != self._text:
            self._text, self._is_stored = text, True
            return text
        if self._given is not None:
            with contextlib.suppress(OSError):  # it was told of, and is tried again at the next dial
                self._store(path, self._given)
        return self._given

    def _store(self, path: Path, token: str) -> None:
        text = token + "\n"
        _replace(path, text)
        self._text, self._is_stored = text, True

    def _read_file(self, path: Path) -> str:
        try:
            with path.open() as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise TokenUnusable(f"{path} can be read by others; run: chmod 600 {path}")
                return file.read(4096)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenUnusable(f"cannot read {path}: {error}") from error


def _replace(path: Path, text: str) -> None:
    """Write the whole file or nothing: a crash in between must not leave the machine without any token."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # created 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
