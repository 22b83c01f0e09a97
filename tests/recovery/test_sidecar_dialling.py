"""A server that refuses, redirects, closes or vanishes: how often the sidecar dials, and what ends it.

What must not happen: it dials for ever at full speed, it gives up what a new token or some patience would mend, many
machines come back in step, a close code leads it the wrong way. Dials are counted by a server that answers each as the
test says.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path

import pytest
from sidecar_hub import Hub
from sidecar_starts import Start, logged, open_sidecars
from support import eventually

from towline.sidecar.backoff import SHORT_SESSION_S
from towline.wire.frames import Close


class RawServer:
    """Answers each dial with the bytes of the test, and closes.

    Attributes:
        requests: what came, as text.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def raw_server(status: str, *headers: str, body: str = "") -> AsyncIterator[RawServer]:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", body]
    raw = RawServer("\r\n".join(lines).encode())
    async with await asyncio.start_server(raw.serve, "127.0.0.1", 0) as server:
        raw.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield raw


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def start(hub: Hub, tmp_path: Path) -> AsyncIterator[Start]:
    async with open_sidecars(hub.url, tmp_path) as starter:
        yield starter


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
async def test_a_refused_token_is_tried_three_times_and_replaced_without_a_restart(
    hub: Hub, tmp_path: Path, start: Start, status: str
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("old")
    async with raw_server(status, body="go away") as server, logged() as lines:
        sidecar = start(url=server.url, token_file=token)
        await eventually(lambda: [line for line in lines if line["event"] == "needs_token"])
        # Longer than the first pauses: there is no fourth try.
        await asyncio.sleep(2)
        assert len(server.requests) == 3
        # Refused again here, but it was asked at once, and without a restart.
        token.write_text("new")
        await eventually(lambda: any("Bearer new" in request for request in server.requests), 3)
        await sidecar.ended()


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        ("404 Not Found", (), ""),
        ("502 Bad Gateway", ("Content-Type: text/html",), "<html><h1>502 Bad Gateway</h1></html>"),
        ("500 Internal Server Error", (), "x" * 100_000),
        ("200 OK", ("Content-Type: text/html",), "<html>log in to the hotel's network</html>"),
        ("426 Upgrade Required", (), ""),
    ],
)
async def test_other_refusals_are_tried_again_with_growing_pauses(
    tmp_path: Path, start: Start, status: str, headers: tuple[str, ...], body: str
) -> None:
    """It never gives up, and comes back by itself when the server is well."""
    async with raw_server(status, *headers, body=body) as server:
        start(url=server.url)
        await eventually(lambda: len(server.requests) >= 3, 20)
        began, before = time.monotonic(), len(server.requests)
        await asyncio.sleep(3)
        # From the third try on the mean pause is four seconds and more.
        assert len(server.requests) - before <= 5, f"{time.monotonic() - began:.1f} s"


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_retry_after_as_a_date_is_read_by_the_servers_clock(start: Start, status: str) -> None:
    """Its clock is a year ahead of ours."""
    now = time.time() + 365 * 86_400
    dates = (f"Date: {formatdate(now, usegmt=True)}", f"Retry-After: {formatdate(now + 2, usegmt=True)}")
    async with raw_server(status, *dates) as server, logged() as lines:
        start(url=server.url)
        await eventually(lambda: len(server.requests) >= 2)
        pause = next(line["in_s"] for line in lines if line["event"] == "reconnecting")
        assert 1 <= pause <= 3.5


@pytest.mark.parametrize(
    "status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"]
)
async def test_the_token_does_not_follow_a_redirect(start: Start, status: str) -> None:
    """Neither to another host nor from wss down to ws."""
    async with raw_server("101 Switching Protocols") as other:
        async with raw_server(status, f"Location: {other.url}/v1/bridge") as server:
            start(url=server.url)
            await eventually(lambda: len(server.requests) >= 2)
        assert other.requests == []


