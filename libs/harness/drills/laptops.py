"""Users' machines: sidecars as processes of this machine, behind a proxy each, whatever runs the product.

A laptop is outside of the cluster, so this is as close to one as a drill gets.

Owns:     the proxies, and the files in which the tools on the machines note what they do.
Used by:  every target.
"""

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.drills.target import DrillFailed, Executions
from harness.drills.tools import NOTES_VARIABLE, let_go_file
from harness.faults import TcpProxy
from harness.runner import Process, ProcessFailed
from harness.sidecars import Sidecar, Sidecars

GONE_WITHIN_S = 10.0
CONNECTS_WITHIN_S = 30.0


@contextlib.contextmanager
def drill_fails() -> Iterator[None]:
    """Say `DrillFailed` of a process that did not do its part."""
    try:
        yield
    except ProcessFailed as error:
        raise DrillFailed(str(error)) from error


async def wait_killed(process: Process, *, within_s: float) -> None:
    """Wait until SIGKILL has ended a process. Raises: DrillFailed: it did not, or something else has."""
    with drill_fails():
        code = await process.wait(within_s=within_s)
    if code != -signal.SIGKILL:
        raise DrillFailed(f"{process.name} ended with {code}, not by SIGKILL")


class Laptop:
    """A sidecar as a process, behind a proxy of its own."""

    def __init__(self, user: str, sidecar: Sidecar, proxy: TcpProxy) -> None:
        self.sidecar = sidecar
        self.proxy = proxy
        self._user = user

    @property
    def name(self) -> str:
        return self.sidecar.name

    @property
    def user(self) -> str:
        return self._user

    async def is_running(self) -> bool:
        return self.sidecar.is_running

    async def start(self, *, connected: bool = True) -> None:
        if connected:
            with drill_fails():
                await self.sidecar.start_connected(within_s=CONNECTS_WITHIN_S)
        else:
            await self.sidecar.start()

    async def stop(self) -> None:
        await self.sidecar.stop()

    async def kill(self) -> None:
        self.sidecar.kill()
        await self.killed(within_s=GONE_WITHIN_S)

    async def killed(self, *, within_s: float) -> None:
        await wait_killed(self.sidecar, within_s=within_s)

    async def freeze(self) -> None:
        self.sidecar.freeze()

    async def thaw(self) -> None:
        self.sidecar.thaw()

    async def cut(self) -> None:
        self.proxy.cut()

    async def unplug(self) -> None:
        self.proxy.refuse()
        self.proxy.cut()

    async def plug(self) -> None:
        await self.proxy.heal()

    async def logs(self) -> str:
        return self.sidecar.log.read_text()


class Laptops:
    """All machines of all users."""

    def __init__(self, sidecars: Sidecars, *, bridge_url: str, notes: Path) -> None:
        """Describe them; `bridge_url`: what their proxies lead to, `notes`: a directory for what the tools note."""
        self._sidecars = sidecars
        self._bridge_url = bridge_url
        self._notes = notes

    async def add(self, user: str, *, connected: bool) -> Laptop:
        """See `Target.add_machine`."""
        proxy = TcpProxy(self._bridge_url)
        with drill_fails():
            sidecar = await self._sidecars.add(
                user,
                await proxy.start(),
                tools=["harness.drills.tools"],
                env={NOTES_VARIABLE: str(self._notes / user)},
                connected=connected,
            )
        return Laptop(user, sidecar, proxy)

    async def remove(self, laptop: Laptop) -> None:
        """See `Target.remove_machine`."""
        await laptop.sidecar.stop()
        await laptop.proxy.stop()

    def let_go(self, user: str, mark: str) -> None:
        """See `Target.let_go`."""
        let_go_file(self._notes / user, mark).touch()

    def executions(self, user: str) -> Mapping[str, Executions]:
        """See `Target.executions`."""
        try:
            lines = (self._notes / user).read_text().splitlines()
        except FileNotFoundError:
            return {}
        notes = Counter(lines)
        marks = {line.partition(" ")[2] for line in lines}
        return {mark: Executions(notes[f"began {mark}"], notes[f"ended {mark}"]) for mark in marks}
