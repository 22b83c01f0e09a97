"""Settings of the gateway."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo

from common.process.http_server import Tls
from common.process.settings import CommonSettings, Port, Words, words_of
from gateway.stream_tokens import KEY_CHARACTERS_MIN

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin: scheme, host and port only, without a path")
    return origins


def _check_token_keys(keys: SecretStr) -> SecretStr:
    if any(len(key) < KEY_CHARACTERS_MIN for key in words_of(keys)):
        raise ValueError("a key is too short")
    return keys


def _check_key_file(path: str, info: ValidationInfo) -> str:
    if bool(path) != bool(info.data.get("tls_cert_file")):
        raise ValueError("certificate and key are set together")
    return path


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
        256 * 1024,
        ge=1024,
        le=4 * 1024 * 1024,
        description="largest request body (bytes); over it is 413; arguments have 256 KiB at most whatever it is",
    )
    waiters_max: int = Field(
        5000,
        ge=1,
        le=100_000,
        description="how many callers may wait for outcomes at once; each holds a connection and some 40 KB",
    )
    token_keys: Annotated[SecretStr, AfterValidator(_check_token_keys)] = Field(
        SecretStr(""),
        description="sign stream tokens: the first one signs, all verify; the same in every replica",
        json_schema_extra={
            "accepted": f"comma-separated, each {KEY_CHARACTERS_MIN} characters or more; empty: no stream tokens"
        },
    )
    sse_keepalive_s: float = Field(
        15,
        ge=0.1,
        le=60,
        description="how often a quiet event stream shows a sign of life; longer, and proxies cut it (30 s is common)",
    )
    sse_buffer_bytes: int = Field(
        1024 * 1024,
        ge=64 * 1024,
        le=64 * 1024 * 1024,
        description="how far the reader of an event stream may fall behind before it is closed; it comes back and"
        " resumes. Events are held once, however many wait for them",
    )
    unready_s: float = Field(
        10,
        ge=0,
        le=60,
        description="after SIGTERM, how long the door stays open while load balancers learn that this replica leaves;"
        " shorter, and they still send to a closed port",
    )
    sse_drain_s: float = Field(
        10,
        ge=0,
        le=300,
        description="after the door is closed, over how long event streams are ended; shorter, and all their readers"
        " come to the other replicas at once",
    )
    tls_cert_file: str = Field(
        "",
        description="certificate chain (PEM) of the public port, with which browsers get HTTP/2 and its many streams"
        " over one connection; also where a proxy before it is to speak TLS",
        json_schema_extra={"accepted": "path; empty: no TLS here"},
    )
    tls_key_file: Annotated[str, AfterValidator(_check_key_file)] = Field(
        "",
        validate_default=True,
        description="its private key (PEM)",
        json_schema_extra={"accepted": "path; set if and only if TOWLINE_TLS_CERT_FILE is"},
    )
    drain_s: float = Field(
        10,
        ge=0,
        le=300,
        description="after the door is closed, how long open requests and streams have to end; waiting callers are"
        " answered 202 at once, so this is for the slow",
    )

    @property
    def tls(self) -> Tls | None:
        """Certificate and key of the public port; None: it speaks plain HTTP."""
        return Tls(self.tls_cert_file, self.tls_key_file) if self.tls_cert_file else None
