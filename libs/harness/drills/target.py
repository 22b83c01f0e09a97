"""The target of a drill: an installation whose parts can be cut, whatever runs them.

Owns:     the words in which drills speak of an installation. There are no pids, paths or containers among them, so a
          scenario runs unchanged on processes of this machine, Compose or Kubernetes.
Used by:  the scenarios. `local` is the adapter for processes of this machine, `compose` for containers under Docker
          Compose, `kube` for pods in a local cluster.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from harness.agent import Script
from harness.endpoint import TurnRequest
from harness.model import ModelRequest

Role = Literal["gateway", "worker", "relay"]
Kind = Literal["gateway", "worker", "relay", "redis", "postgres"]
ROLES: Final[Sequence[Role]] = ("gateway", "worker", "relay")


class DrillFailed(Exception):
    """The installation did not do what had to happen for the drill to go on; `str()` says what."""


class Executions(NamedTuple):
    """How often a job's tool began and came to its end, by the tool's own notes."""

    began: int = 0
    ended: int = 0


class Replica(Protocol):
    """One gateway, worker or relay."""

    @property
    def name(self) -> str:
        """For people."""

    async def is_running(self) -> bool:
        """Whether its process is there; a frozen one is."""

    async def start(self) -> None:
        """Start it again; returns when it is ready."""

    async def kill(self) -> None:
        """SIGKILL it, frozen or not; returns when it is gone. Raises: DrillFailed: something else ended it first."""

    async def term(self) -> int:
        """SIGTERM it and wait until it has left; returns its exit code."""

    async def freeze(self) -> None:
        """SIGSTOP it: its sockets stand and nobody answers there. New sockets are no longer led to it."""

    async def thaw(self) -> None:
        """Let it go on, as if nothing had been."""

    async def logs(self) -> str:
        """What it has logged since its last start, JSON lines."""

    async def metrics(self) -> Mapping[str, float]:
        """What it measures now, by sample, such as `x_total{route="/y"}`. Raises: DrillFailed: it does not answer."""


class Gateway(Replica, Protocol):
    """One gateway."""

    @property
    def url(self) -> str:
        """Base URL of its API."""


class Store(Protocol):
    """PostgreSQL, or Redis."""

    async def stop(self) -> None:
        """Shut it down in order: connections break, new ones are refused."""

    async def start(self) -> None:
        """Start it on the data it had; returns when it answers."""

    async def freeze(self) -> None:
        """SIGSTOP it: connections stand, new ones are taken by the operating system, nothing is answered."""

    async def thaw(self) -> None:
        """Let it go on, as if nothing had been."""


class RedisStore(Store, Protocol):
    """Redis."""

    async def flush(self) -> None:
        """Lose everything in it."""


class Machine(Protocol):
    """One user's sidecar, with the network between it and the workers."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def user(self) -> str:
        """Whose it is."""

    async def is_running(self) -> bool:
        """Whether its process is there; a frozen one is."""

    async def start(self, *, connected: bool = True) -> None:
        """Start it again on its journal; waits, if `connected`, until a worker has welcomed it."""

    async def stop(self) -> None:
        """Let it say goodbye and leave."""

    async def kill(self) -> None:
        """SIGKILL it; returns when it is gone."""

    async def killed(self, *, within_s: float) -> None:
        """Wait until SIGKILL has ended it, whoever sent that. Raises: DrillFailed."""

    async def freeze(self) -> None:
        """Close the lid: SIGSTOP."""

    async def thaw(self) -> None:
        """Open the lid."""

    async def cut(self) -> None:
        """Reset its socket; it can connect again at once."""

    async def unplug(self) -> None:
        """Reset its socket, and let it reach nobody until `plug`."""

    async def plug(self) -> None:
        """Bring its network back."""

    async def logs(self) -> str:
        """What it has logged over all its starts, JSON lines."""


class Agent(Protocol):
    """Upstream agents, as `harness.agent` plays them: named streams, each event of which is known beforehand."""

    def url(self, stream: str) -> str:
        """Where relays find a stream."""

    async def put(self, stream: str, script: Script) -> None:
        """Make a stream, or begin one of that name anew."""

    async def act(self, stream: str, action: str, **arguments: object) -> None:
        """Do one of the agent's actions, such as `emit` with `count=3`."""

    async def state(self, stream: str) -> dict[str, Any]:
        """What the agent knows of a stream: `emitted`, `is_ended`, `open_connections`, `requests`."""


