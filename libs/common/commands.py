"""What `towline-services` adds to the command line: `migrate`, `keys`, `queues`, `config`.

Owns:     how an operator reaches the stores directly: `DATABASE_URL` and `REDIS_URL` from the environment, never from
          arguments, which every user of the machine can see.
Promises: exit codes and output as in `towline.cli.terminal`; a value of a new key is shown once and kept nowhere.
"""

import asyncio
import importlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar, get_args
from urllib.parse import urlsplit

import typer

from common.errors import OtherMigrations, StoreUnavailable
from common.ids import UserId, is_uuid
from common.process.settings import CommonSettings, Row, SettingsError, describe, load, unknown_variables
from common.store import postgres as store_postgres
from common.store.postgres import Postgres, open_postgres
from common.store.queues import UserStream, read_depths, read_stream
from common.store.redis import open_redis
from common.store.tokens import KeyRow, Tokens
from towline.cli.terminal import Exit, JsonFlag, examples, fail, note, write_fields, write_json, write_table
from towline.wire import api
from towline.wire.api import SCOPES
from towline.wire.ids import is_id

# Each has its settings in `{service}.settings`. By name: services stand above this library, which imports none of them.
SERVICES = ("gateway", "worker", "relay")

T = TypeVar("T")

migrate = typer.Typer()
keys = typer.Typer(no_args_is_help=True, help="Manage API keys, in the database that DATABASE_URL names.")
queues = typer.Typer(no_args_is_help=True, help="Look at the queues, in the stores themselves.")
config = typer.Typer()

NameOption = Annotated[str, typer.Option(help="A name to know the key by, such as the program that uses it.")]


@migrate.command("migrate", epilog=examples("DATABASE_URL=postgresql://... towline migrate"))
def migrate_(*, as_json: JsonFlag = False) -> None:
    """Bring the schema of the database that DATABASE_URL names up to date.

    Safe to run from several places at once, and while the services of the previous release still run.
    """
    url = _store_url("DATABASE_URL", "postgresql", "postgres")
    applied = _run(lambda: store_postgres.migrate(url))
    if as_json:
        write_json({"applied": applied})
    else:
        note("\n".join(f"applied {name}" for name in applied) or "the schema is up to date")


@keys.command(epilog=examples("export TOWLINE_API_KEY=$(towline keys bootstrap)"))
def bootstrap(*, name: NameOption = "bootstrap", as_json: JsonFlag = False) -> None:
    """Make the first API key: every scope, every user. Refused (exit code 3) once there is any key.

    The value is written to standard output this once, and stored nowhere.
    """
    added = _with_tokens(lambda tokens: tokens.add_api_key(name, SCOPES, None, first_only=True))
    if added is None:
        fail(Exit.REFUSED, "there is an API key already; make another with `towline keys create`")
    _write_new_key(*added, as_json=as_json)


