"""What Kubernetes does with pods of its own accord: Deployments, and a cluster whose nodes and policies can be cut.

Used by:  `kube`, which makes a whole installation of them.
"""

import asyncio
import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.drills.attached import Attachment
from harness.drills.kube_parts import REPLACED_WITHIN_S, KubeReplica, KubeStore
from harness.drills.kubectl import Kubectl, Nodes
from harness.drills.pods import Pod
from harness.drills.reach import GATEWAY_PORT, WORKER_PORT, wait_until
from harness.drills.replicas import Place
from harness.drills.target import DrillFailed, Kind, Role

PORTS: Mapping[Role, int] = {"gateway": GATEWAY_PORT, "worker": WORKER_PORT, "relay": 0}
NODE_REPLACED_WITHIN_S = 120.0
NODE_STARTS_WITHIN_S = 90.0
POLICY_ACTS_WITHIN_S = 15.0
# Ends non-zero when nothing answers there within a second.
REACHES_REDIS = (
    "import os, socket, urllib.parse as u;"
    " url = u.urlsplit(os.environ['REDIS_URL']); socket.create_connection((url.hostname, url.port), 1)"
)


class Deployment:
    """All pods of one role.

    Attributes:
        running: a replica for each pod that serves; the same list always.
    """

    def __init__(self, kubectl: Kubectl, nodes: Nodes, attachment: Attachment, role: Role) -> None:
        self.running: list[KubeReplica] = []
        self._kubectl = kubectl
        self._nodes = nodes
        self._attachment = attachment
        self._role = role
        self._slots = 0

    async def pods(self) -> list[Pod]:
        """Those that leave included."""
        return await self._kubectl.pods(self._role)

    async def scale(self, replicas: int) -> None:
        """Have so many pods, all ready, each with its replica; what is superfluous has left."""
        await self._kubectl.call("scale", f"deployment/{self._role}", f"--replicas={replicas}")
        await self.settle(replicas)

    async def roll(self) -> None:
        """See `Cluster.roll`."""
        before = {pod.name for pod in await self.pods()}
        await self._kubectl.call("rollout", "restart", f"deployment/{self._role}")
        await self.settle(len(self.running), without=before, within_s=2 * REPLACED_WITHIN_S)

    async def heal(self, replicas: int) -> None:
        """Wake what is frozen, and have so many."""
        for replica in self.running:
            if replica.is_frozen:
                with contextlib.suppress(DrillFailed):  # It may be gone meanwhile.
                    await replica.thaw()
        await self.scale(replicas)

    async def settle(
        self,
        replicas: int,
        *,
        without: Collection[str] = (),
        have_left: bool = True,
        lost_node: str = "",
        within_s: float = REPLACED_WITHIN_S,
    ) -> None:
        """Wait for so many pods, all ready, each with its replica; as a Service does, leave and take up each at once.

        Args:
            without: pods that must be gone.
            have_left: wait also until what leaves has left; a pod of a lost node never does.
            lost_node: what is there does not serve, whatever its status says.
        """

        async def is_settled() -> bool:
            pods = await self.pods()
            serving = {pod.name: pod for pod in pods if not pod.is_leaving and pod.node != lost_node}
            for replica in [each for each in self.running if each.pod_name not in serving]:
                self.running.remove(replica)
                await replica.close()
            held = {replica.pod_name: replica for replica in self.running}
            for pod in serving.values():
                if pod.is_ready and pod.name not in held:
                    await self._take(pod)
                elif pod.is_ready and pod.container != held[pod.name].container:
                    await held[pod.name].take(pod)  # The kubelet has started it again.
            return (
                len(serving) == replicas
                and all(pod.is_ready for pod in serving.values())
                and (not have_left or len(pods) == len(serving))
                and not set(without) & set(serving)
            )

        await wait_until(f"{replicas} pods of {self._role}", is_settled, within_s=within_s)

    async def unheld(self) -> Pod:
        """Wait for a pod that is ready and that no replica has."""
        found: list[Pod] = []

        async def is_there() -> bool:
            held = {replica.pod_name for replica in self.running}
            found[:] = [
                pod for pod in await self.pods() if pod.is_ready and not pod.is_leaving and pod.name not in held
            ]
            return bool(found)

        await wait_until(f"another pod of {self._role}", is_there, within_s=REPLACED_WITHIN_S)
        return found[0]

    async def _take(self, pod: Pod) -> None:
        self._slots += 1
        replica = KubeReplica(
            self._kubectl,
            self._nodes,
            f"{self._role}-{self._slots}",
            self._attachment.directory,
            port=PORTS[self._role],
            place=Place(self._attachment.balancer) if self._role == "worker" else None,
            replacement=self.unheld,
        )
        await replica.take(pod)
        self.running.append(replica)