class Model(Protocol):
    """A model that agents of kind `openai` ask, as `harness.model` plays it: what it does is in its name."""

    @property
    def url(self) -> str:
        """Base URL of its API, where workers find it."""

    async def about(self, text: str) -> Sequence[ModelRequest]:
        """The requests whose question contains the text, in order."""


class Endpoint(Protocol):
    """A product's endpoint that agents of kind `http` are asked at, as `harness.endpoint` plays it."""

    def url(self, behaviour: str) -> str:
        """Where workers find one that behaves so."""

    async def of(self, turn: str) -> Sequence[TurnRequest]:
        """The requests for a turn, in order."""


class Cluster(Protocol):
    """What only a cluster of several nodes does with an installation."""

    async def delete(self, kind: Kind) -> str:
        """Delete a pod; returns its name once another one is ready in its place.

        A service's is deleted by force. A store's is not: its successor could meet it at the data that they share.
        """

    async def roll(self, role: Role) -> None:
        """Roll a Deployment out anew; returns when all its pods are new ones and the old ones have left."""

    async def ready(self, role: Role) -> int:
        """How many pods of a role are ready, whether they are among the target's replicas or not."""

    async def stop_node(self) -> Sequence[str]:
        """Cut the power of a node that holds no store and no stand-in; returns the names of the replicas on it.

        Raises: DrillFailed: each node holds one.
        """

    async def replace_lost(self) -> None:
        """Have other nodes run what the lost one did: it is cordoned, and its pods are deleted by force.

        Returns when others are ready. Kubernetes would do the same, once a node was away for longer than it and the
        pods tolerate.
        """

    async def start_node(self) -> None:
        """Switch it on again; returns when it is ready, and what had been on it is gone."""

    async def cut_off_redis(self) -> None:
        """Let no new connection to Redis through, by NetworkPolicy; returns when that acts."""

    async def mend(self) -> None:
        """Let them through as before."""


class Target(Protocol):
    """A whole installation, healthy when a drill begins."""

    @property
    def heartbeat_s(self) -> float:
        """How often presence is refreshed; every presence time is a multiple of it."""

    @property
    def allowance_s(self) -> float:
        """What its own tools may take for a cut and for what undoes it, on top of each limit of time; 0 for signals."""

    @property
    def cannot(self) -> Mapping[str, str]:
        """The drills that cannot be played on it, each with the reason."""

    @property
    def gateways(self) -> Sequence[Gateway]:
        """Those that serve, two or more; the same object always, with what serves now."""

    @property
    def workers(self) -> Sequence[Replica]:
        """Likewise."""

    @property
    def relays(self) -> Sequence[Replica]:
        """Likewise."""

    @property
    def agent(self) -> Agent:
        """Whom the relays follow; it is never cut itself, for it is not ours."""

    @property
    def model(self) -> Model:
        """Whom the workers ask for answers; likewise."""

    @property
    def endpoint(self) -> Endpoint:
        """Likewise."""

    @property
    def postgres(self) -> Store:
        """PostgreSQL."""

    @property
    def redis(self) -> RedisStore:
        """Redis."""

    @property
    def cluster(self) -> Cluster | None:
        """What runs it, if that is a cluster."""

    @property
    def api_key(self) -> str:
        """A key for every user's jobs."""

    @property
    def postgres_url(self) -> str:
        """Around everything that can be cut, for whoever counts."""

    @property
    def redis_url(self) -> str:
        """Likewise."""

    async def scale(self, role: Role, replicas: int) -> None:
        """Run so many replicas of a role: new ones are ready, superfluous ones have left, when it returns."""

    async def add_machine(self, user: str, *, connected: bool = True) -> Machine:
        """Start a further machine of a user, with the tools of `harness.drills.tools` and a journal of its own."""

    async def remove_machine(self, machine: Machine) -> None:
        """End a machine for good, in whatever state it is."""

    async def let_go(self, user: str, mark: str) -> None:
        """Let the held tool of that mark on the user's machines come to its end."""

    async def executions(self, user: str) -> Mapping[str, Executions]:
        """What the tools on all of a user's machines have noted, by the job's mark."""

    async def heal(self) -> None:
        """Thaw what is frozen and start what is not running: a drill that failed half way must not fail the next."""


def log_events(text: str) -> Iterator[dict[str, Any]]:
    """The lines of a JSON log; others (a traceback, a cut line) are passed over."""
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                yield json.loads(line)
