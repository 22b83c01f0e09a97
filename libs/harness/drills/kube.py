"""A target of pods: attaches to the installation that `make kind-up` has made in a cluster on this machine.

Owns:     port-forwards to every pod and store, and the number of replicas while it is attached; at the end each
          Deployment has two.
Promises: whatever replaces a pod does so as Kubernetes has it: what was killed is made anew by its Deployment at once,
          and the drill takes it up when it asks for it.
Used by:  `towline drill --target kube`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from harness.drills.attached import AttachedTarget, Attachment, Ways, attach, clean_directory
from harness.drills.forward import Forward
from harness.drills.kube_cluster import Deployment, KubeCluster
from harness.drills.kube_parts import FINALIZER, KubeRedis, KubeStore
from harness.drills.kubectl import Kubectl, Nodes, find_nodes
from harness.drills.pods import Pod
from harness.drills.reach import (
    AGENT_PORT,
    ENDPOINT_PORT,
    MODEL_PORT,
    POSTGRES_PORT,
    REDIS_PORT,
    does_postgres_answer,
    does_redis_answer,
)
from harness.drills.target import ROLES, DrillFailed, Role

REPLICAS = 2


class KubeTarget(AttachedTarget):
    """See `target.Target` and the module."""

    # kubectl, the API server and the kubelet, one after the other, on a busy machine.
    allowance_s = 5.0
    cannot: Mapping[str, str] = {
        "slow-client": "a port-forward carries all connections of a pod in one, which a client that does not read stops"
    }

    def __init__(
        self, kubectl: Kubectl, nodes: Nodes, attachment: Attachment, postgres: KubeStore, redis: KubeRedis
    ) -> None:
        """Describe a target whose pods are not known yet."""
        super().__init__(attachment)
        self.postgres = postgres
        self.redis = redis
        self._deployments = {role: Deployment(kubectl, nodes, attachment, role) for role in ROLES}
        self.cluster = KubeCluster(kubectl, nodes, self._deployments, postgres=postgres, redis=redis)
        self.gateways = self._deployments["gateway"].running
        self.workers = self._deployments["worker"].running
        self.relays = self._deployments["relay"].running

    async def scale(self, role: Role, replicas: int) -> None:
        await self._deployments[role].scale(replicas)

    async def heal(self) -> None:
        await self.cluster.heal()
        # What everything else needs comes first.
        await asyncio.gather(self.postgres.heal(), self.redis.heal())
        await asyncio.gather(*(deployment.heal(REPLICAS) for deployment in self._deployments.values()))

    async def close(self) -> None:
        """Leave the pods to the cluster."""
        for deployment in self._deployments.values():
            for replica in deployment.running:
                await replica.close()


@contextlib.asynccontextmanager
async def open_kube_target(directory: Path, namespace: str) -> AsyncIterator[KubeTarget]:
    """Attach to the installation in a namespace of the current context; at the end there are two replicas of each role.

    Args:
        directory: takes logs, journals and notes; those of the last time are removed.

    Raises:
        DirectoryBusy: another target uses the directory.
        DrillFailed: there is no installation, or it does not get well.
    """
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(clean_directory(directory))
        kubectl = Kubectl(namespace)
        stand_in = await _one_pod(kubectl, "stand-in", namespace)
        nodes = await find_nodes(stand_in.node)
        await _forget_finalizers(kubectl)
        postgres = KubeStore(kubectl, nodes, "postgres", directory, port=POSTGRES_PORT, answers=does_postgres_answer)
        redis = KubeRedis(kubectl, nodes, "redis", directory, port=REDIS_PORT, answers=does_redis_answer)
        stand_ins = Forward(kubectl, "stand-in", directory, (AGENT_PORT, MODEL_PORT, ENDPOINT_PORT))
        cleanup.push_async_callback(stand_ins.stop)
        await stand_ins.lead_to(stand_in.name)
        for store in (postgres, redis):
            cleanup.push_async_callback(store.close)
        ways = Ways(
            postgres=await postgres.open(),
            redis=await redis.open(),
            agent=stand_ins.ports[AGENT_PORT],
            model=stand_ins.ports[MODEL_PORT],
            endpoint=stand_ins.ports[ENDPOINT_PORT],
            environment=await kubectl.environment("gateway"),
        )
        attachment = await cleanup.enter_async_context(attach(directory, ways))
        postgres.url, redis.url = attachment.postgres_url, attachment.redis_url
        target = KubeTarget(kubectl, nodes, attachment, postgres, redis)
        cleanup.push_async_callback(target.close)
        await asyncio.gather(*(target.scale(role, REPLICAS) for role in ROLES))
        yield target


async def _one_pod(kubectl: Kubectl, name: str, namespace: str) -> Pod:
    pods = [pod for pod in await kubectl.pods(name) if pod.is_ready and not pod.is_leaving]
    if not pods:
        raise DrillFailed(f"no pod of {name} is ready in the namespace {namespace}: `make kind-up` first")
    return pods[0]


async def _forget_finalizers(kubectl: Kubectl) -> None:
    """Let go of the pods that a drill kept and, because it was killed, did not let go of."""
    for role in ROLES:
        for pod in await kubectl.pods(role):
            if pod.is_leaving and FINALIZER in await kubectl.call("get", "pod", pod.name, "--output", "json"):
                await kubectl.patch("pod", pod.name, {"metadata": {"finalizers": None}})
