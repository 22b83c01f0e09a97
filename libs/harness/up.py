"""`towline up`: the product on this machine until it is told to stop, and word of what ends by itself meanwhile."""

import asyncio
import contextlib
import sys
from pathlib import Path

from rich.console import Console

from harness.servers import open_servers
from harness.stack import Service, Stack

# Often enough for whoever looks at the terminal.
LOOK_EVERY_S = 0.5


async def run_up(
    console: Console, directory: Path, *, gateways: int, workers: int, relays: int, heartbeat_s: float
) -> None:
    """Run until cancelled, then stop what was started.

    Raises:
        ProcessFailed, DirectoryBusy, ServerMissing: something did not start.
    """
    console.print("starting PostgreSQL and Valkey")
    async with open_servers(directory / "stores") as urls:
        stack = Stack(
            directory / "stack", postgres_url=urls.postgres_url, redis_url=urls.redis_url, heartbeat_s=heartbeat_s
        )
        async with stack:
            console.print("starting the services")
            async with asyncio.TaskGroup() as group:
                for _ in range(gateways):
                    group.create_task(stack.add_gateway())
                for _ in range(workers):
                    group.create_task(stack.add_worker())
                for _ in range(relays):
                    group.create_task(stack.add_relay())
            lines = [f"{each.name:10} {_address(stack, each)}" for each in _services(stack)]
            lines += [f"{'sidecars':10} dial {stack.bridge_url}", f"{'logs':10} {directory / 'stack'}", ""]
            lines += ["Relays follow sources, and agents are called, on 127.0.0.1 and localhost only.", ""]
            lines += [f"export TOWLINE_URL={stack.gateways[0].url}", f"export TOWLINE_API_KEY={stack.api_key}"]
            lines += ["", "For `towline queues` and `towline keys`, which go to the stores themselves:"]
            lines += [f"export DATABASE_URL='{urls.postgres_url}'", f"export REDIS_URL='{urls.redis_url}'", ""]
            console.print("\n".join(lines) + "\nUp until Ctrl-C.", highlight=False, soft_wrap=True)
            with contextlib.suppress(asyncio.CancelledError):
                await _tell_of_ends(directory / "stack", _services(stack))
            console.print("\nstopping the services, and then the stores")
    console.print("stopped")


def _services(stack: Stack) -> list[Service]:
    return [*stack.gateways, *stack.workers, *stack.relays]


def _address(stack: Stack, service: Service) -> str:
    """Where it serves, if at all, and where its probes and metrics are."""
    serves = {gateway.name: gateway.url for gateway in stack.gateways}
    serves |= {worker.name: worker.bridge_url for worker in stack.workers}
    return f"{serves.get(service.name, ''):24} /readyz and /metrics: http://127.0.0.1:{service.admin_port}"


async def _tell_of_ends(logs: Path, services: list[Service]) -> None:
    """Say of each service that ends that it did; the others go on. Until cancelled."""
    running = list(services)
    while True:
        for service in [each for each in running if not each.is_running]:
            running.remove(service)
            how = f"signal {-code}" if (code := service.returncode or 0) < 0 else f"code {code}"
            print(f"{service.name} ended ({how}); its log: {logs / service.name}.log", file=sys.stderr)
        await asyncio.sleep(LOOK_EVERY_S)
