"""Services that start before their stores have names, addresses or life, as in a cluster that boots all at once.

Each runs in a mount namespace of its own with a private `/etc/hosts` and nothing else to look names up in: this takes
root on Linux, and the tests are left out elsewhere.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest
from support import eventually

from common.store.postgres import migrate
from harness.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from harness.faults import TcpProxy
from harness.ports import free_port
from harness.runner import Process, temporary_directory
from harness.stack import inherited_environment

NAMES = {"redis": "redis.towline.internal", "postgres": "postgres.towline.internal"}
NAMELESS_S = 20.0
REFUSED_S = 10.0
READY_WITHIN_S = 10.0
PRIVATE = """
set -e
mount --make-rprivate /
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
shift
exec "$@"
"""


def _can_have_private_files() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    tried = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"], capture_output=True, check=False)
    return tried.returncode == 0


pytestmark = pytest.mark.skipif(not _can_have_private_files(), reason="private mounts need root on Linux")


class Names:
    """The only place where the services under test find addresses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "nsswitch.conf").write_text("hosts: files\n")
        self.lead_to(None)

    def lead_to(self, address: str | None) -> None:
        """Give the stores' names an address, or take it away; in place, for the file is mounted elsewhere."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name in NAMES.values() if address)]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")


class Booting:
    """One service in its namespace."""

    def __init__(self, module: str, names: Names, env: dict[str, str]) -> None:
        self.admin_port = free_port()
        self.port = free_port()
        env = inherited_environment() | env | {"TOWLINE_ADMIN_PORT": str(self.admin_port)}
        env |= {f"TOWLINE_{kind}_PORT": str(self.port) for kind in ("HTTP", "BRIDGE")}
        argv = ["unshare", "--mount", "sh", "-c", PRIVATE, "sh", str(names.directory), sys.executable, "-m", module]
        argv[0] = shutil.which("unshare") or argv[0]
        self.process = Process(module, argv, directory=names.directory, env=env)

    async def waits(self) -> bool:
        """Whether it lives, is not ready, and says so of both stores."""
        assert self.process.is_running, self.process.read_log()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.admin_port}") as http:
            try:
                alive, ready = await http.get("/livez"), await http.get("/readyz")
            except httpx.HTTPError:  # it has only just been started
                return False
        assert (alive.status_code, ready.status_code) == (200, 503)
        body = ready.json()
        assert body["state"] == "starting"
        return all(store["up"] is False and store["problem"] for store in body["dependencies"].values())

    async def is_well(self) -> bool:
        """Whether it is ready and reaches both stores."""
        assert self.process.is_running, self.process.read_log()
        async with httpx.AsyncClient() as http:
            ready = await http.get(f"http://127.0.0.1:{self.admin_port}/readyz")
        return ready.status_code == 200 and all(store["up"] for store in ready.json()["dependencies"].values())


@pytest.fixture
async def stores() -> AsyncIterator[dict[str, EmbeddedServer]]:
    with temporary_directory() as directory:
        stores: dict[str, EmbeddedServer] = {
            "redis": EmbeddedValkey(directory),
            "postgres": EmbeddedPostgres(directory),
        }
        async with contextlib.AsyncExitStack() as cleanup:
            for store in stores.values():
                cleanup.push_async_callback(store.stop)
                await store.start()
            await migrate(stores["postgres"].url)
            yield stores


@pytest.mark.timeout(240)
async def test_services_wait_for_names_and_servers_and_follow_them_to_another_address(
    stores: dict[str, EmbeddedServer], tmp_path: Path
) -> None:
    """No name, then nobody at home, then both; later both move, and nobody tells them but the name."""
    async with contextlib.AsyncExitStack() as cleanup:
        here = {name: TcpProxy(store.url) for name, store in stores.items()}
        there = {name: TcpProxy(store.url, host="127.0.0.2", port=here[name].port) for name, store in stores.items()}
        for proxy in (*here.values(), *there.values()):
            cleanup.push_async_callback(proxy.stop)
        names = Names(tmp_path)
        env = {
            "REDIS_URL": _by_name(here["redis"], "redis"),
            "DATABASE_URL": _by_name(here["postgres"], "postgres"),
            "TOWLINE_ADMIN_HOST": "127.0.0.1",
        }
        services = [Booting(module, names, env) for module in ("gateway", "worker", "relay")]
        for service in services:
            cleanup.push_async_callback(service.process.stop)
            await service.process.start()

        async def all_are(condition: Callable[[Booting], Awaitable[bool]], *, within_s: float) -> None:
            async def are() -> bool:
                return all([await condition(service) for service in services])

            await eventually(are, within_s=within_s)

        async def stay_waiting(seconds: float) -> None:
            """As long as that: whoever tries less and less often comes late when the servers are there."""
            await all_are(Booting.waits, within_s=30)
            await asyncio.sleep(seconds)
            await all_are(Booting.waits, within_s=1)

        await stay_waiting(NAMELESS_S)
        names.lead_to("127.0.0.1")
        await stay_waiting(REFUSED_S)
        for proxy in here.values():
            await proxy.start()
        await all_are(Booting.is_well, within_s=READY_WITHIN_S)

        for proxy in there.values():
            await proxy.start()
        names.lead_to("127.0.0.2")
        for proxy in here.values():
            await proxy.stop()
        await eventually(lambda: all(proxy.accepted >= len(services) for proxy in there.values()), within_s=30)
        await all_are(Booting.is_well, within_s=READY_WITHIN_S)


def _by_name(proxy: TcpProxy, store: str) -> str:
    """The proxy's URL with the store's name in place of the address."""
    parts = urlsplit(proxy.url)
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f"{proxy.host}:", f"{NAMES[store]}:")))
