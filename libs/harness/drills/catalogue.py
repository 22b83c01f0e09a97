"""Every drill by name, in the order in which `all` plays them."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Final

from harness.drills import gateways, limits, machines, rolling, stores, workers
from harness.drills.scene import Scene

Scenario = Callable[[Scene], Awaitable[None]]

DRILLS: Final[dict[str, Scenario]] = {
    "worker-kill": workers.worker_kill,
    "worker-freeze": workers.worker_freeze,
    "gateway-kill": gateways.gateway_kill,
    "sidecar-kill": machines.sidecar_kill,
    "socket-cut": machines.socket_cut,
    "redis-restart": stores.redis_restart,
    "redis-flush": stores.redis_flush,
    "postgres-restart": stores.postgres_restart,
    "redis-freeze": stores.redis_freeze,
    "postgres-freeze": stores.postgres_freeze,
    "rolling-workers": rolling.rolling_workers,
    "rolling-gateways": rolling.rolling_gateways,
    "laptop-sleep": machines.laptop_sleep,
    "two-machines": machines.two_machines,
    "poison": limits.poison,
    "queue-full": limits.queue_full,
    "deadline": limits.deadline,
}


def story(name: str) -> str:
    """What a drill does, in one sentence."""
    return (inspect.getdoc(DRILLS[name]) or "").partition("\n")[0]