class KubeCluster:
    """See `target.Cluster`."""

    def __init__(
        self,
        kubectl: Kubectl,
        nodes: Nodes,
        deployments: Mapping[Role, Deployment],
        *,
        postgres: KubeStore,
        redis: KubeStore,
    ) -> None:
        self._kubectl = kubectl
        self._nodes = nodes
        self._deployments = deployments
        self._stores: Mapping[str, KubeStore] = {"postgres": postgres, "redis": redis}
        # What is cut now: a node, and what the policy of Redis lets in when it is as it should be.
        self._stopped = ""
        self._lost: dict[Role, int] = {}
        self._let_in: Any = None

    async def delete(self, kind: Kind) -> str:
        match kind:
            case "redis" | "postgres":
                name = f"{kind}-0"
                await self._kubectl.call("delete", "pod", name)
                await self._stores[kind].wait_ready()
            case role:
                replica = self._deployments[role].running[0]
                name = replica.pod_name
                replica.lead_away()
                await self._kubectl.call("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
                await replica.start()
        return name

    async def roll(self, role: Role) -> None:
        await self._deployments[role].roll()

    async def ready(self, role: Role) -> int:
        return sum(pod.is_ready and not pod.is_leaving for pod in await self._deployments[role].pods())

    async def stop_node(self) -> Sequence[str]:
        kept = {pod.node for name in (*self._stores, "stand-in") for pod in await self._kubectl.pods(name)}
        on_nodes: dict[str, list[tuple[Role, KubeReplica]]] = {}
        for role, deployment in self._deployments.items():
            where = {pod.name: pod.node for pod in await deployment.pods()}
            for replica in deployment.running:
                on_nodes.setdefault(where[replica.pod_name], []).append((role, replica))
        free = [node for node in on_nodes if node not in kept]
        if not free:
            raise DrillFailed("each node holds a store or the stand-in: losing one is losing that")
        self._stopped = free[0]
        self._lost = {role: len(deployment.running) for role, deployment in self._deployments.items()}
        await self._nodes.stop(self._stopped)
        for role, replica in on_nodes[self._stopped]:
            # Whoever was connected sees it: what nobody answers any more is the part of `worker-freeze`.
            self._deployments[role].running.remove(replica)
            await replica.close()
        return [replica.name for _, replica in on_nodes[self._stopped]]

    async def replace_lost(self) -> None:
        # Until it counts as lost, Kubernetes would have them started there.
        await self._kubectl.call("cordon", self._stopped)
        for deployment in self._deployments.values():
            for pod in await deployment.pods():
                if pod.node == self._stopped:
                    await self._kubectl.call("delete", "pod", pod.name, "--force", "--grace-period=0", "--wait=false")
        await self._settle(have_left=False)

    async def start_node(self) -> None:
        node = self._stopped
        await self._nodes.start(node)
        await self._kubectl.call("uncordon", node)

        async def is_ready() -> bool:
            ready = '{.status.conditions[?(@.type=="Ready")].status}'
            return await self._kubectl.call("get", "node", node, "--output", f"jsonpath={ready}") == "True"

        await wait_until(f"{node} is ready", is_ready, within_s=NODE_STARTS_WITHIN_S)
        self._stopped = ""
        await self._settle(have_left=True)

    async def cut_off_redis(self) -> None:
        policy = json.loads(await self._kubectl.call("get", "networkpolicy", "redis", "--output", "json"))
        self._let_in = policy["spec"]["ingress"]
        await self._kubectl.patch("networkpolicy", "redis", {"spec": {"ingress": []}})
        await wait_until("the policy acts", self._is_cut_off, within_s=POLICY_ACTS_WITHIN_S)

    async def mend(self) -> None:
        await self._kubectl.patch("networkpolicy", "redis", {"spec": {"ingress": self._let_in}})
        self._let_in = None

    async def heal(self) -> None:
        """Have nothing cut any more."""
        if self._let_in is not None:
            await self.mend()
        if self._stopped:
            await self.start_node()

    async def _is_cut_off(self) -> bool:
        try:
            await self._kubectl.call("exec", "deployment/gateway", "--", "python", "-c", REACHES_REDIS)
        except DrillFailed:
            return True
        return False

    async def _settle(self, *, have_left: bool) -> None:
        settling = [
            self._deployments[role].settle(
                count, have_left=have_left, lost_node=self._stopped, within_s=NODE_REPLACED_WITHIN_S
            )
            for role, count in self._lost.items()
        ]
        await asyncio.gather(*settling)
