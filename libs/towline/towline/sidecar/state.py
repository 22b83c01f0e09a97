"""The state directory: what of a sidecar outlives its process, and that only one process has it.

Owns:     the directory (0700), its lock, and the identity of this install in the file `machine`.
Promises: at most one sidecar per directory; a lock left by a killed one blocks nobody.
Used by:  sidecar.app.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import structlog

from towline.sidecar.journal import os_machine_id

_logger = structlog.get_logger("towline.sidecar")


class StateUnusable(Exception):
    """The sidecar cannot start on this directory; `str()` says why and what to do."""


@contextlib.contextmanager
def own(directory: Path) -> Iterator[None]:
    """Make the directory if needed and hold it for the duration of the block.

    The lock is on the directory itself: it needs no file, works without space, and ends with the process however that
    ends.

    Raises:
        StateUnusable: another sidecar runs on it, or it can be neither opened nor made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StateUnusable(f"cannot use the state directory {directory}: {error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateUnusable(
                f"another sidecar already runs on {directory}; stop it, or give this one its own --state-dir"
            ) from error
        yield
    finally:
        os.close(handle)


def machine_id(directory: Path) -> str:
    """The stable id of this install; a copy of the directory on another machine is another install."""
    file = directory / "machine"
    try:
        install = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        install = ""
    if not install:
        install = secrets.token_hex(16)
        try:
            file.write_text(install + "\n")
        except OSError as error:
            # It can still serve; after a restart the server sees another machine.
            _logger.warning("machine_id_not_stored", file=str(file), error=str(error))
    return hashlib.sha256(f"{install}\n{os_machine_id()}".encode()).hexdigest()[:32]
