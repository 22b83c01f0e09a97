"""The parts of a target in Kubernetes: replicas as pods of a Deployment, stores as the pod of a StatefulSet.

Used by:  `kube`, which makes a whole installation of them.
"""

import contextlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from harness.drills.attached import AttachedReplica
from harness.drills.forward import Forward
from harness.drills.kubectl import Kubectl, Nodes
from harness.drills.pods import Pod
from harness.drills.reach import ADMIN_PORT, flush, wait_ready, wait_until
from harness.drills.replicas import Place
from harness.drills.target import DrillFailed, log_events

# The longest grace period of ours (50 s) and some.
LEAVES_WITHIN_S = 70.0
REPLACED_WITHIN_S = 90.0
RESTARTED_WITHIN_S = 60.0
# Keeps the object of a pod that has left until its exit code was read.
FINALIZER = "towline.dev/drill"


class KubeReplica(AttachedReplica):
    """One gateway, worker or relay as a pod. When that is gone, `start` takes the one that its Deployment makes."""

    def __init__(
        self,
        kubectl: Kubectl,
        nodes: Nodes,
        slot: str,
        directory: Path,
        *,
        port: int,
        place: Place | None,
        replacement: Callable[[], Awaitable[Pod]],
    ) -> None:
        """Describe one.

        Args:
            slot: names the files that take its logs.
            port: where it serves inside; 0 for one that only calls others.
            replacement: waits for a pod of the role that is ready and that no other replica has.
        """
        super().__init__(slot, directory, place)
        self.pod_name = ""
        self.container = ""
        self._kubectl = kubectl
        self._nodes = nodes
        self._inner_port = port
        self._replacement = replacement
        self._forward = Forward(kubectl, slot, directory, (port, ADMIN_PORT) if port else (ADMIN_PORT,))

    async def take(self, pod: Pod) -> None:
        """Be that pod from now on; it is ready."""
        self.name = self.pod_name = pod.name
        self.container = pod.container
        await self._forward.lead_to(pod.name)
        self.admin_port = self._forward.ports[ADMIN_PORT]
        self.port = self._forward.ports.get(self._inner_port, 0)
        await wait_ready(pod.name, lambda: self.admin_port)
        await self.serve(self._kubectl.argv("logs", "--follow", pod.name))

    async def is_running(self) -> bool:
        async def is_there() -> bool:
            pod = await self._kubectl.pod(self.pod_name)
            return pod is None or pod.is_leaving or pod.is_running

        # What stood still for too long was ended by its liveness probe, and the kubelet starts it again.
        with contextlib.suppress(DrillFailed):
            await wait_until(f"{self.pod_name} runs", is_there, within_s=RESTARTED_WITHIN_S)
        pod = await self._kubectl.pod(self.pod_name)
        return pod is not None and pod.is_running and not pod.is_leaving

    async def start(self) -> None:
        await self.take(await self._replacement())

    async def kill(self) -> None:
        pod = await self._pod()
        # A deletion, even by force, begins with SIGTERM and two seconds: the signal itself comes from the node.
        await self._nodes.kill(pod)
        # Its container would be started again in place, later each time; a new pod is there at once.
        await self._kubectl.call("delete", "pod", pod.name, "--force", "--grace-period=0", "--wait=false")
        await self._forward.stop()

    async def term(self) -> int:
        self.lead_away()
        pod = await self._pod()
        await self._kubectl.patch("pod", pod.name, {"metadata": {"finalizers": [FINALIZER]}})
        await self._kubectl.call("delete", "pod", pod.name, "--wait=false")
        code: int | None = None

        async def has_left() -> bool:
            nonlocal code
            now = await self._kubectl.pod(pod.name)
            code = None if now is None else now.exit_code
            return now is None or not now.is_running

        try:
            await wait_until(f"{pod.name} has left", has_left, within_s=LEAVES_WITHIN_S)
        finally:
            await self._kubectl.patch("pod", pod.name, {"metadata": {"finalizers": None}})
        await self._forward.stop()
        # The kubelet may have removed the container before it told of its end: then its last word tells.
        return await self._last_word() if code is None else code

    async def _last_word(self) -> int:
        events = [event.get("event") for event in log_events(await self.logs())]
        if events[-1:] != ["stopped"]:
            raise DrillFailed(f"nobody knows how {self.pod_name} ended; its last words: {events[-3:]}")
        return 0

    async def freeze(self) -> None:
        self.lead_away()
        await self._nodes.signal(await self._pod(), signal.SIGSTOP)
        self.is_frozen = True

    async def thaw(self) -> None:
        await self._nodes.signal(await self._pod(), signal.SIGCONT)
        self.is_frozen = False
        self.lead_here()

    async def close(self) -> None:
        await super().close()
        await self._forward.stop()

    async def _pod(self) -> Pod:
        pod = await self._kubectl.pod(self.pod_name)
        if pod is None:
            raise DrillFailed(f"{self.pod_name} is gone already")
        return pod


class KubeStore:
    """PostgreSQL or Redis: the one pod of a StatefulSet."""

    def __init__(
        self,
        kubectl: Kubectl,
        nodes: Nodes,
        name: str,
        directory: Path,
        *,
        port: int,
        answers: Callable[[str], Awaitable[bool]],
    ) -> None:
        """Describe a store.

        Args:
            name: of its StatefulSet.
            port: where it serves inside.
            answers: whether the store behind a URL does.
        """
        self.url = ""
        self._kubectl = kubectl
        self._nodes = nodes
        self._name = name
        self._answers = answers
        self._forward = Forward(kubectl, name, directory, (port,))
        self._port = port
        self._is_frozen = False

    async def open(self) -> int:
        """Lead to it; returns the port by which to go."""
        await self._forward.lead_to(f"{self._name}-0")
        return self._forward.ports[self._port]

    async def close(self) -> None:
        await self._forward.stop()

    async def stop(self) -> None:
        await self._kubectl.call("scale", f"statefulset/{self._name}", "--replicas=0")

        async def is_gone() -> bool:
            return not await self._kubectl.pods(self._name)

        await wait_until(f"{self._name} has left", is_gone, within_s=LEAVES_WITHIN_S)

    async def start(self) -> None:
        await self._kubectl.call("scale", f"statefulset/{self._name}", "--replicas=1")
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until its pod, a new one of that name, is ready and answers us."""

        async def is_ready() -> bool:
            return any(pod.is_ready and not pod.is_leaving for pod in await self._kubectl.pods(self._name))

        await wait_until(f"{self._name} is ready", is_ready, within_s=REPLACED_WITHIN_S)
        # A forward to the pod before it may stand for ever, and lead nowhere.
        await self._forward.lead_to(f"{self._name}-0")
        await wait_until(f"{self._name} answers", lambda: self._answers(self.url))

    async def freeze(self) -> None:
        await self._nodes.signal(await self._pod(), signal.SIGSTOP)
        self._is_frozen = True

    async def thaw(self) -> None:
        await self._nodes.signal(await self._pod(), signal.SIGCONT)
        self._is_frozen = False

    async def heal(self) -> None:
        """Have it run, whatever was done to it."""
        if self._is_frozen:
            await self.thaw()
        if not await self._kubectl.pods(self._name):
            await self.start()

    async def _pod(self) -> Pod:
        pods = await self._kubectl.pods(self._name)
        if not pods:
            raise DrillFailed(f"{self._name} has no pod")
        return pods[0]


class KubeRedis(KubeStore):
    """Redis."""

    async def flush(self) -> None:
        await flush(self.url)