@keys.command(
    epilog=examples(
        "towline keys create --name backend --scope jobs",
        "towline keys create --name demo --scope jobs --user alice --user bob",
    )
)
def create(
    *,
    name: NameOption,
    scope: Annotated[list[str], typer.Option(help=f"What it may do, of {', '.join(SCOPES)}; give it once per scope.")],
    user: Annotated[
        list[str] | None, typer.Option(help="Whom it may act for; give it once per user. By default all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an API key. Its value is written to standard output this once, and stored nowhere."""
    if wrong := set(scope) - set(SCOPES):
        fail(Exit.USAGE, f"no scope {', '.join(sorted(wrong))}; there are {', '.join(SCOPES)}")
    for given in user or []:
        _check_user(given)
    added = _with_tokens(lambda tokens: tokens.add_api_key(name, scope, user or None))
    assert added is not None, "only a first key may be refused"
    _write_new_key(*added, as_json=as_json)


@keys.command("list", epilog=examples("towline keys list"))
def list_(
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Show at most so many, the newest.")] = 200,
    as_json: JsonFlag = False,
) -> None:
    """List the API keys, newest first, revoked ones included."""
    rows = _with_tokens(lambda tokens: tokens.list_api_keys(before=None, limit=limit))
    if as_json:
        for row in rows:
            write_json(_key(row))
        return
    write_table(
        ("key", "name", "scopes", "users", "created", "revoked"),
        [
            (key.key_id, key.name, ", ".join(key.scopes), _users(key), key.created_at, key.revoked_at or "")
            for key in map(_key, rows)
        ],
        empty="no API keys; make the first with `towline keys bootstrap`",
    )


@keys.command(epilog=examples("towline keys revoke 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11"))
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `list` shows it.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """End an API key; gateways heed it within 10 s."""
    if not is_uuid(key_id):
        fail(Exit.USAGE, f"{key_id!r} is no key id; `towline keys list` shows them")
    if not _with_tokens(lambda tokens: tokens.revoke_api_key(key_id)):
        fail(Exit.REFUSED, f"there is no API key {key_id}")
    if as_json:
        write_json({"key_id": key_id, "revoked": True})
    else:
        note(f"revoked {key_id}")


@queues.command(epilog=examples("towline queues show", "towline queues show alice --json"))
def show(
    user: Annotated[str | None, typer.Argument(help="One user's queue; by default all users'.")] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show how many jobs are open and how old they are; for one user also how they stand in Redis (REDIS_URL)."""
    owner = None if user is None else UserId(_check_user(user))
    depths = _with_postgres(lambda postgres: read_depths(postgres, owner))
    stream = None if owner is None else _read_stream(owner)
    if as_json:
        open_jobs = [depth._asdict() for depth in depths]
        write_json({"open": open_jobs, "stream": None if stream is None else _stream_document(stream)})
        return
    write_table(
        ("state", "jobs", "oldest"),
        [(depth.state, str(depth.jobs), f"{depth.oldest_s:.1f} s") for depth in depths],
        empty="no open jobs",
    )
    if stream is not None:
        write_fields(
            [
                ("entries", str(stream.entries)),
                ("bytes", str(stream.bytes)),
                ("held", f"{stream.pending} (the rest is untaken)"),
                ("sessions", "\n".join(f"{c.session} holds {c.pending}" for c in stream.consumers) or "none"),
            ]
        )


@config.command(
    "config", epilog=examples("towline config", "towline config --json", "towline config --check gateway && echo fine")
)
def config_(
    *,
    check: Annotated[
        str | None,
        typer.Option(metavar="SERVICE", help=f"Check this environment for a service: {' or '.join(SERVICES)}."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List every setting of the services: variable, default, what is accepted and why; or check an environment."""
    if check is None:
        _write_settings(as_json=as_json)
        return
    if check not in SERVICES:
        fail(Exit.USAGE, f"no service {check!r}; there are {', '.join(SERVICES)}")
    settings_class = _settings_class(check)
    problems: list[str] = []
    try:
        load(settings_class)
    except SettingsError as error:
        problems = error.problems
    hints = unknown_variables(settings_class)
    if as_json:
        write_json({"service": check, "problems": problems, "unread": hints})
    else:
        for problem in problems:
            note(f"towline: {problem}")
        for hint in hints:
            note(f"not read by the {check}: {hint}")
        if not problems:
            note(f"the {check} can be started with these settings")
    raise typer.Exit(Exit.USAGE if problems else Exit.OK)


def _write_settings(*, as_json: bool) -> None:
    services_of: dict[Row, list[str]] = {}
    for service in SERVICES:
        for row in describe(_settings_class(service)):
            services_of.setdefault(row, []).append(service)
    if as_json:
        for row, services in services_of.items():
            write_json({**row._asdict(), "services": services})
        return
    write_table(
        ("variable", "service", "default", "accepted", "what for"),
        [
            (
                row.name,
                ", ".join(services) if services != list(SERVICES) else "all",
                row.default,
                row.accepted,
                row.reason,
            )
            for row, services in services_of.items()
        ],
        empty="",
    )


def _settings_class(service: str) -> type[CommonSettings]:
    found: type[CommonSettings] = getattr(
        importlib.import_module(f"{service}.settings"), f"{service.capitalize()}Settings"
    )
    return found


def _key(row: KeyRow) -> api.ApiKey:
    scopes = [scope for scope in get_args(api.Scope) if scope in row.scopes]
    revoked = None if row.revoked_ms is None else api.timestamp(row.revoked_ms)
    return api.ApiKey(row.key_id, row.name, scopes, row.users, api.timestamp(row.created_ms), revoked)


def _users(key: api.ApiKey) -> str:
    return "all" if key.users is None else ", ".join(key.users)


def _write_new_key(row: KeyRow, value: str, *, as_json: bool) -> None:
    key = _key(row)
    if as_json:
        write_json(
            api.MintedApiKey(key.key_id, key.name, key.scopes, key.users, key.created_at, key.revoked_at, api_key=value)
        )
        return
    note(f"API key {key.key_id} ({key.name}): scopes {', '.join(key.scopes)}; users {_users(key)}:")
    print(value)


def _stream_document(stream: UserStream) -> dict[str, object]:
    return {**stream._asdict(), "consumers": [consumer._asdict() for consumer in stream.consumers]}


def _check_user(user: str) -> str:
    if not is_id(user):
        fail(Exit.USAGE, f"{user!r} is no user id")
    return user


def _store_url(variable: str, *schemes: str) -> str:
    """Read one store's URL; the other store's need not be set for a command that does not use it."""
    url = os.environ.get(variable, "")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in schemes and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable:
        accepted = " or ".join(f"{scheme}://" for scheme in schemes)
        fail(Exit.USAGE, f"{variable} is {'not an' if url else 'not set; it has the'} {accepted} URL of the store")
    return url


class _PoolLog(logging.Handler):
    """Keeps why the pool could not connect. It does so in the background: only its log knows, once per attempt."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        first_line = record.getMessage().partition("\n")[0]
        if first_line.startswith("error connecting"):
            self.reason = first_line


def _with_postgres(operation: Callable[[Postgres], Awaitable[T]]) -> T:
    url = _store_url("DATABASE_URL", "postgresql", "postgres")

    pool_log = _PoolLog()
    pool_logger = logging.getLogger("psycopg.pool")
    pool_logger.addHandler(pool_log)
    pool_logger.propagate = False

    async def run() -> T:
        async with open_postgres(url) as postgres:
            try:
                await postgres.check()
            except ValueError as error:  # the schema is not the one that these statements are for
                fail(Exit.USAGE, str(error))
            return await operation(postgres)

    return _run(run, why=lambda: pool_log.reason)


def _with_tokens(operation: Callable[[Tokens], Awaitable[T]]) -> T:
    return _with_postgres(lambda postgres: operation(Tokens(postgres)))


def _read_stream(user: UserId) -> UserStream:
    url = _store_url("REDIS_URL", "redis", "rediss", "unix")

    async def run() -> UserStream:
        async with open_redis(url) as redis:
            return await read_stream(redis, user)

    return _run(run)


def _run(operation: Callable[[], Coroutine[Any, Any, T]], *, why: Callable[[], str] = str) -> T:
    try:
        return asyncio.run(operation())
    except OtherMigrations as error:
        fail(Exit.REFUSED, str(error))
    except StoreUnavailable as error:
        fail(Exit.UNAVAILABLE, ": ".join(filter(None, (str(error), why()))))
