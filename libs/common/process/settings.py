"""Settings: the environment of one service, read once at start into a frozen, typed object.

Owns:     the variables that every service knows, and how any of them is read, checked and described.
Promises: wrong values are named all at once, with what is accepted; a secret's value appears in no text made here.
Used by:  `__main__` of each service (load) and `towline config` (describe). No service reads it elsewhere.
"""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from common.process.egress import Allowlist, Proxy
from common.process.secrets import Secrets

PREFIX = "TOWLINE_"
# What a wrong value is quoted with at most: enough to recognise it.
QUOTED_CHARACTERS_MAX = 60
# Kubernetes puts a variable of this shape into every pod for each Service whose name starts with `towline-`.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)(_\w+)?)?$")


class SettingsError(Exception):
    """The environment cannot be used; `problems` has one readable line per variable."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("wrong settings:\n" + "\n".join(f"  {problem}" for problem in problems))
        self.problems = problems


class Row(NamedTuple):
    """One variable, as `towline config` shows it."""

    name: str
    default: str  # `required` when there is none
    accepted: str
    reason: str


def _split(value: object) -> object:
    return tuple(part for raw in value.split(",") if (part := raw.strip())) if isinstance(value, str) else value


def _url_of(*schemes: str) -> AfterValidator:
    def check(secret: SecretStr) -> SecretStr:
        # The text of any error of the parser may quote the URL, and with it the password.
        try:
            parts = urlsplit(secret.get_secret_value())
            _ = parts.port
        except ValueError:
            raise ValueError("not a URL") from None
        if parts.scheme not in schemes or not (parts.netloc or parts.path):
            raise ValueError("not a URL of an accepted scheme")
        return secret

    return AfterValidator(check)


def _check_egress(entries: tuple[str, ...]) -> tuple[str, ...]:
    Allowlist.parse(entries)
    return entries


def _check_proxy(url: str) -> str:
    if url:
        Proxy.parse(url)
    return url


def words_of(secret: SecretStr) -> tuple[str, ...]:
    """The parts of a comma-separated secret, in their order."""
    return tuple(part for raw in secret.get_secret_value().split(",") if (part := raw.strip()))


def _check_secret_keys(keys: SecretStr) -> SecretStr:
    Secrets(words_of(keys))
    return keys


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Port = Annotated[int, Field(ge=0, le=65535)]


class CommonSettings(BaseSettings):
    """What every service reads. A service's own settings derive from this class."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        # Compose passes `${NAME:-}` for what is not set.
        env_ignore_empty=True,
        hide_input_in_errors=True,
        extra="ignore",
    )

    redis_url: Annotated[SecretStr, _url_of("redis", "rediss", "unix")] = Field(
        validation_alias="REDIS_URL",
        description="Redis 7.0 or newer, one primary, maxmemory-policy noeviction",
        json_schema_extra={"accepted": "redis://, rediss:// or unix:// URL"},
    )
    database_url: Annotated[SecretStr, _url_of("postgresql", "postgres")] = Field(
        validation_alias="DATABASE_URL",
        description="Postgres 15 or newer: what must survive",
        json_schema_extra={"accepted": "postgresql:// URL"},
    )
    admin_host: str = Field("0.0.0.0", description="where probes and Prometheus reach this process; never public")  # noqa: S104
    admin_port: Port = Field(9090, description="port of /livez, /readyz and /metrics; 0 takes any free one")
    heartbeat_s: float = Field(
        10,
        ge=0.2,
        le=60,
        description="how often a machine pings and its presence is refreshed. All presence times are multiples of it,"
        " so it is the same in every service; lower tells sooner that a lid was closed, and costs more round trips",
    )
    key_retention_s: int = Field(
        7 * 24 * 3600,
        ge=3600,
        le=90 * 24 * 3600,
        description="how long a key keeps its answer, and an ended run its record; longer costs rows, shorter lets late"
        " retries run again",
    )
    revision: str = Field(
        "unknown",
        description="which commit runs here, as towline_build_info tells it; baked into the images",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level written")
    log_format: Literal["json", "text"] = Field("json", description="json for collectors, text for people")
    egress_allow: Annotated[Words, AfterValidator(_check_egress)] = Field(
        (),
        description="where a URL given by a caller may lead; nothing else is ever called for a caller",
        json_schema_extra={"accepted": "comma-separated host names, addresses and CIDRs; empty: nowhere"},
    )
    egress_proxy: Annotated[str, AfterValidator(_check_proxy)] = Field(
        "",
        description="the forward proxy through which relays and workers call every URL given by a caller (CONNECT, for"
        " http:// too). It looks names up and must judge their addresses; here a host counts as TOWLINE_EGRESS_ALLOW"
        " writes it",
        json_schema_extra={"accepted": "http://host:port; empty: they are called directly"},
    )
    secret_keys: Annotated[SecretStr, AfterValidator(_check_secret_keys)] = Field(
        SecretStr(""),
        description="encrypt sources' headers and agents' keys at rest: the first one encrypts, all decrypt; the same"
        " in every replica of every service",
        json_schema_extra={"accepted": "comma-separated Fernet keys; empty: no headers and no keys are taken"},
    )


S = TypeVar("S", bound=CommonSettings)


def load(settings_class: type[S]) -> S:
    """Read the environment into `settings_class`.

    Raises:
        SettingsError: names every wrong or missing variable and what is accepted.
    """
    try:
        return settings_class()  # type: ignore[call-arg]  # the fields come from the environment
    except ValidationError as error:
        fields = settings_class.model_fields
        names = {**{name: name for name in fields}, **{_variable(name, field): name for name, field in fields.items()}}
        problems = [
            _problem(settings_class, names[str(item["loc"][0])], item["type"], item["msg"]) for item in error.errors()
        ]
    # Outside the handler: the original error holds the values, secrets too, and would be printed as the cause.
    raise SettingsError(problems)


def unknown_variables(settings_class: type[CommonSettings], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Name each `TOWLINE_*` variable that `settings_class` does not read, with the setting it may have been meant for.

    These are hints, not errors: one environment may be shared by several services.
    """
    known = [_variable(name, field) for name, field in settings_class.model_fields.items()]
    unknown = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in known or _SERVICE_LINK.search(name.removeprefix("TOWLINE")):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        unknown.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return unknown


def describe(settings_class: type[CommonSettings]) -> list[Row]:
    """List every variable that `settings_class` reads, in order of declaration."""
    return [
        Row(_variable(name, field), _default(field), _accepted(field), field.description or "")
        for name, field in settings_class.model_fields.items()
    ]


def _variable(name: str, field: FieldInfo) -> str:
    return field.validation_alias if isinstance(field.validation_alias, str) else PREFIX + name.upper()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, tuple):
        return ",".join(field.default)
    return str(field.default)


def _accepted(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict) and "accepted" in field.json_schema_extra:
        return str(field.json_schema_extra["accepted"])
    annotation: Any = field.annotation
    if choices := getattr(annotation, "__args__", None):
        return " or ".join(str(choice) for choice in choices)
    limits = {name: getattr(meta, name) for meta in field.metadata for name in ("ge", "le") if hasattr(meta, name)}
    kind = {int: "whole number", float: "number", str: "text"}[annotation]
    return f"{kind}, {limits['ge']} to {limits['le']}" if limits else kind


def _problem(settings_class: type[CommonSettings], name: str, kind: str, message: str) -> str:
    field = settings_class.model_fields[name]
    variable = _variable(name, field)
    accepted = _accepted(field)
    if kind == "missing":
        return f"{variable} is missing (accepted: {accepted})"
    quoted = ""
    if field.annotation is not SecretStr:
        value = os.environ.get(variable, "")
        quoted = f" {value[:QUOTED_CHARACTERS_MAX]!r}"
    reason = message.removeprefix("Value error, ")
    return f"{variable}{quoted}: {reason[:1].lower()}{reason[1:]} (accepted: {accepted})"
