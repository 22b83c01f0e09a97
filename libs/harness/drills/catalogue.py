"""Every drill by name, in the order in which `all` plays them."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Final

from harness.drills import (
    clients,
    cluster,
    gateways,
    limits,
    machines,
    relays,
    rolling,
    stores,
    turn_cuts,
    turns,
    upstreams,
    workers,
)
from harness.drills.scene import Scene

Scenario = Callable[[Scene], Awaitable[None]]

JOB_DRILLS: Final[dict[str, Scenario]] = {
    "worker-kill": workers.worker_kill,
    "worker-freeze": workers.worker_freeze,
    "gateway-kill": gateways.gateway_kill,
    "sidecar-kill": machines.sidecar_kill,
    "socket-cut": machines.socket_cut,
    "rolling-workers": rolling.rolling_workers,
    "rolling-gateways": rolling.rolling_gateways,
    "scale": rolling.scale,
    "laptop-sleep": machines.laptop_sleep,
    "two-machines": machines.two_machines,
    "poison": limits.poison,
    "queue-full": limits.queue_full,
    "deadline": limits.deadline,
}
STORE_DRILLS: Final[dict[str, Scenario]] = {
    "redis-restart": stores.redis_restart,
    "redis-flush": stores.redis_flush,
    "postgres-restart": stores.postgres_restart,
    "redis-freeze": stores.redis_freeze,
    "postgres-freeze": stores.postgres_freeze,
}
EVENT_DRILLS: Final[dict[str, Scenario]] = {
    "relay-kill": relays.relay_kill,
    "relay-kill-at-the-end": relays.relay_kill_at_the_end,
    "relay-term": relays.relay_term,
    "relay-freeze": relays.relay_freeze,
    "relay-scale": relays.relay_scale,
    "gateway-kill-under-sse": clients.gateway_kill_under_sse,
    "redis-restart-under-events": stores.redis_restart_under_events,
    "upstream-flaps": upstreams.upstream_flaps,
    "slow-client": clients.slow_client,
    "trimmed-cursor": clients.trimmed_cursor,
}
TURN_DRILLS: Final[dict[str, Scenario]] = {
    "turn-slow": turns.turn_slow,
    "turn-failure": turns.turn_failure,
    "turn-fast": turns.turn_fast,
    "turn-cancel": turns.turn_cancel,
    "turn-gateway-kill": turn_cuts.turn_gateway_kill,
}
TURN_CUT_DRILLS: Final[dict[str, Scenario]] = {
    "turn-crash": turn_cuts.turn_crash,
    "turn-freeze": turn_cuts.turn_freeze,
    "turn-tool-cut": turn_cuts.turn_tool_cut,
    "turn-postgres-restart": turn_cuts.turn_postgres_restart,
    "turn-redis-flush": turn_cuts.turn_redis_flush,
}
CLUSTER_DRILLS: Final[dict[str, Scenario]] = {
    "pods-delete": cluster.pods_delete,
    "rollout": cluster.rollout,
    "network-cut": cluster.network_cut,
    "node-stop": cluster.node_stop,
}
DRILLS: Final = JOB_DRILLS | STORE_DRILLS | EVENT_DRILLS | TURN_DRILLS | TURN_CUT_DRILLS | CLUSTER_DRILLS


def story(name: str) -> str:
    """What a drill does, in one sentence."""
    return (inspect.getdoc(DRILLS[name]) or "").partition("\n")[0]
