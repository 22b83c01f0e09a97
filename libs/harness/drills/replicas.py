"""What replicas have in common, whatever runs them: how many there are, and a worker's place behind the balancer.

Used by:  the targets.
"""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from harness.balancer import Balancer
from harness.drills.target import Replica

R = TypeVar("R", bound=Replica)


class Place:
    """A worker's place behind the balancer, which leads no new sockets to it while it leaves or is frozen.

    In Kubernetes a pod that is told to leave is taken out of its Service at the same time, and one that does not answer
    after its readiness probe has failed.
    """

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._port = 0

    def take(self, port: int) -> None:
        """Lead new sockets to this loopback port, and to no earlier one."""
        self.leave()
        self._port = port
        self._balancer.backends.append(("127.0.0.1", port))

    def leave(self) -> None:
        """Lead no new sockets there; does nothing the second time."""
        if ("127.0.0.1", self._port) in self._balancer.backends:
            self._balancer.backends.remove(("127.0.0.1", self._port))


class Replicas(Generic[R]):
    """All replicas of one role, each of which is told itself when to leave.

    Attributes:
        running: those that are meant to run; the same list always.
        spare: scaled away; they come back as they were.
    """

    def __init__(self, add: Callable[[], Awaitable[R]]) -> None:
        """`add`: starts one more."""
        self.running: list[R] = []
        self.spare: list[R] = []
        self._add = add

    async def scale(self, replicas: int) -> None:
        """See `Target.scale`."""
        while len(self.running) < replicas:
            if self.spare:
                replica = self.spare.pop()
                await replica.start()
            else:
                replica = await self._add()
            self.running.append(replica)
        while len(self.running) > replicas:
            replica = self.running.pop()
            self.spare.append(replica)
            await replica.term()
