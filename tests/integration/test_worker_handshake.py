"""The door of the worker: what is refused before the upgrade, and what is refused as a hello."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from bridge import Bridge, Peer, hello
from job_stores import new_user
from support import eventually
from websockets.asyncio.client import connect
from websockets.datastructures import HeadersLike
from websockets.exceptions import ConnectionClosed, InvalidStatus

from common.ids import UserId, new_id
from gateway.problems import KINDS
from towline.wire import frames


async def refused(url: str, *, headers: HeadersLike, subprotocols: list[str] | None = None) -> Any:
    """The response of a handshake that must be refused."""
    subprotocols = [frames.SUBPROTOCOL] if subprotocols is None else subprotocols
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, additional_headers=headers, subprotocols=subprotocols or None, proxy=None):  # type: ignore[arg-type]
            pass
    response = caught.value.response
    problem = json.loads(response.body)
    assert response.headers.get_all("Content-Type") == ["application/problem+json"]
    assert problem["status"] == response.status_code
    assert problem.keys() == {"type", "title", "status", "detail"}
    assert (f"/problems/{slug(response)}", KINDS[slug(response)].title) == (problem["type"], problem["title"])
    return response


def slug(response: Any) -> str:
    return str(json.loads(response.body)["type"].removeprefix("/problems/"))


@pytest.mark.parametrize(
    ("case", "status", "problem"),
    [
        ("no token", 401, "unauthorized"),
        ("basic", 401, "unauthorized"),
        ("empty", 401, "unauthorized"),
        ("unknown", 401, "unauthorized"),
        ("revoked", 401, "unauthorized"),
        ("expired", 401, "unauthorized"),
        ("api key", 401, "unauthorized"),
        ("in the query", 401, "unauthorized"),
        ("twice", 401, "unauthorized"),
        ("path", 404, "not-found"),
        ("subprotocol", 400, "bad-subprotocol"),
        ("no subprotocol", 400, "bad-subprotocol"),
    ],
)
async def test_a_handshake_is_refused_with_a_status_and_a_problem(
    bridge: Bridge, user: UserId, case: str, status: int, problem: str
) -> None:
    """Before the upgrade; and the user's machine that is connected does not notice."""
    row, value = await bridge.tokens.add_machine_token(user, "test", None)
    peer = await bridge.machine(user, token=value)
    epoch = (await bridge.held(user).presence())["epoch"]
    path, offered = frames.PATH, [frames.SUBPROTOCOL]
    headers: HeadersLike = {"Authorization": f"Bearer {value}"}
    match case:
        case "no token" | "in the query":
            headers = {}
            path += f"?access_token={value}" if case == "in the query" else ""
        case "basic":
            headers = {"Authorization": f"Basic {value}"}
        case "empty":
            headers = {"Authorization": "Bearer "}
        case "unknown":
            headers = {"Authorization": f"Bearer {value}x"}
        case "revoked":
            other, value = await bridge.tokens.add_machine_token(user, "other", None)
            await bridge.tokens.revoke_machine_token(user, other.token_id)
            headers = {"Authorization": f"Bearer {value}"}
        case "expired":
            headers = {"Authorization": f"Bearer {await bridge.token(user, ttl_s=0)}"}
        case "api key":
            headers = {"Authorization": f"Bearer {bridge.stack.api_key}"}
        case "twice":
            headers = [("Authorization", f"Bearer {value}")] * 2
        case "path":
            path = "/v1/bridges"
        case "subprotocol":
            offered = ["towline.v9"]
        case "no subprotocol":
            offered = []
    response = await refused(f"{bridge.worker.bridge_url}{path}", headers=headers, subprotocols=offered)
    assert (response.status_code, slug(response)) == (status, problem)
    assert ("WWW-Authenticate" in response.headers) == (status == 401)
    assert value not in response.body.decode()
    assert (await bridge.held(user).presence())["epoch"] == epoch
    await bridge.fence(user, peer)
    assert row.token_id


