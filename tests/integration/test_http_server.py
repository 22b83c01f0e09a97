"""The HTTP server over real sockets, with clients that behave badly."""

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import h2.settings
import pytest
from http2_connection import Http2Connection
from plain_http import AT_ONCE_S, DEADLINE_S, HOST, get, open_request, read_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from support import eventually

from common.process import http_server
from common.process.http_server import Tls, open_listener, serve


class Server:
    """An application under `serve`, which counts what becomes of its requests."""

    def __init__(self, *, budget_s: float, tls: Tls | None = None) -> None:
        self.listener = open_listener(HOST, 0)
        self.port = self.listener.getsockname()[1]
        self.stop = asyncio.Event()
        self.closing = asyncio.Event()
        self.release = asyncio.Event()
        self.open = 0
        self.handled = 0  # requests to which the application has begun to answer
        self.cancelled = 0
        self.scope_types: set[str] = set()
        handlers = {
            "/ok": self._ok,
            "/slow": self._slow,
            "/part": self._part,
            "/stream": self._stream,
            "/flood": self._flood,
        }
        self._app = Starlette(routes=[Route(path, handler) for path, handler in handlers.items()])
        self._budget_s = budget_s
        self._tls = tls

    async def run(self) -> float:
        """Serve to the end; returns when that was (monotonic seconds)."""
        await serve(
            self._counted,
            self.listener,
            stop=self.stop,
            budget_s=self._budget_s,
            closing=self.closing,
            tls=self._tls,
        )
        return time.monotonic()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            self.handled += message["type"] == "http.response.start"
            await send(message)

        self.scope_types.add(scope["type"])
        self.open += 1
        try:
            await self._app(scope, receive, send_counted)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _ok(self, _request: Request) -> Response:
        return PlainTextResponse("ok")

    async def _slow(self, _request: Request) -> Response:
        await self.release.wait()
        return PlainTextResponse("slow")

    async def _part(self, request: Request) -> Response:
        await self.release.wait()
        return PlainTextResponse(b"part: " + await anext(request.stream()))

    async def _stream(self, _request: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            yield "data: first\n\n"
            await self.release.wait()
            yield "data: last\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _flood(self, _request: Request) -> Response:
        async def bytes_for_ever() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65536

        return StreamingResponse(bytes_for_ever())


@contextlib.asynccontextmanager
async def serving(*, budget_s: float, tls: Tls | None = None) -> AsyncIterator[tuple[Server, "asyncio.Task[float]"]]:
    server = Server(budget_s=budget_s, tls=tls)
    task = asyncio.create_task(server.run())
    try:
        yield server, task
    finally:
        server.release.set()
        server.stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({task})


async def stopped_within(server: Server, task: "asyncio.Task[float]") -> float:
    """Stop the server; returns how long it took (seconds)."""
    began = time.monotonic()
    server.stop.set()
    async with asyncio.timeout(DEADLINE_S):
        return await task - began


# ---- the end


async def test_stop_does_not_wait_for_streams_that_never_end() -> None:
    """Neither an open stream, nor a request without an answer, nor an idle or half-sent connection holds it up."""
    async with serving(budget_s=0.1) as (server, task):
        clients = [await open_request(server.port, path) for path in ("/stream", "/stream", "/slow", "/flood", "/ok")]
        clients.append(await asyncio.open_connection(HOST, server.port))
        half = await asyncio.open_connection(HOST, server.port)
        half[1].write(b"GET /ok HTTP/1.1\r\nHo")
        await eventually(lambda: server.open == 4)

        assert await stopped_within(server, task) < AT_ONCE_S

        assert (server.open, server.cancelled) == (0, 4)
        # The one that does not read has unsent bytes, for which Hypercorn would still be waiting.
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "hypercorn"]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, server.port)
        for _, writer in [*clients, half]:
            writer.close()


async def test_streams_that_end_by_themselves_end_whole_and_at_once() -> None:
    async with serving(budget_s=10) as (server, task):
        reader, writer = await open_request(server.port, "/stream")
        await read_until(reader, b"data: first\n\n")

        server.release.set()
        assert await stopped_within(server, task) < AT_ONCE_S

        rest = await reader.read()
        assert b"data: last\n\n" in rest
        assert rest.endswith(b"0\r\n\r\n")  # the end of a chunked body, not a cut
        assert server.cancelled == 0
        assert server.scope_types == {"http"}  # no lifespan: Hypercorn would end it at a moment of its own
        writer.close()


