"""This product's event path under load: a relay and gateways as they are shipped, on the same stores as the peers.

What is measured goes the whole way: an upstream that sends, the relay that stores, the gateway that serves.
"""

from collections.abc import Mapping
from functools import partial
from uuid import uuid4

import httpx

from common.ids import RunId
from common.store import keys
from harness.bench import publish
from harness.bench.ground import BenchFailed
from harness.bench.streams import Stream
from harness.ports import free_port
from harness.stack import Gateway, Relay, Stack

ANSWER_WITHIN_S = 30.0


class Runs:
    """The runs of an installation, through one of its gateways."""

    def __init__(self, stack: Stack, gateway: Gateway) -> None:
        self.headers = {"Authorization": f"Bearer {stack.api_key}"}
        self._gateway = gateway

    async def follow(self, run: str, url: str) -> None:
        """PUT the run. Raises: BenchFailed."""
        await self._ask("PUT", run, {"sources": [{"source": "agent", "url": url, "resume": "ids"}]})

    async def stop(self, run: str) -> None:
        """DELETE the run. Raises: BenchFailed."""
        await self._ask("DELETE", run)

    async def _ask(self, method: str, run: str, body: object = None) -> None:
        url = f"{self._gateway.url}/v1/runs/{run}"
        async with httpx.AsyncClient(headers=self.headers, timeout=ANSWER_WITHIN_S) as http:
            answer = await http.request(method, url, json=body)
        if not answer.is_success:
            raise BenchFailed(f"{method} {url}: {answer.status_code} {answer.text}")


class OurRelay:
    """A relay that stores events: a `harness.bench.relays.Relay`."""

    def __init__(self, runs: Runs, relay: Relay) -> None:
        self._runs = runs
        self._relay = relay

    @property
    def pids(self) -> Mapping[str, int]:
        """Who is accounted, by name."""
        return {"relay": self._relay.pid}

    def stream_of(self, run: str) -> str:
        """Key of the event log of a run."""
        return keys.events(RunId(run))

    async def follow(self, run: str, url: str) -> None:
        """PUT the run. Raises: BenchFailed."""
        await self._runs.follow(run, url)

    async def forget(self, run: str) -> None:
        """Stop the run; its log is there for a day. Raises: BenchFailed."""
        await self._runs.stop(run)


class OurStreams:
    """A gateway that serves streams: a `harness.bench.streams.StreamServer`. `relay`: what feeds it, if it counts."""

    def __init__(self, runs: Runs, gateway: Gateway, relay: Relay | None = None) -> None:
        self._runs = runs
        self._gateway = gateway
        self._relay = relay

    @property
    def pids(self) -> Mapping[str, int]:
        """Who is accounted, by name."""
        return {"gateway": self._gateway.pid, **({"relay": self._relay.pid} if self._relay else {})}

    async def describe_stream(self) -> Stream:
        """Name a run that nobody has followed; it is followed from when its upstream listens."""
        run, port = f"bench-{uuid4().hex}", free_port()
        return Stream(
            run,
            self._gateway.port,
            f"/v1/runs/{run}/events",
            publish.ToReader(port),
            self._runs.headers,
            partial(self._runs.follow, run, f"http://127.0.0.1:{port}/events"),
        )

    async def restart(self) -> None:
        """Start the gateway afresh. Raises: ProcessFailed."""
        await self._gateway.stop()
        await self._gateway.start_ready()

    async def forget(self, stream: Stream) -> None:
        """Stop the run. Raises: BenchFailed."""
        await self._runs.stop(stream.name)
