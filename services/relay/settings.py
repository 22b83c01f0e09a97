"""Settings of the relay."""

from pydantic import Field

from common.process.settings import CommonSettings


class RelaySettings(CommonSettings):
    """What the relay reads beside the common settings."""

    drain_s: float = Field(
        10,
        ge=0,
        le=300,
        description="after SIGTERM, how long the last batches may take before leases are left to lapse;"
        " longer helps only while Redis is away",
    )