async def test_an_open_request_is_answered_within_the_budget() -> None:
    async with serving(budget_s=10) as (server, task):
        reader, writer = await open_request(server.port, "/slow")
        await eventually(lambda: server.open == 1)
        server.stop.set()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.1)

        server.release.set()

        assert (await read_until(reader, b"slow")).startswith(b"HTTP/1.1 200")
        writer.close()
        async with asyncio.timeout(DEADLINE_S):
            await task


# ---- HTTP/2


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    files = tmp_path_factory.mktemp("tls")
    cert, key = str(files / "cert.pem"), str(files / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return Tls(cert, key)


class RudeHttp2(Http2Connection):
    """Sends what no library would, and takes nothing of any stream before it says so."""

    def __init__(self, server: Server, tls: Tls, *, window: int = 65535) -> None:
        super().__init__(server.port, Path(tls.cert_file))
        self._h2.config.validate_outbound_headers = self._h2.config.normalize_outbound_headers = False
        self._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )

    def send(self, method: str, path: str | None, headers: dict[str, str] | None = None, *, end: bool = True) -> int:
        stream = self._h2.get_next_available_stream_id()
        head = {":method": method, ":authority": "localhost"}
        if path is not None:
            head |= {":scheme": "https", ":path": path}
        self._h2.send_headers(stream, list({**head, **(headers or {})}.items()), end_stream=end)
        self._flush()
        return stream

    async def send_body(self, stream: int, data: bytes) -> None:
        """Within what the server takes."""
        for start in range(0, len(data), 10_000):
            await eventually(lambda: self._h2.local_flow_control_window(stream) >= 10_000)
            self._h2.send_data(stream, data[start : start + 10_000])
            self._flush()

    def take(self, stream: int) -> None:
        self._h2.increment_flow_control_window(1000, stream)
        self._flush()

    async def has_ended(self, stream: int) -> None:
        await eventually(lambda: stream in self.ended)


async def test_a_connection_of_http_2_serves_any_number_of_requests(tls: Tls) -> None:
    """A browser has one for everything, and keeps it for days; the streams on it go on, too."""
    async with (
        serving(budget_s=10, tls=tls) as (server, _task),
        Http2Connection(server.port, Path(tls.cert_file)) as connection,
    ):
        stream = connection.get("/stream", {})
        await eventually(lambda: b"first" in connection.bodies.get(stream, b""))
        for _ in range(1100):
            request = connection.get("/ok", {})
            await eventually(lambda request=request: request in connection.ended)
        server.release.set()
        await eventually(lambda: stream in connection.ended)
        assert b"data: last" in connection.bodies[stream]


