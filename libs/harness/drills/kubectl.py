"""`kubectl`, and the nodes of a local cluster, which are containers of this machine.

Used by:  `kube` and its parts.
"""

import contextlib
import json
import shutil
import signal
from collections.abc import Mapping

from harness.drills.pods import Pod, read_pod, read_pods
from harness.drills.programs import call, find
from harness.drills.reach import wait_until
from harness.drills.target import DrillFailed

# What kind runs its nodes with.
ENGINES = ("docker", "podman")
GONE_WITHIN_S = 10.0


class Kubectl:
    """One namespace of the cluster that is the current context. Every method raises DrillFailed where it refuses."""

    def __init__(self, namespace: str) -> None:
        self._argv = [*find("kubectl", variable="KUBECTL"), "--namespace", namespace]

    def argv(self, *words: str) -> list[str]:
        """The whole command, for a process of its own."""
        return [*self._argv, *words]

    async def call(self, *words: str, within_s: float = 60.0) -> str:
        """Run it to its end, and return what it printed."""
        return await call(*self.argv(*words), within_s=within_s)

    async def pods(self, name: str) -> list[Pod]:
        """The pods of a service, by what the recommended labels call it."""
        selector = f"app.kubernetes.io/name={name},app.kubernetes.io/part-of=towline"
        return read_pods(await self.call("get", "pods", "--selector", selector, "--output", "json"))

    async def pod(self, name: str) -> Pod | None:
        """One pod; None: it is gone."""
        text = await self.call("get", "pod", name, "--ignore-not-found", "--output", "json")
        return read_pod(text) if text.strip() else None

    async def patch(self, kind: str, name: str, patch: Mapping[str, object]) -> None:
        """Change an object, as a JSON merge patch."""
        await self.call("patch", kind, name, "--type", "merge", "--patch", json.dumps(patch))

    async def environment(self, deployment: str) -> dict[str, str]:
        """What a running container of a Deployment has been given."""
        lines = (await self.call("exec", f"deployment/{deployment}", "--", "env")).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


class Nodes:
    """The nodes, by the program that runs them. Every method raises DrillFailed where that refuses."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    async def signal(self, pod: Pod, number: signal.Signals) -> None:
        """Send a signal to all processes of a pod's container, from outside: its first one cannot keep it off."""
        await self._exec(pod.node, "ctr", "-n", "k8s.io", "tasks", "kill", "-a", "-s", number.name, pod.container)

    async def kill(self, pod: Pod) -> None:
        """SIGKILL its container; returns when that is gone."""
        await self.signal(pod, signal.SIGKILL)

        async def is_gone() -> bool:
            tasks = (await self._exec(pod.node, "ctr", "-n", "k8s.io", "tasks", "ls")).splitlines()
            return not any(pod.container in line and "STOPPED" not in line for line in tasks)

        await wait_until(f"{pod.name} is gone", is_gone, within_s=GONE_WITHIN_S)

    async def stop(self, node: str) -> None:
        """Cut its power."""
        await call(self._engine, "kill", node)

    async def start(self, node: str) -> None:
        """Switch it on again."""
        await call(self._engine, "start", node)

    async def _exec(self, node: str, *argv: str) -> str:
        return await call(self._engine, "exec", node, *argv)


async def find_nodes(node: str) -> Nodes:
    """Find out what runs the nodes, by one of them. Raises: DrillFailed: they are no containers of this machine."""
    for engine in filter(shutil.which, ENGINES):
        with contextlib.suppress(DrillFailed):
            await call(engine, "inspect", node)
            return Nodes(engine)
    raise DrillFailed(
        f"node {node} is no container of this machine: drills cut pods from their nodes, as kind has them"
    )
