"""A gateway that leaves while requests still come, as they do in Kubernetes until every node knows of it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manifests import environment, kind_objects, pod_of
from support import eventually

from harness.ports import is_http_ready
from harness.stack import Gateway, Stack

# How long the slowest balancer goes on sending to a pod that was told to leave.
LEARNS_AFTER_S = 8.0
NEW_PER_S = 20
KEPT_ALIVE = 20
ANSWERED_WITHIN_S = 5.0
POD = pod_of("Deployment/gateway", kind_objects())
GRACE_S = float(POD.spec["terminationGracePeriodSeconds"])


@pytest.fixture
async def stack(tmp_path: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Stack]:
    async with Stack(tmp_path / "stack", postgres_url=postgres_url, redis_url=redis_url) as stack:
        yield stack


def _shipped() -> dict[str, str]:
    """The times of the manifest; what it does not set is the default, for the stack has others."""
    shipped = environment(POD.containers[0], kind_objects())
    return {"TOWLINE_UNREADY_S": shipped.get("TOWLINE_UNREADY_S", "")}


class Caller:
    """Asks one gateway, and says how each request ended."""

    def __init__(self, api_key: str) -> None:
        self._request = (
            f"GET /v1/users/ada/presence HTTP/1.1\r\nHost: towline\r\nAuthorization: Bearer {api_key}\r\n\r\n"
        ).encode()

    async def connect(self, gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", gateway.port)

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Have one request answered with 200; returns whether the connection stays open.

        Raises:
            OSError, asyncio.IncompleteReadError: refused, reset, or closed without an answer.
            TimeoutError: it hangs.
        """
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            writer.write(self._request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        return b"connection: close" not in head


@pytest.mark.timeout(180)
async def test_no_request_is_lost_while_balancers_learn_late_that_a_gateway_leaves(stack: Stack) -> None:
    """It says at once that it is not ready, sends kept-alive clients away with their next answer, and serves on."""
    leaving, staying = await stack.add_gateway(_shipped()), await stack.add_gateway()
    caller = Caller(stack.api_key)
    failures: list[str] = []
    answered: Counter[str] = Counter()
    sent_away_at: list[float] = []
    told_at, over = 0.0, asyncio.Event()

    def gateway() -> Gateway:
        return staying if told_at and time.monotonic() > told_at + LEARNS_AFTER_S else leaving

    async def call_anew() -> None:
        target = gateway()
        try:
            reader, writer = await caller.connect(target)
            await caller.ask(reader, writer)
            writer.close()
            answered[f"new, {target.name}"] += 1
        except (OSError, EOFError) as error:
            failures.append(f"new connection, {time.monotonic() - told_at:.1f} s after SIGTERM: {error!r}")

    async def call_on_one_connection() -> None:
        target = gateway()
        reader, writer = await caller.connect(target)
        while not over.is_set():
            try:
                stays = await caller.ask(reader, writer)
                answered[f"kept alive, {target.name}"] += 1
                if not stays:
                    sent_away_at.append(time.monotonic())
                    writer.close()
                    target = gateway()
                    reader, writer = await caller.connect(target)
            except (OSError, EOFError) as error:
                failures.append(f"kept alive, {time.monotonic() - told_at:.1f} s after SIGTERM: {error!r}")
                return
            await asyncio.sleep(1 / 2)
        writer.close()

    async def call_anew_at_a_rate() -> None:
        async with asyncio.TaskGroup() as calls:
            while not over.is_set():
                calls.create_task(call_anew())
                await asyncio.sleep(1 / NEW_PER_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(call_anew_at_a_rate())
        for _ in range(KEPT_ALIVE):
            group.create_task(call_on_one_connection())
        await eventually(lambda: answered[f"kept alive, {leaving.name}"] >= 2 * KEPT_ALIVE)
        told_at = time.monotonic()
        leaving.term()
        await eventually(lambda: _is_unready(leaving), within_s=2)
        assert await leaving.wait(within_s=GRACE_S) == 0
        assert time.monotonic() - told_at > LEARNS_AFTER_S
        served = answered[f"new, {staying.name}"]
        await eventually(lambda: answered[f"new, {staying.name}"] > served)
        over.set()

    assert failures == []
    # Each was sent away by the first answer after the signal; those that came back to it, after each one.
    assert len(sent_away_at) >= KEPT_ALIVE
    assert min(sent_away_at) > told_at
    assert answered[f"new, {leaving.name}"] > LEARNS_AFTER_S * NEW_PER_S / 2


async def _is_unready(gateway: Gateway) -> bool:
    assert gateway.is_running
    return not await is_http_ready(gateway.admin_port)


@pytest.mark.timeout(120)
async def test_no_new_connection_hangs_while_a_gateway_leaves(stack: Stack) -> None:
    """Clients that keep it busy to the end of its budget do not leave others waiting at a door that is closing."""
    gateway = await stack.add_gateway({"TOWLINE_UNREADY_S": "1", "TOWLINE_DRAIN_S": "4", "TOWLINE_SSE_DRAIN_S": "2"})
    caller = Caller(stack.api_key)
    _, half_sent = await caller.connect(gateway)
    half_sent.write(
        f"POST /v1/stream-tokens HTTP/1.1\r\nHost: towline\r\nAuthorization: Bearer {stack.api_key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{".encode()
    )
    outcomes: Counter[str] = Counter()

    gateway.term()
    while gateway.is_running:
        try:
            async with asyncio.timeout(ANSWERED_WITHIN_S):
                reader, writer = await caller.connect(gateway)
                await caller.ask(reader, writer)
            writer.close()
            outcomes["served"] += 1
        except TimeoutError:
            outcomes["hung"] += 1
        except (OSError, EOFError):
            outcomes["refused"] += 1
        await asyncio.sleep(0.1)
    half_sent.close()

    assert gateway.returncode == 0
    assert outcomes["hung"] == 0
    assert outcomes["served"] >= 1
    assert outcomes["refused"] >= 10