async def test_a_body_that_comes_after_the_answer_harms_no_other_stream(tls: Tls) -> None:
    """Nor does it use up what the connection may send: more than its window comes here."""
    async with serving(budget_s=10, tls=tls) as (server, _task), RudeHttp2(server, tls) as connection:
        slow = connection.send("GET", "/slow")
        for _ in range(3):
            refused = connection.send("POST", "/ok", end=False)
            await connection.has_ended(refused)
            assert connection.statuses[refused] == 405
            await connection.send_body(refused, b"x" * 40_000)
        server.release.set()
        await connection.has_ended(slow)
        assert connection.bodies[slow] == b"slow"


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("CONNECT", "/ok", {":protocol": "websocket", "sec-websocket-version": "8"}),
        ("CONNECT", None, {}),
        ("G\u00e9T", "/ok", {}),
        ("GET", "/sent-by-\u00e9", {}),
    ],
    ids=["handshake", "connect", "method", "path"],
)
async def test_what_is_no_request_over_http_2_is_refused_and_harms_no_other_stream(
    tls: Tls, method: str, path: str | None, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor where its client does not take the answer."""
    async with serving(budget_s=10, tls=tls) as (server, _task), RudeHttp2(server, tls, window=0) as connection:
        refused = connection.send(method, path, headers)
        await eventually(lambda: connection.statuses.get(refused) == 400)
        request = connection.send("GET", "/ok")
        connection.take(request)
        await connection.has_ended(request)
        assert refused not in connection.ended
        connection.take(refused)
        await connection.has_ended(refused)
        problem = json.loads(connection.bodies[refused])
        assert (problem["type"], problem["status"]) == ("/problems/malformed-request", 400)
    assert not [record for record in caplog.records if record.name.startswith(("hypercorn", "asyncio"))]


async def test_clients_of_http_2_that_leave_without_reading_leave_nothing_behind(tls: Tls) -> None:
    async with serving(budget_s=10, tls=tls) as (server, _task):
        async with RudeHttp2(server, tls) as connection:
            await connection.has_ended(connection.send("GET", "/ok"))
        before = asyncio.all_tasks()
        for _ in range(3):
            async with RudeHttp2(server, tls, window=0) as connection:
                streams = [connection.send("GET", "/ok"), connection.send("GET", "/stream")]
                streams.append(connection.send("CONNECT", "/ok", {":protocol": "websocket"}))
                for stream in streams:
                    await eventually(lambda stream=stream: stream in connection.statuses)
        await eventually(lambda: server.open == 0 and asyncio.all_tasks() <= before)


# ---- what is no request, or no more than that


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (
            b"GET /ok HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
            b"200",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"404"),
    ],
    ids=["upgrade", "preface"],
)
async def test_a_clear_connection_never_turns_into_http_2(request_head: bytes, status: bytes) -> None:
    """A proxy in front passes on one request; what came inside of HTTP/2 after it would go by all that it checks."""
    async with serving(budget_s=1.0) as (server, task):
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(request_head)
        head = await read_until(reader, b"\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        writer.close()
        await stopped_within(server, task)


UNREADABLE: list[tuple[str, bytes, int, str]] = [
    ("no host", b"GET /ok HTTP/1.1\r\n\r\n", 400, "malformed-request"),
    ("garbage", b"\x16\x03\x01\xff sent-by-me\r\n\r\n", 400, "malformed-request"),
    ("length", b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: -7\r\n\r\n", 400, "malformed-request"),
    ("chunk", b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n", 400, "malformed-request"),
    ("coding", b"POST /ok HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "malformed-request"),
    ("header", b"GET /ok HTTP/1.1\r\nHost: x\r\nX-Key: " + b"k" * 70_000, 431, "headers-too-large"),
    ("path", b"GET /" + b"p" * 70_000, 431, "headers-too-large"),
    (
        "handshake",
        b"GET /ok HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: sent-by-me\r\n\r\n",
        400,
        "malformed-request",
    ),
]


@pytest.mark.parametrize(
    ("said", "status", "slug"), [row[1:] for row in UNREADABLE], ids=[row[0] for row in UNREADABLE]
)
async def test_what_is_no_request_is_refused_with_a_problem_and_an_id(
    said: bytes, status: int, slug: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It reaches no application, and nothing of it is repeated; the connection ends."""
    async with serving(budget_s=1) as (server, _task):
        ids = set()
        for _ in range(2):
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(said)
            async with asyncio.timeout(DEADLINE_S):
                head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            writer.close()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
            assert head.startswith(f"HTTP/1.1 {status} ")
            assert headers["content-type"] == "application/problem+json"
            problem = json.loads(body)
            assert (problem["type"], problem["status"]) == (f"/problems/{slug}", status)
            assert problem["title"]
            assert problem["detail"]
            assert "sent-by-me" not in head + body
            ids.add(headers["x-request-id"])
        assert len(ids) == 2
        server.release.set()
    assert not [record for record in caplog.records if record.name.startswith("hypercorn")]


@pytest.mark.parametrize(
    ("path", "parts", "statuses"),
    [("/nope", 30, {404}), ("/part", 30, {200}), ("/slow", 10, {200, 400})],  # as it is seen that there is no end
    ids=["none of it is read", "some is read", "the client leaves"],
)
async def test_a_body_that_nobody_reads_holds_no_connection(path: str, parts: int, statuses: set[int]) -> None:
    """In more parts than are kept for the application, or in as many and without its end."""
    async with serving(budget_s=10) as (server, _task):
        await get(server.port, "/ok")
        before = asyncio.all_tasks()
        reader, writer = await open_request(server.port, path, "Transfer-Encoding: chunked")
        writer.write(b"1\r\nx\r\n" * parts)
        if path == "/slow":
            writer.write_eof()
            await eventually(lambda: server.open == 1)
        server.release.set()
        async with asyncio.timeout(DEADLINE_S):
            assert int((await reader.read()).split()[1]) in statuses
        await eventually(lambda: asyncio.all_tasks() <= before)
        writer.close()


async def test_a_client_that_has_said_all_it_has_to_say_is_served() -> None:
    """It has ended its side of the connection, and waits for the answer on the other."""
    async with serving(budget_s=10) as (server, _task):
        reader, writer = await open_request(server.port, "/part", "Content-Length: 4")
        writer.write(b"said")
        writer.write_eof()
        await eventually(lambda: server.open == 1)
        server.release.set()
        assert (await read_until(reader, b"part: said")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_refusal_before_the_body_has_come_leaves_the_connection_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client sends the head first and the body in another packet, as most do, and then asks for something else."""
    monkeypatch.setattr(http_server, "UNWANTED_S", DEADLINE_S)
    monkeypatch.setattr(http_server, "UNWANTED_PAUSE_S", DEADLINE_S)
    async with serving(budget_s=10) as (server, _task):
        reader, writer = await open_request(server.port, "/ok", "Content-Length: 8", method="POST")
        await eventually(lambda: server.handled == 1)
        writer.write(b"the body")
        assert (await read_until(reader, b"Method Not Allowed")).startswith(b"HTTP/1.1 405")
        writer.write(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_until(reader, b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.close()


ENDLESS = b"40000\r\n" + b"x" * 0x40000 + b"\r\n"


@pytest.mark.parametrize(
    ("method", "framing", "body", "total_s", "pause_s"),
    [
        ("POST", "Content-Length: 8", b"", DEADLINE_S, 0.05),
        ("POST", "Transfer-Encoding: chunked", ENDLESS * 6, DEADLINE_S, DEADLINE_S),
        ("POST", "Transfer-Encoding: chunked", ENDLESS, 0.05, DEADLINE_S),
        ("GET", "Content-Length: 8", b"", DEADLINE_S, DEADLINE_S),
    ],
    ids=["it does not come", "it is too much", "it takes too long", "it is a GET's"],
)
async def test_a_refusal_whose_body_is_not_waited_for_closes_the_connection(
    method: str, framing: str, body: bytes, total_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so: else its client would send the next request into it."""
    monkeypatch.setattr(http_server, "UNWANTED_S", total_s)
    monkeypatch.setattr(http_server, "UNWANTED_PAUSE_S", pause_s)
    async with serving(budget_s=10) as (server, _task):
        reader, writer = await open_request(server.port, "/nope", framing, method=method)
        writer.write(body)
        async with asyncio.timeout(AT_ONCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        assert b"connection: close" in head.lower()
        await eventually(lambda: server.open == 0)
        writer.close()


async def test_cancelling_the_server_ends_it_too() -> None:
    """A sibling in the service's task group failed: everything has to go."""
    async with serving(budget_s=3600) as (server, task):
        _, writer = await open_request(server.port, "/stream")
        await eventually(lambda: server.open == 1)

        task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({task})

        assert task.cancelled()
        assert (server.open, server.cancelled) == (0, 1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, server.port)
        writer.close()


async def test_kept_alive_clients_are_told_to_move_on() -> None:
    """Once closing, an answer says so and the connection ends after it, while the door is still open."""
    async with serving(budget_s=1) as (server, _task):
        reader, writer = await open_request(server.port, "/ok")
        assert b"connection: close" not in await read_until(reader, b"ok")

        server.closing.set()
        writer.write(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n")

        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()  # to the end of the connection
        assert b"connection: close" in answer.lower()
        writer.close()


# ---- the listener


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux gives dead peers up by this option")
async def test_a_client_that_never_reads_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the application that is a client that left, not an error."""
    monkeypatch.setattr(http_server, "DEAD_PEER_TIMEOUT_MS", 1000)
    async with serving(budget_s=1) as (server, _task):
        with socket.create_connection((HOST, server.port)) as client:
            client.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
            await eventually(lambda: server.open == 1)
            await eventually(lambda: server.open == 0)
    assert not [record for record in caplog.records if record.name.startswith("hypercorn")]


async def test_connections_are_queued_before_the_server_runs() -> None:
    """READY is announced when the listener is open; a request that comes right then must not be refused."""
    with open_listener(HOST, 0) as listener:
        _, writer = await asyncio.open_connection(HOST, listener.getsockname()[1])
        writer.close()


def test_a_taken_port_is_named() -> None:
    with open_listener(HOST, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            open_listener(HOST, port)