async def test_a_server_that_talks_nonsense_or_nothing_is_left(start: Start) -> None:
    async with raw_server("101 Switching Protocols", "Upgrade: websocket") as server, logged() as lines:
        start(url=server.url)
        await eventually(lambda: [line for line in lines if line["event"] == "cannot_connect"])
        assert "secret" not in str(lines)


SOON, LATER, STAND_BY, STOPS, TOKEN = "soon", "later", "stands by", "stops", "needs a token"
CODES = {
    1000: SOON,
    1001: SOON,
    1002: SOON,
    1011: SOON,
    Close.RESTARTING: SOON,
    Close.TRY_LATER: LATER,
    Close.NO_PONG: SOON,
    Close.TOO_SLOW: SOON,
    4499: SOON,
    Close.OTHER_MACHINE: STAND_BY,
    Close.TOKEN_REFUSED: TOKEN,
    Close.BAD_FRAME: STOPS,
    Close.BAD_VERSION: STOPS,
    Close.REPLACED: STOPS,
    4999: STOPS,
}


async def test_each_close_code_steers_as_it_says(hub: Hub, tmp_path: Path) -> None:
    """Every code, at once, each to a machine of its own; dials are counted for ten seconds: nobody storms.

    The server closes as soon as it was greeted, as one does that is broken or does not want us.
    """
    async with contextlib.AsyncExitStack() as stack:
        hubs = {}
        for code in CODES:
            hubs[code] = await stack.enter_async_context(Hub())
            hubs[code].close_at_hello = (code, "try again in 6 s")
            start = await stack.enter_async_context(open_sidecars(hubs[code].url, tmp_path / str(code)))
            start()
        await eventually(lambda: all(each.handshakes for each in hubs.values()), 30)
        last = max(each.handshakes[0] for each in hubs.values())
        await asyncio.sleep(last + 10 - time.monotonic())
        for code, steering in CODES.items():
            dials = [at - hubs[code].handshakes[0] for at in hubs[code].handshakes]
            dials = [at for at in dials if at <= 10]
            match steering:
                case "soon":
                    assert 2 <= len(dials) <= 4, (code, dials)
                    assert dials[1] <= 2, (code, dials)
                case "later":
                    assert len(dials) <= 3, (code, dials)
                    assert all(at >= 5 for at in dials[1:]), (code, dials)
                case "stands by":
                    assert len(dials) == 2, (code, dials)
                    assert 6 <= dials[1] <= 8, (code, dials)
                case _:
                    assert len(dials) == 1, (code, dials)


async def test_a_dropped_line_is_dialled_at_once_and_then_ever_more_slowly(hub: Hub, start: Start) -> None:
    """A server that welcomes and breaks the line each time: five sessions take well over ten seconds."""
    start()
    for number in range(1, 5):
        await (await hub.session(number, within_s=30)).drop()
    await hub.session(5, within_s=40)
    first, second, *_, last = hub.handshakes
    assert second - first < 2
    assert last - first > 2 + 4 + 8, "half a pause at the least, each twice the one before"


async def test_machines_do_not_come_back_in_step(tmp_path: Path) -> None:
    """Forty sidecars of one server that restarts: their first dials are spread over the whole second."""
    async with contextlib.AsyncExitStack() as stack:
        hub = await stack.enter_async_context(Hub())
        for number in range(40):
            start = await stack.enter_async_context(open_sidecars(hub.url, tmp_path / str(number)))
            start()
        await hub.session(40, within_s=60)
        # The last one, too, was welcomed long enough ago to count as a session.
        await asyncio.sleep(SHORT_SESSION_S + 0.5)
        closed_at = time.monotonic()
        for session in hub.sessions[:]:
            await session.socket.close(1012, "restarting")
        await hub.session(80, within_s=20)
        dials = sorted(at - closed_at for at in hub.handshakes[40:])
        assert dials[-1] < 4, dials
        spread_s = dials[35] - dials[4]
        assert spread_s > 0.4, f"all but ten of them within {spread_s:.2f} s"
