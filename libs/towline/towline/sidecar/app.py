"""The sidecar: dials out, serves jobs, dials again.

Owns:     everything below: state directory, journal, lane, sockets, and when which of them begins and ends.
Promises: one process per state directory; a job that has started goes on while sockets come and go; after a sleep of
          the machine nothing starts before the next welcome; `run` returns within seconds of `stop`.
Used by:  cli.sidecar, and products that embed it.

TLS trusts what Python's `ssl` trusts, `SSL_CERT_FILE` included.
"""

import asyncio
import contextlib
import logging
import platform
import random
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import structlog
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidProxy, InvalidStatus, WebSocketException

from towline import __version__
from towline.sidecar import state
from towline.sidecar.backoff import Backoff, Halt, NeedToken, Redial, Step
from towline.sidecar.connection import Connection
from towline.sidecar.credentials import Credentials, TokenUnusable
from towline.sidecar.journal import Journal, JournalUnavailable
from towline.sidecar.lane import Lane
from towline.sidecar.memory import Memory
from towline.sidecar.proxy import is_loopback, proxy_for
from towline.sidecar.tools import Registry
from towline.sidecar.wake import Clocks
from towline.wire import frames

# Of the WebSocket itself, beside our own heartbeat. Spelled out, so that no library default decides.
PING_EVERY_S = 20.0
PONG_TIMEOUT_S = 20.0
OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
# Frames read ahead before TCP is left to push back; the reader never waits, so this hardly ever fills.
FRAMES_READ_AHEAD = 64
# Try the other address family after so long: many home routers announce an IPv6 route that leads nowhere.
HAPPY_EYEBALLS_DELAY_S = 0.25

CLOCKS_EVERY_S = 1.0
TOKEN_POLL_S = 1.0
JOURNAL_REOPEN_EVERY_S = 5.0
JOURNAL_PRUNE_EVERY_S = 3600.0

_dice = random.SystemRandom()
_logger = structlog.get_logger("towline.sidecar")
# At debug level the library would log headers, and the token with them.
_library_logger = logging.getLogger("towline.sidecar.websockets")
_library_logger.setLevel(logging.WARNING)


class ConfigurationError(ValueError):
    """The sidecar cannot be built like this; `str()` says what to change."""


