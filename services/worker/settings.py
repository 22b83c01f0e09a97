"""Settings of the worker."""

from typing import Annotated

from pydantic import AfterValidator, Field

from common.process.settings import CommonSettings, Port, Words

# bridge: the sockets of machines, and the sweeper of jobs; turns: the turns of threads, and their net.
ROLES = ("bridge", "turns")


def _check_roles(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not set(value) <= set(ROLES):
        raise ValueError("not one or more roles")
    return value


class WorkerSettings(CommonSettings):
    """What the worker reads beside the common settings."""

    roles: Annotated[Words, AfterValidator(_check_roles)] = Field(
        ROLES,
        description="what this process does: hold the sockets of machines (bridge), run turns (turns), or both. Apart,"
        " each is scaled by its own load",
        json_schema_extra={"accepted": "comma-separated: bridge, turns"},
    )
    turn_slots: int = Field(
        32,
        ge=1,
        le=1000,
        description="turns that run here at once; most of each is waiting for a model. More take memory and, while they"
        " stream, this process's one core",
    )
    bridge_host: str = Field("0.0.0.0", description="address of the sidecars' WebSocket")  # noqa: S104
    bridge_port: Port = Field(8081, description="port of the sidecars' WebSocket; 0 takes any free one")
    sockets_max: int = Field(
        5000,
        ge=1,
        le=100_000,
        description="machines on this worker; one more is told to come later (503). Leave room for a lost sibling's",
    )
    handshake_timeout_s: float = Field(
        10, ge=1, le=60, description="how long the upgrade may take, and then the hello; slower ones are cut off"
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