async def answer(bridge: Bridge, said: str) -> tuple[str, str]:
    """Head and body of what is answered to these bytes, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bridge.worker.port)
    writer.write(said.encode())
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, body


@pytest.mark.parametrize("case", ["no upgrade", "path", "handshake"])
async def test_bytes_behind_a_request_do_not_cost_it_its_answer(bridge: Bridge, user: UserId, case: str) -> None:
    """Nor are they worth a line in the log; and no session begins on half of what was sent."""
    path = "/nope" if case == "path" else frames.PATH
    lines = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {await bridge.token(user)}"]
    lines.append(f"Sec-WebSocket-Protocol: {frames.SUBPROTOCOL}")
    if case == "handshake":
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        lines.append("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    head, body = await answer(bridge, "\r\n".join([*lines, "", "GET /sent-by-me HTTP/1.1\r\nHost: x\r\n\r\n"]))
    status = {"no upgrade": 426, "path": 404, "handshake": 400}[case]
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert json.loads(body)["type"] == ("/problems/not-found" if case == "path" else "/problems/bad-handshake")
    log = bridge.worker.read_log()
    assert "sent-by-me" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("path_bytes", "header_bytes", "headers", "status"),
    [(8192, 8192, 128, 404), (8193, 100, 3, 414), (100, 8193, 3, 431), (100, 100, 129, 431)],
    ids=["all there may be", "path", "header", "headers"],
)
async def test_a_head_may_be_as_long_as_its_problem_says(
    bridge: Bridge, path_bytes: int, header_bytes: int, headers: int, status: int
) -> None:
    """What is longer is refused by the library below, in its own words."""
    first = "GET /" + "p" * (path_bytes - len("GET / HTTP/1.1\r\n")) + " HTTP/1.1\r\n"
    header = "X: " + "h" * (header_bytes - len("X: \r\n")) + "\r\n"
    head, _ = await answer(bridge, first + header + "X: y\r\n" * (headers - 1) + "\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert ("text/plain" in head) == (status != 404)
    assert "128 headers" in KINDS["headers-too-large"].meaning
    assert "8 KiB a line" in KINDS["headers-too-large"].meaning


async def test_a_token_is_taken_in_any_case_of_its_scheme_and_among_other_subprotocols(
    bridge: Bridge, user: UserId
) -> None:
    """As RFC 9110 and 6455 have it."""
    async with connect(
        f"{bridge.worker.bridge_url}{frames.PATH}?from=here",
        additional_headers={"Authorization": f"bearer {await bridge.token(user)}"},
        subprotocols=["towline.v2", frames.SUBPROTOCOL],  # type: ignore[list-item]
        proxy=None,
    ) as socket:
        assert socket.subprotocol == frames.SUBPROTOCOL
        assert "Sec-WebSocket-Extensions" not in socket.response.headers  # type: ignore[union-attr]


async def test_credentials_are_not_logged(bridge: Bridge, user: UserId) -> None:
    """Neither good ones nor bad ones, in the header or in the query."""
    good, bad = await bridge.token(user), f"tlm_{new_id()}"
    await bridge.machine(user, token=good)
    await refused(
        f"{bridge.worker.bridge_url}{frames.PATH}?access_token={bad}", headers={"Authorization": f"Bearer {bad}"}
    )
    log = bridge.worker.read_log()
    assert user in log
    assert good not in log
    assert bad not in log


HELLO = {"type": "hello", "machine": "m", "journal": "j"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\x00\x01", "a binary frame"),
        ("{", "not JSON"),
        ("[]", "Expected `object`"),
        ('{"type":"ping"}', "first frame must be hello"),
        ('{"type":"novelty"}', "first frame must be hello"),
        ('{"type":"hello","machine":"m"}', "journal"),
        (json.dumps({**HELLO, "machine": "a b"}), "must be ids"),
        (json.dumps({**HELLO, "journal": ""}), "must be ids"),
        (json.dumps({**HELLO, "machine": "m" * 201}), "must be ids"),
        (json.dumps({**HELLO, "tools": [{"name": f"t{n}"} for n in range(257)]}), "at most 256"),
        (json.dumps({**HELLO, "tools": [{"name": "t"}, {"name": "t"}]}), "each once"),
        (json.dumps({**HELLO, "tools": [{"name": "a b"}]}), "tool names must be ids"),
        (json.dumps({**HELLO, "tools": [{"name": 1}]}), "$.tools[0].name"),
        (json.dumps({**HELLO, "running": ["x"]}), "running"),
        (json.dumps({**HELLO, "running": [new_id() for _ in range(65)]}), "at most 64"),
        (json.dumps({**HELLO, "ü" * 40: {"ü" * 40: float("nan")}}), "NaN"),
        (
            json.dumps({**HELLO, "tools": [{"name": "t", "input_schema": {"ü" * 40: {"ü" * 40: {"ü" * 40: 2**70}}}}]}),
            "integer beyond 64 bit at $.tools[0].input_schema.üüü",
        ),
    ],
)
async def test_a_bad_hello_is_answered_with_4501_and_the_reason(
    bridge: Bridge, user: UserId, said: str | bytes, reason: str
) -> None:
    """Which field and why, as far as a close frame has room; nobody becomes present."""
    peer = await bridge.dial(await bridge.token(user))
    await peer.send(said)
    code, told = await peer.closed()
    assert (code, reason in (told or "")) == (4501, True), told
    assert await bridge.held(user).exist() == set()


@pytest.mark.parametrize(
    "members",
    [
        {"name": "a\x00b", "version": "\x00"},
        {"tools": [{"name": "t", "description": "a\x00b", "input_schema": {"\x00": "\x00"}}]},
        {"name": "\ud800", "tools": [{"name": "t", "description": "\udfff"}]},
        {"name": "ü" * 10_000, "novelty": [1, {"x": None}]},
    ],
)
async def test_odd_text_in_a_hello_is_mended_and_welcome(bridge: Bridge, user: UserId, members: dict[str, Any]) -> None:
    """What Postgres does not take must not cost a machine its connection."""
    peer = await bridge.dial(await bridge.token(user))
    await peer.send(json.dumps({**HELLO, **members}))
    await peer.next(frames.Welcome)
    catalogue = await bridge.tokens.catalogue(user)
    assert catalogue is not None
    assert "\x00" not in catalogue.name
    assert "\\u0000" not in catalogue.tools


async def test_a_hello_larger_than_a_frame_may_be_closes_the_socket(bridge: Bridge, user: UserId) -> None:
    """1009 is the protocol's own code for it."""
    peer = await bridge.dial(await bridge.token(user))
    with contextlib.suppress(ConnectionClosed):
        await peer.send(json.dumps({**HELLO, "name": "x" * frames.FRAME_BYTES_MAX}))
    assert (await peer.closed())[0] == 1009


