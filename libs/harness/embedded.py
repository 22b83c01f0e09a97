"""PostgreSQL and Valkey from wheels, run by the harness: nothing needs to be installed beforehand.

Owns:     each server's data below its state directory; it is there again at the next start.
Promises: loopback TCP with a password of its own; accepted writes are kept as a production server keeps them (fsync on
          in PostgreSQL, append-only file in Valkey), so that figures are honest; a restart keeps the URL.
"""

import abc
import os
import secrets
import signal
from pathlib import Path
from typing import ClassVar

import psycopg
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from harness import carriers
from harness.ports import free_port
from harness.runner import KILL_WITHIN_S, Process, ProcessFailed

# From nothing initdb takes 0.3 s, recovery after a SIGKILL 0.1 s; a busy machine may take tens of times that.
START_WITHIN_S = 60.0
STOP_WITHIN_S = 20.0
START_ATTEMPTS = 3


class EmbeddedServer(abc.ABC):
    """One server under the harness; `start` it from the main thread.

    Attributes:
        name: names the data, log and pid file in the state directory.
    """

    name: ClassVar[str]
    _stop_signal: ClassVar[signal.Signals]

    def __init__(self, directory: Path) -> None:
        """Describe a server whose state lives in `directory`, an existing one."""
        self._directory = directory
        self._account = carriers.server_account()
        self._home = carriers.server_home(directory, self._account)
        self._data = self._home / self.name
        self._port = 0
        self._password = ""
        self._process: Process | None = None

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """Where clients connect; the same over restarts. Holds a password."""

    async def start(self) -> str:
        """Start it, on the data of the last time if there is any; return its URL once it answers.

        Raises:
            ProcessFailed: it did not come up; the message has the end of its log.
            ServerMissing: its wheel is not installed, or no account may run it.
        """
        if self._process is not None:
            await self._process.wait(within_s=KILL_WITHIN_S)
            await self._start_once()
            return self.url
        await self._prepare()
        for attempts_left in reversed(range(START_ATTEMPTS)):
            self._port = free_port()
            try:
                await self._start_once()
            except ProcessFailed:
                if not (attempts_left and "already in use" in self._running().read_log()):
                    raise
            else:
                break
        return self.url

    async def stop(self) -> None:
        """Let it shut down in order, with clients connected or not; kill it if that takes too long."""
        if self._process is not None:
            await self._process.stop(within_s=STOP_WITHIN_S)

    async def restart(self) -> str:
        """Stop it if it runs, then start it on the same data and port; return the URL."""
        await self.stop()
        return await self.start()

    def kill(self) -> None:
        """SIGKILL it with all its children, as when its machine dies."""
        self._running().kill()

    def freeze(self) -> None:
        """SIGSTOP it with all its children: connections stand, nothing is answered."""
        self._running().freeze()

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._running().thaw()

    @abc.abstractmethod
    async def _prepare(self) -> None:
        """Make what the server needs before its first start."""

    @abc.abstractmethod
    def _argv(self) -> list[str]:
        """Program and arguments, with the current port."""

    @abc.abstractmethod
    async def _is_answering(self) -> bool:
        """Whether a client is served."""

    async def _start_once(self) -> None:
        self._process = self._describe(self.name, self._argv())
        await self._process.start()
        try:
            await self._process.wait_ready(self._is_answering, within_s=START_WITHIN_S)
        except ProcessFailed:
            await self._process.stop(within_s=STOP_WITHIN_S)
            raise

    def _describe(self, name: str, argv: list[str]) -> Process:
        # The harness' own settings and secrets are none of the server's business.
        env = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
        return Process(
            name,
            argv,
            directory=self._directory,
            env=env,
            account=self._account,
            stop_signal=self._stop_signal,
            orphan_signal=self._stop_signal,
        )

    def _running(self) -> Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    def _load_password(self) -> Path:
        """Make the private directory and the password at the first start, and read it later on."""
        carriers.make_private(self._data, self._account)
        path = self._data / "password"
        if not path.exists():
            carriers.write_private(path, secrets.token_hex(16), self._account)
        self._password = path.read_text()
        return path


class EmbeddedPostgres(EmbeddedServer):
    """PostgreSQL with superuser `postgres`; the URL names the database `postgres`."""

    name = "postgres"
    # Fast shutdown; with SIGTERM it would wait until the last client has gone.
    _stop_signal = signal.SIGINT

    @property
    def url(self) -> str:
        """URL for psycopg."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self._port}/postgres"

    async def _prepare(self) -> None:
        password = self._load_password()
        self._programs = carriers.postgres_programs(self._home, self._account)
        self._cluster = self._data / "cluster"
        if self._cluster.exists():
            return
        # Made under another name and renamed: what a killed initdb leaves is no cluster.
        draft = self._data / "initdb"
        # Built in from PostgreSQL 17 on, and then not dependent on the machine's.
        locale = "--locale" if carriers.are_installed() else "--locale-provider builtin --builtin-locale"
        script = 'rm -rf "$2" && "$1" -D "$2" -U postgres --pwfile "$3" --auth scram-sha-256 --no-sync -E UTF8 '
        script += locale + ' C.UTF-8 && mv "$2" "$4"'
        paths = (self._programs / "initdb", draft, password, self._cluster)
        initdb = self._describe("initdb", ["/bin/sh", "-c", script, "sh", *map(str, paths)])
        await initdb.start()
        if code := await initdb.wait(within_s=START_WITHIN_S):
            raise ProcessFailed(f"initdb ended with {code}:\n{initdb.read_log()}")

    def _argv(self) -> list[str]:
        settings = {
            "port": self._port,
            "listen_addresses": "127.0.0.1",
            # No Unix socket: its path would have to be shorter than some state directories are.
            "unix_socket_directories": "",
            # Pools of a dozen processes and the tests' own connections.
            "max_connections": 200,
            "shared_buffers": "64MB",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self._cluster), *options]

    async def _is_answering(self) -> bool:
        try:
            async with await psycopg.AsyncConnection.connect(self.url, connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False


class EmbeddedValkey(EmbeddedServer):
    """Valkey, spoken to as Redis; 64 databases, never evicts."""

    name = "valkey"
    _stop_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        """URL for redis-py, database 0."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    async def _prepare(self) -> None:
        self._load_password()
        self._program = carriers.valkey_program(self._home, self._account)
        carriers.make_private(self._data / "aof", self._account)

    def _argv(self) -> list[str]:
        settings = {
            "port": self._port,
            "bind": "127.0.0.1",
            "requirepass": self._password,
            "dir": f'"{self._data / "aof"}"',
            "appendonly": "yes",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "databases": 64,
        }
        # In a file: other users of the machine can read a command line.
        configuration = self._data / "valkey.conf"
        carriers.write_private(
            configuration, "".join(f"{name} {value}\n" for name, value in settings.items()), self._account
        )
        return [str(self._program), str(configuration)]

    async def _is_answering(self) -> bool:
        client = redis.asyncio.Redis.from_url(self.url, socket_timeout=2, retry=Retry(NoBackoff(), 0))
        try:
            await client.ping()
        except (RedisError, OSError):
            # Also while it loads its data.
            return False
        finally:
            await client.aclose()
        return True
