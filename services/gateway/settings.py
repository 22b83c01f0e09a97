"""Settings of the gateway."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from common.process.settings import CommonSettings, Port, Words

# Longest `Prefer: wait` (seconds): what proxies on the way still hold open when told to.
WAIT_MAX_S = 300

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin: scheme, host and port only, without a path")
    return origins


class GatewaySettings(CommonSettings):
    """What the gateway reads beside the common settings."""

    http_host: str = Field("0.0.0.0", description="address of the public API")  # noqa: S104
    http_port: Port = Field(8080, description="port of the public API; 0 takes any free one")
    cors_origins: Annotated[Words, AfterValidator(_check_origins)] = Field(
        (),
        description="browser origins that may call the API",
        json_schema_extra={"accepted": "comma-separated origins such as https://app.example.com, or *; empty: none"},
    )
    idempotency: Literal["lenient", "strict"] = Field(
        "lenient",
        description="a key that comes again with other contents is answered with the first one's outcome and marked"
        " (lenient), or refused (strict)",
    )
    body_bytes_max: int = Field(
        256 * 1024, ge=1024, le=4 * 1024 * 1024, description="largest request body (bytes); over it is 413"
    )
    waiters_max: int = Field(
        5000,
        ge=1,
        le=100_000,
        description="how many callers may wait for outcomes at once; each holds a connection and some 40 KB",
    )
    drain_s: float = Field(
        10,
        ge=0,
        le=300,
        description="after the door is closed, how long open requests and streams have to end; waiting callers are"
        " answered 202 at once, so this is for the slow",
    )
