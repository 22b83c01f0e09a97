"""A tailer that has left: what is due by time is no business of its any more."""

import asyncio
import contextlib

import httpx
from prometheus_client import CollectorRegistry

from common.ids import RunId
from common.store.leases import Point
from common.store.runs import Source
from relay.gathering import Budget, Gathering
from relay.health import Pulse
from relay.metrics import RelayMetrics
from relay.resume import Resume
from relay.tailer import Tailer

IDLE_TIMEOUT_S = 30.0


class _Silence(httpx.AsyncByteStream):
    """A body of which nothing comes."""

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        await asyncio.Event().wait()
        yield b""


def _tailer(http: httpx.AsyncClient, budget: Budget) -> Tailer:
    url = "http://upstream/stream"
    return Tailer(
        RunId("run-1"),
        Source("coder", url, None, "ids", IDLE_TIMEOUT_S, Point(), None, None, None),
        {},
        resume=Resume("ids", frozenset({"result"})),
        pulse=Pulse(0.0, 0.0),
        progress_types=frozenset(),
        gathering=Gathering(budget),
        http=http,
        metrics=RelayMetrics(CollectorRegistry()),
    )


async def test_a_beat_after_it_has_left_does_nothing() -> None:
    """The log refuses a run: its tasks are cancelled, and the relay's beat finds it once more before it is let go.

    Just then the source is due for its idle timeout. An error here would end the beats, and so the relay.
    """
    asked = asyncio.Event()

    def answer(_: httpx.Request) -> httpx.Response:
        asked.set()
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=_Silence())

    budget = Budget()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        tailer = _tailer(http, budget)
        following = asyncio.create_task(tailer.run())
        await asked.wait()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        tailer.beat(asyncio.get_running_loop().time() + 2 * IDLE_TIMEOUT_S)
    assert tailer.end is None
    assert budget.events == 0, "nobody is there to append it"


async def test_a_beat_ends_a_silent_source() -> None:
    """The same moment in a tailer that is there."""
    asked = asyncio.Event()

    def answer(_: httpx.Request) -> httpx.Response:
        asked.set()
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=_Silence())

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        tailer = _tailer(http, Budget())
        following = asyncio.create_task(tailer.run())
        await asked.wait()
        tailer.beat(asyncio.get_running_loop().time() + 2 * IDLE_TIMEOUT_S)
        await following
    assert tailer.end is not None
    assert tailer.end.reason == "idle-timeout"