class _Dial(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """Never follow: the token is for the host that the user named."""
        return exc


class Sidecar:
    """One machine of one user.

    await Sidecar(url="wss://towline.example.com", token_file=path, state_dir=directory, tools=[my_tool]).run()
    """

    def __init__(
        self,
        *,
        url: str,
        state_dir: Path,
        tools: Iterable[Callable[..., Any]],
        token: str | None = None,
        token_file: Path | None = None,
        name: str = "",
        allow_insecure: bool = False,
        stop_budget_s: float = 2.0,
    ) -> None:
        """
        Args:
            url: `wss://host[:port]`; `ws://` for loopback hosts.
            state_dir: journal and identity; one sidecar each.
            tools: functions marked with `@tool`.
            token, token_file: the machine token, or a 0600 file that holds it; exactly one of them.
            name: shown to people; the host name if empty.
            allow_insecure: send the token over plain `ws://` to other hosts too.
            stop_budget_s: what a running job gets after `stop`.

        Raises:
            ConfigurationError: url or token.
            ToolError: a tool that cannot be registered.
        """
        if (token is None) == (token_file is None):
            raise ConfigurationError("give either a token or a token file")
        self._url = _bridge_url(url, allow_insecure=allow_insecure)
        self._credentials = Credentials(token, token_file)
        self._state_dir = state_dir
        self._registry = Registry(tools)
        self._name = name or platform.node()
        self._stop_budget_s = stop_budget_s
        self._backoff = Backoff()
        # Of the addresses to dial; see `_dial_once`.
        self._family = socket.AF_UNSPEC
        # The token of the latest dial: another one in the file is worth a dial.
        self._token = ""
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._started_at = time.monotonic()
        self._clocks = Clocks(time.time(), self._started_at)
        # The one dialled last, and with it, during a hand-over, its predecessor.
        self._newest: Connection | None = None
        self._connections: set[Connection] = set()

    def stop(self) -> None:
        """Make `run` say goodbye and return. A second call does nothing."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`. Refused tokens and replaced identities are logged and waited out, not raised.

        Raises:
            StateUnusable: another sidecar has the state directory, or there can be none.
        """
        with state.own(self._state_dir):
            self._machine = state.machine_id(self._state_dir)
            self._journal = Journal(self._state_dir / "journal.db")
            try:
                self._clocks.slept(time.time(), time.monotonic())
                async with asyncio.TaskGroup() as group:
                    lane = Lane(self._registry, Memory(self._journal), is_awake=self._is_awake)
                    dialler = group.create_task(self._run_dialler(lane, group), name="dialler")
                    keeper = group.create_task(self._run_keeper(), name="keeper")
                    await self._stopping.wait()
                    dialler.cancel()
                    await asyncio.wait((dialler,))
                    await self._leave(lane)
                    keeper.cancel()
            finally:
                await self._journal.aclose()

    async def _run_dialler(self, lane: Lane, group: asyncio.TaskGroup) -> None:
        while True:
            match await self._dial_once(lane, group):
                case Redial(after_s):
                    _logger.info("reconnecting", in_s=round(after_s, 1))
                    self._woken.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(after_s):
                            await self._woken.wait()
                case NeedToken():
                    await self._wait_for_token()
                case Halt(why):
                    _logger.error("stopped_dialling", reason=why)
                    await asyncio.Event().wait()

    async def _dial_once(self, lane: Lane, group: asyncio.TaskGroup) -> Step:
        """One session, from its dial until it ended or is to be replaced; says what next."""
        try:
            self._token = self._credentials.read()
            connection = await self._connect(self._token, lane)
        except TokenUnusable as error:
            self._token = ""
            _logger.warning("token_unusable", error=str(error))
            return NeedToken()
        except InvalidStatus as error:
            status, headers = error.response.status_code, error.response.headers
            _logger.warning("connection_refused", url=self._url, status=status)
            return self._backoff.after_refusal(
                status, headers.get("Retry-After"), _dice.random(), date=headers.get("Date")
            )
        except ConnectionClosed as error:
            return self._after_close(
                error.rcvd.code if error.rcvd else None, error.rcvd.reason if error.rcvd else "", 0.0
            )
        except TimeoutError:
            # Some routers let an IPv6 connection open and then carry nothing: try without, then with it again.
            self._family = socket.AF_INET if self._family == socket.AF_UNSPEC else socket.AF_UNSPEC
            _logger.warning("cannot_connect", url=self._url, reason="nobody answered in time")
            return self._backoff.after_failure(_dice.random())
        except InvalidProxy as error:
            # Not the whole message: the proxy's URL may hold a password.
            _logger.warning(
                "cannot_connect", url=self._url, reason=f"the environment's proxy cannot be used: {error.msg}"
            )
            return self._backoff.after_failure(_dice.random())
        except (OSError, WebSocketException, ImportError) as error:
            # ImportError: a SOCKS proxy is configured, and what speaks to it is not installed.
            self._family = socket.AF_UNSPEC
            _logger.warning("cannot_connect", url=self._url, reason=f"{type(error).__name__}: {error}")
            return self._backoff.after_failure(_dice.random())
        if self._newest:
            self._newest.retire()
        self._newest = connection
        welcome = connection.welcome
        _logger.info("connected", url=self._url, user=welcome.user, session=welcome.session, epoch=welcome.epoch)
        group.create_task(self._serve(connection), name=f"session:{welcome.session}")
        over: tuple[asyncio.Future[Any], ...] = (connection.ended, connection.draining)
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if not connection.ended.done():
            _logger.info("draining", session=welcome.session)
            return Redial(0.0)
        ending = connection.ended.result()
        return self._after_close(ending.code, ending.reason, ending.session_s)

    async def _connect(self, token: str, lane: Lane) -> Connection:
        """Dial, and be welcomed."""
        dialled = await _Dial(
            self._url,
            additional_headers={"Authorization": f"Bearer {token}"},
            user_agent_header=f"towline/{__version__}",
            subprotocols=[frames.SUBPROTOCOL],  # type: ignore[list-item]
            compression=None,
            max_size=frames.FRAME_BYTES_MAX,
            max_queue=FRAMES_READ_AHEAD,
            proxy=proxy_for(self._url),
            family=self._family,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=PING_EVERY_S,
            ping_timeout=PONG_TIMEOUT_S,
            happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S,
            logger=_library_logger,
        )
        connection = Connection(dialled, lane, started_at=self._started_at, renew_token=self._credentials.renew)
        self._connections.add(connection)
        try:
            await connection.greet(
                frames.Hello(
                    machine=self._machine,
                    journal=self._journal.id,
                    name=self._name,
                    version=__version__,
                    tools=self._registry.catalogue(),
                    running=lane.running(),
                )
            )
        except BaseException:
            self._connections.discard(connection)
            connection.drop()
            raise
        return connection

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception:
            # One socket must not take down the job that runs, nor the next socket.
            _logger.exception("session_failed")
        finally:
            self._connections.discard(connection)

    def _after_close(self, code: int | None, reason: str, session_s: float) -> Step:
        _logger.info("disconnected", code=code, reason=reason, session_s=round(session_s, 1))
        return self._backoff.after_close(code, reason, session_s, _dice.random())

    async def _wait_for_token(self) -> None:
        _logger.error("needs_token", help="refused or missing; a new one in the token file is noticed at once")
        while True:
            await asyncio.sleep(TOKEN_POLL_S)
            with contextlib.suppress(TokenUnusable):
                if self._credentials.read() != self._token:
                    self._backoff.after_new_token()
                    return

    def _is_awake(self) -> bool:
        if not self._clocks.slept(time.time(), time.monotonic()):
            return True
        _logger.warning("slept", help="this machine slept, or its clock was set; connecting again")
        self._drop_all()
        return False

    def _drop_all(self) -> None:
        for connection in self._connections:
            connection.drop()
        self._woken.set()

    async def _run_keeper(self) -> None:
        """Once a second: did we sleep? Now and then: is the journal well?"""
        reopen_at = prune_at = 0.0
        while True:
            await asyncio.sleep(CLOCKS_EVERY_S)
            self._is_awake()
            now = time.monotonic()
            if not self._journal.is_open and now >= reopen_at:
                reopen_at = now + JOURNAL_REOPEN_EVERY_S
                before = self._journal.id
                await self._journal.reopen()
                if self._journal.id != before:
                    # The server must not go on with a journal that is no longer there.
                    self._drop_all()
            if self._journal.is_open and self._newest and now >= prune_at:
                prune_at = now + JOURNAL_PRUNE_EVERY_S
                with contextlib.suppress(JournalUnavailable):
                    await self._journal.prune(round(self._newest.server_now() * 1000))

    async def _leave(self, lane: Lane) -> None:
        for connection in self._connections:
            connection.stop_starting()
        await lane.leave(self._stop_budget_s)
        for connection in self._connections:
            if connection is self._newest:
                connection.send(frames.Goodbye())
            connection.retire()
        if ending := [connection.ended for connection in self._connections]:
            await asyncio.wait(ending, timeout=2 * CLOSE_TIMEOUT_S)
        for connection in self._connections:
            connection.drop()
        _logger.info("stopped")


def _bridge_url(url: str, *, allow_insecure: bool) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ConfigurationError(f"the url must look like wss://host[:port], not {parts.scheme}://{parts.hostname}")
    if parts.scheme == "ws" and not allow_insecure and not is_loopback(parts.hostname):
        raise ConfigurationError(
            f"ws://{parts.hostname} would carry the token unencrypted; use wss://, or, where you trust the network,"
            " --allow-insecure"
        )
    path = parts.path.rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path if path.endswith(frames.PATH) else path + frames.PATH, "", ""))