async def test_a_large_catalogue_is_welcome(bridge: Bridge, user: UserId) -> None:
    """As many tools as there may be, with long descriptions."""
    tools = [frames.Tool(f"tool-{n}", "x" * 3000) for n in range(frames.TOOLS_MAX)]
    await bridge.machine(user, tools=tools)
    assert len(await bridge.held(user).tools()) == frames.TOOLS_MAX


async def test_a_second_hello_is_a_bad_frame(bridge: Bridge, user: UserId) -> None:
    """A session has one machine from beginning to end."""
    peer = await bridge.machine(user)
    async with bridge.counts_close("bad_frame"):
        await peer.send(hello(machine="another"))
        assert await peer.closed() == (4501, "a second hello")


async def test_a_machine_that_says_nothing_is_cut_off(brisk_bridge: Bridge, user: UserId) -> None:
    """After the handshake timeout, with the reason; it is to dial again, for a lid may have been closed just then."""
    peer = await brisk_bridge.dial(await brisk_bridge.token(user))
    assert await peer.closed() == (4001, "no hello in time")


async def test_a_connection_that_says_nothing_is_cut_off(brisk_bridge: Bridge) -> None:
    """Not even a request line, or half of one."""
    for said in (b"", b"GET /v1/bridge HTTP/1.1\r\nHost:"):
        reader, writer = await asyncio.open_connection("127.0.0.1", brisk_bridge.worker.port)
        writer.write(said)
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()


async def test_a_full_worker_sends_machines_elsewhere(brisk_bridge: Bridge) -> None:
    """503 with Retry-After; a place that was left is free again."""
    bridge = brisk_bridge
    await eventually(lambda: _is_empty(bridge))
    peers = [await bridge.machine(new_user()) for _ in range(12)]
    headers = {"Authorization": f"Bearer {await bridge.token(new_user())}"}
    url = f"{bridge.worker.bridge_url}{frames.PATH}"
    response = await refused(url, headers=headers)
    assert (response.status_code, slug(response)) == (503, "too-many-sockets")
    assert int(response.headers["Retry-After"]) > 0
    await peers[0].goodbye()
    peers.append(await eventually(lambda: _a_place(bridge)))
    for peer in peers:
        await peer.stop()
    await eventually(lambda: _is_empty(bridge))


async def _a_place(bridge: Bridge) -> Peer | None:
    """A machine that was welcomed; None when the worker is full."""
    try:
        return await bridge.machine(new_user())
    except InvalidStatus:
        return None


async def _is_empty(bridge: Bridge) -> bool:
    return await bridge.metric("towline_bridge_sockets") == 0


async def test_handshakes_that_break_off_leave_no_place_taken(brisk_bridge: Bridge) -> None:
    """A request with a good token that is no WebSocket handshake after all, or whose client goes away at once."""
    bridge = brisk_bridge
    await eventually(lambda: _is_empty(bridge))
    token = await bridge.token(new_user())

    head = f"GET {frames.PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    head += f"Sec-WebSocket-Protocol: {frames.SUBPROTOCOL}\r\n"
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
    for number in range(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", bridge.worker.port)
        match number % 3:
            case 0:
                writer.write(f"{head}\r\n".encode())
            case 1:
                writer.write(f"{head}{upgrade}Sec-WebSocket-Version: 12\r\nSec-WebSocket-Key: no-key\r\n\r\n".encode())
            case 2:
                key = "dGhlIHNhbXBsZSBub25jZQ=="
                writer.write(f"{head}{upgrade}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        if number % 3 != 2:
            async with asyncio.timeout(10):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 426" if number % 3 == 0 else b"HTTP/1.1 400")
            assert b'"/problems/bad-handshake"' in answer
            assert b"content-type: application/problem+json" in answer.lower()
            assert b"no-key" not in answer  # nothing of what was sent is repeated
        writer.close()
    peer = await eventually(lambda: _a_place(bridge))
    await peer.goodbye()
