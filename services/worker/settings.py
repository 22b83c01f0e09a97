"""Settings of the worker."""

from pydantic import Field

from common.process.settings import CommonSettings, Port


class WorkerSettings(CommonSettings):
    """What the worker reads beside the common settings."""

    bridge_host: str = Field("0.0.0.0", description="address of the sidecars' WebSocket")  # noqa: S104
    bridge_port: Port = Field(8081, description="port of the sidecars' WebSocket; 0 takes any free one")
    sockets_max: int = Field(
        5000,
        ge=1,
        le=100_000,
        description="machines on this worker; one more is told to come later (503). Leave room for a lost sibling's",
    )
    handshake_timeout_s: float = Field(
        10, ge=1, le=60, description="from the TCP connection to a valid hello; slower ones are cut off"
    )
    outcomes_pending_bytes_max: int = Field(
        64 * 1024 * 1024,
        ge=2 * 1024 * 1024,
        le=4 * 1024 * 1024 * 1024,
        description="outcomes (bytes) held while Postgres is away; what does not fit stays in the machine's journal",
    )
    drain_s: float = Field(
        25,
        ge=0,
        le=300,
        description="after SIGTERM, how long sockets are told to leave, in waves, and results are still taken;"
        " long enough for every sidecar to be welcomed elsewhere",
    )
