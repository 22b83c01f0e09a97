"""Settings of the relay."""

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from common.process.secrets import Secrets
from common.process.settings import CommonSettings


def _check_keys(value: SecretStr) -> SecretStr:
    Secrets(split_keys(value))
    return value


def split_keys(value: SecretStr) -> list[str]:
    """The keys of `secret_keys`, in order."""
    return [key for part in value.get_secret_value().split(",") if (key := part.strip())]


class RelaySettings(CommonSettings):
    """What the relay reads beside the common settings."""

    secret_keys: Annotated[SecretStr, AfterValidator(_check_keys)] = Field(
        SecretStr(""),
        description="encrypt what is sent upstream for a caller: the first one encrypts, all decrypt; the same in every"
        " replica of every service",
        json_schema_extra={"accepted": "comma-separated Fernet keys; empty: no such headers are taken"},
    )
    drain_s: float = Field(
        10,
        ge=0,
        le=300,
        description="after SIGTERM, how long the last batches may take before leases are left to lapse;"
        " longer helps only while Redis is away",
    )
