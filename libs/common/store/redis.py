"""The Redis client: made inside the running loop, one pool for commands, one connection per blocking reader.

Promises: every command has a deadline of ours and is sent once (redis-py's own retries would append twice); every
failure to get an answer is `StoreUnavailable`, after which the command may or may not have run.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, cast

import redis.asyncio as redis
from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.errors import StoreUnavailable
from common.store.read_bound import ReadBound

# A healthy Redis answers within milliseconds; five seconds are an outage, and the door must still answer its caller.
COMMAND_TIMEOUT_S = 5.0
# An answer that took longer may come from a Redis that stood still, while presence lapsed in it: a break, though the
# connection held. Less than presence lives on after a missed refresh; see tests/recovery/test_redis_standstill.py.
SLOW_ANSWER_S = 1.0
CONNECTIONS_MAX = 16
# Each blocking read returns this often, so that a dead link shows within one block and its timeout.
BLOCK_MS = 5000

# AttributeError: what asyncio of CPython 3.12 and 3.13 raises from a write to a connection that was reset while idle.
_AWAY = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    OSError,
    AttributeError,
)
_AWAY_PREFIXES = ("OOM", "READONLY", "LOADING", "MISCONF", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED")


class Script(NamedTuple):
    """A Lua script by name, and its source; loaded into Redis when Redis does not know it."""

    name: str
    source: str
    sha: str


class Call(NamedTuple):
    """One run of a script."""

    script: Script
    keys: Sequence[str]
    args: Sequence[str | int | float | bytes]


@cache
def script(name: str) -> Script:
    """Load `lua/{name}.lua`, once."""
    import hashlib  # noqa: PLC0415  (used here only)

    source = resources.files("common.store").joinpath("lua", f"{name}.lua").read_text()
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class Redis:
    """What the stores use: scripts, pipelines of scripts, and blocking reads."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS_MAX,
            timeout=COMMAND_TIMEOUT_S,
            socket_timeout=None,  # deadlines are ours, see _execute
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )
        self._readers: list[redis.Redis] = []
        # When the oldest unbroken stretch of answers began (monotonic seconds); None until the first answer.
        self._answering_since: float | None = None

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int | float | bytes]) -> Any:
        """Run one script.

        Raises:
            StoreUnavailable: no answer, or Redis cannot write now.
        """
        (answer,) = await self.run_many([Call(script, keys, args)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip. A script's own failure stands in its place as an exception.

        Raises:
            StoreUnavailable: no answer at all; some or all may have run.
        """
        answers = await self._execute([("EVALSHA", c.script.sha, len(c.keys), *c.keys, *c.args) for c in calls])
        missing = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if missing:  # Redis was restarted or its scripts flushed: those calls did not run
            again = await self._execute(
                [("EVAL", calls[i].script.source, len(calls[i].keys), *calls[i].keys, *calls[i].args) for i in missing]
            )
            for i, answer in zip(missing, again, strict=True):
                answers[i] = answer
        return [_translated(answer) for answer in answers]

    async def send_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send plain commands in one round trip; failures stand in their places. Raises: StoreUnavailable."""
        return [_translated(answer) for answer in await self._execute(commands)]

    async def _execute(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        # Packed by hiredis and sent as they are: redis-py's pipeline packs in Python, at ten times the cost.
        packed = [pack_command(command) for command in commands]
        asked_at = time.monotonic()
        try:
            # Not redis-py's socket_timeout: it sends through asyncio.wait_for, which costs a task for each command and,
            # on Python 3.11, loses a cancellation that arrives while the bytes go out: a loop would never end.
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                try:
                    await connection.send_packed_command(packed)
                    answers = [await _answer(connection) for _ in commands]
                except BaseException:
                    # Answers are still on their way: whoever took this connection next would be given them.
                    await connection.disconnect(nowait=True)
                    raise
                finally:
                    await self._pool.release(connection)
        except _AWAY as error:
            self._answering_since = None
            # What broke one connection broke the idle ones too, and each would fail one more call, minutes later.
            with contextlib.suppress(*_AWAY):
                await self._pool.disconnect(inuse_connections=False)
            raise StoreUnavailable(f"Redis does not answer ({type(error).__name__})") from error
        except ResponseError as error:  # to the handshake: answers to commands are returned
            raise StoreUnavailable(f"Redis refuses the connection ({error})") from error
        now = time.monotonic()
        if self._answering_since is None or now - asked_at > SLOW_ANSWER_S:
            self._answering_since = now
        return answers

    def _note_break(self) -> None:
        self._answering_since = None

    def answering_for_s(self) -> float:
        """For how long this process has had answers from Redis without a break (a slow answer counts as one)."""
        return 0.0 if self._answering_since is None else time.monotonic() - self._answering_since

    def reader(self) -> "Reader":
        """A blocking reader with a connection of its own."""
        client = redis.Redis.from_url(
            self._url,
            single_connection_client=False,
            max_connections=2,
            socket_timeout=None,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
        self._readers.append(client)
        return Reader(client, self._note_break)

    async def check(self) -> None:
        """Ask whether this Redis will do: reachable, and never evicting keys. Raises: StoreUnavailable, ValueError."""
        await self.send_many([("PING",)])
        (answer,) = await self.send_many([("CONFIG", "GET", "maxmemory-policy")])
        if isinstance(answer, Exception):
            return  # managed services refuse CONFIG
        policy: bytes = answer[b"maxmemory-policy"] if isinstance(answer, dict) else answer[1]
        if policy != b"noeviction":
            raise ValueError(f"REDIS_URL: maxmemory-policy is {policy.decode()}, it must be noeviction")

    async def close(self) -> None:
        """Close every connection."""
        for client in self._readers:
            await client.aclose()
        await self._pool.disconnect()


class Reader:
    """One blocking XREAD at a time over a connection of its own."""

    def __init__(self, client: redis.Redis, note_break: Callable[[], None]) -> None:
        self._client = client
        # A process that asks for nothing else learns here that Redis stood still.
        self._note_break = note_break
        self._bound = ReadBound()

    async def read(self, streams: dict[str, str]) -> list[tuple[str, list[tuple[str, dict[bytes, bytes]]]]]:
        """Wait up to 5 s for entries after the given ids (never `$`); returns streams with their new entries.

        Not all of them where many wait: `read_bound` says how many. Those that are left come with the next read.

        Raises:
            StoreUnavailable: the connection broke; read again from the same ids.
        """
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(BLOCK_MS / 1000 + COMMAND_TIMEOUT_S):
                answer: Any = await self._client.xread(
                    cast("Any", streams), count=self._bound.count(len(streams)), block=BLOCK_MS
                )
        except _AWAY as error:
            self._note_break()
            raise StoreUnavailable(f"Redis does not answer ({type(error).__name__})") from error
        except ResponseError as error:
            self._note_break()
            raise StoreUnavailable(f"Redis refuses to be read ({error})") from error
        if time.monotonic() - asked_at > BLOCK_MS / 1000 + SLOW_ANSWER_S:
            self._note_break()
        pairs = answer.items() if isinstance(answer, dict) else (answer or [])
        found = [(key.decode(), _entries(value)) for key, value in pairs]
        self._bound.learn([entries for _, entries in found])
        return found


async def _answer(connection: AbstractConnection) -> Any:
    """One answer; an error that Redis gives is an answer too."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _entries(value: Any) -> list[tuple[str, dict[bytes, bytes]]]:
    # RESP3 answers of some client versions wrap the list once more.
    if value and isinstance(value[0], list) and value[0] and isinstance(value[0][0], (list, tuple)):
        value = value[0]
    return [(entry_id.decode(), fields) for entry_id, fields in value]


def _translated(answer: Any) -> Any:
    if isinstance(answer, _AWAY) or (isinstance(answer, ResponseError) and _is_away(str(answer))):
        error = StoreUnavailable(f"Redis refuses ({str(answer)[:60]})")
        error.__cause__ = answer
        return error
    return answer


def _is_away(message: str) -> bool:
    return message.startswith(_AWAY_PREFIXES) or any(f"{prefix} " in message[:80] for prefix in ("OOM", "READONLY"))


@contextlib.asynccontextmanager
async def open_redis(url: str) -> AsyncIterator[Redis]:
    """Open the client inside the running loop and close it at the end."""
    client = Redis(url)
    try:
        yield client
    finally:
        with contextlib.suppress(RedisError, OSError):
            await client.close()


__all__ = ["BLOCK_MS", "Call", "Reader", "Redis", "Script", "open_redis", "script"]
