"""Bad input at the door: a clear problem that says which field and why, and nothing recorded."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_door import Door, open_door

from harness.servers import Servers
from towline.wire.frames import ARGS_BYTES_MAX

USER = "input"
PATH = f"/v1/users/{USER}/jobs"
GOOD = b'{"name": "write", "args": {}}'


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway."""
    async with open_door(servers, postgres_url, state_directory / "input") as opened:
        yield opened


def body(**members: Any) -> dict[str, Any]:
    return {"json": {"name": "write", **members}}


def raw(content: bytes, **headers: str) -> dict[str, Any]:
    return {"content": content, "headers": {"content-type": "application/json", **headers}}


BODIES: list[tuple[str, dict[str, Any], int, str]] = [
    ("not JSON", raw(b"{name: write}"), 400, "line 1"),
    ("empty", raw(b""), 400, "not JSON"),
    ("two documents", raw(GOOD + GOOD), 400, "not JSON"),
    ("not an object", raw(b"[]"), 400, "Expected `object`"),
    ("null", raw(b"null"), 400, "Expected `object`"),
    ("broken UTF-8", raw(b'{"name": "wri\xffte"}'), 400, "UTF-8"),
    ("byte order mark", raw(b"\xef\xbb\xbf" + GOOD), 400, "not JSON"),
    ("NaN", raw(b'{"name": "write", "args": {"x": [1, NaN]}}'), 400, "NaN is not JSON at $.args.x[1]"),
    ("Infinity", raw(b'{"name": "write", "args": {"x": -Infinity}}'), 400, "-Infinity is not JSON at $.args.x"),
    ("huge number", raw(b'{"name": "write", "args": {"x": 1e999}}'), 400, "$.args.x"),
    ("integer beyond 64 bit", raw(b'{"name": "write", "args": {"x": 18446744073709551616}}'), 400, "$.args.x"),
    ("endless integer", raw(b'{"name": "write", "args": {"x": ' + b"9" * 5000 + b"}}"), 400, "too large at $.args.x"),
    ("lone surrogate", raw(rb'{"name": "write", "args": {"x": "\ud800"}}'), 400, "$.args.x"),
    ("NUL in a value", raw(rb'{"name": "write", "args": {"rows": [1, "\u0000"]}}'), 400, "$.args.rows[1]"),
    ("NUL in a name", raw(rb'{"name": "write", "args": {"a\u0000b": 1}}'), 400, "U+0000"),
    ("duplicate member", raw(b'{"name": "write", "args": {"x": 1, "x": 2}}'), 400, "duplicate member at $.args.x"),
    (
        "nested too deeply",
        raw(b'{"name": "write", "args": {"x": ' + b"[" * 65 + b"]" * 65 + b"}}"),
        400,
        "deeper than 64",
    ),
    ("nested far too deeply", raw(b"[" * 100_000), 400, "deeper than 64"),
    ("no name", {"json": {"args": {}}}, 400, "`name`"),
    ("empty name", body(name=""), 400, "$.name"),
    ("long name", body(name="x" * 129), 400, "$.name"),
    ("name of a wrong type", body(name=7), 400, "$.name"),
    ("args not an object", body(args=[1]), 400, "$.args"),
    ("args null", body(args=None), 400, "$.args"),
    ("unknown member", body(timeout=3), 400, "unknown field `timeout` (known: name, args, timeout_s, "),
    ("timeout of a wrong type", body(timeout_s="3"), 400, "$.timeout_s"),
    ("timeout true", body(timeout_s=True), 400, "$.timeout_s"),
    ("timeout zero", body(timeout_s=0), 400, "$.timeout_s"),
    ("timeout over the limit", body(timeout_s=600.5), 400, "$.timeout_s"),
    ("deadline negative", body(deadline_s=-1), 400, "$.deadline_s"),
    ("deadline over the limit", body(deadline_s=86_401), 400, "$.deadline_s"),
    ("if_offline unknown", body(if_offline="maybe"), 400, "$.if_offline"),
    ("on_machine_change unknown", body(on_machine_change=""), 400, "$.on_machine_change"),
    ("no content type", {"content": GOOD}, 415, "Content-Type"),
    ("form", {"content": GOOD, "headers": {"content-type": "application/x-www-form-urlencoded"}}, 415, "Content-Type"),
    (
        "other charset",
        {"content": GOOD, "headers": {"content-type": "application/json; charset=latin-1"}},
        415,
        "UTF-8",
    ),
    ("compressed", raw(GOOD, **{"content-encoding": "gzip"}), 415, "Content-Encoding"),
    ("body too large", raw(b'{"name": "write", "args": {"x": "' + b"x" * 256 * 1024 + b'"}}'), 413, "262144 bytes"),
    # 1e15 is three characters longer once canonical: the limit on args counts what the machine is given.
    ("args too large", raw(b'{"name":"write","args":{"x":[' + b",".join([b"1e15"] * 50_000) + b"]}}"), 413, "`args`"),
    (
        "wait of a wrong form",
        {"content": GOOD, "headers": {"content-type": "application/json", "prefer": "wait=5s"}},
        400,
        "wait",
    ),
]


@pytest.mark.parametrize(("request_", "status", "names"), [row[1:] for row in BODIES], ids=[row[0] for row in BODIES])
async def test_a_bad_body_is_a_problem_that_names_the_place(
    door: Door, request_: dict[str, Any], status: int, names: str
) -> None:
    """Each is answered with its status and a detail for the caller; no record is made, and the key stays unused."""
    headers = {"idempotency-key": "bad", **request_.get("headers", {})}
    async with door.client() as client:
        answer = await client.post(PATH, **{**request_, "headers": headers})
    assert answer.status_code == status
    problem = problem_of(answer)
    assert names in problem["detail"]
    if "$" in names:
        assert problem["place"] == names[names.index("$") :]
    assert await door.count(USER) == 0


KEYS: list[tuple[str, list[tuple[str, bytes]]]] = [
    ("missing", []),
    ("empty", [("idempotency-key", b"")]),
    ("blank", [("idempotency-key", b"   ")]),
    ("quoted empty", [("idempotency-key", b'""')]),
    ("quoted blank", [("idempotency-key", b'" "')]),
    ("half quoted", [("idempotency-key", b'"abc')]),
    ("quote inside", [("idempotency-key", b'"a"c"')]),
    ("256 characters", [("idempotency-key", b"k" * 256)]),
    ("10 KB", [("idempotency-key", b"k" * 10_240)]),
    ("emoji", [("idempotency-key", "\U0001f511".encode())]),
    ("tab inside", [("idempotency-key", b"a\tb")]),
    ("given twice", [("idempotency-key", b"a"), ("idempotency-key", b"a")]),
]


@pytest.mark.parametrize("headers", [row[1] for row in KEYS], ids=[row[0] for row in KEYS])
async def test_an_odd_key_is_refused_and_never_shared(door: Door, headers: list[tuple[str, bytes]]) -> None:
    """One documented 400 for each form; an empty key is not everybody's key. On a raw socket: clients refuse some."""
    lines = b"".join(b"%b: %b\r\n" % (name.encode(), value) for name, value in headers)
    status, problem = await post_raw(door, lines, GOOD)
    assert status == 400
    assert problem["type"] == "/problems/invalid-idempotency-key"
    assert await door.count(USER) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [("plain", '"plain"'), ("k" * 255, "k" * 255), ('"a\\"b"', '"a\\"b"'), ("with space", '"with space"')],
)
async def test_a_quoted_and_a_bare_key_are_the_same_key(door: Door, first: str, second: str) -> None:
    """IETF draft and habit: structured-field string or bare value."""
    async with door.client() as client:
        jobs = []
        for key in (first, second):
            answer = await client.post(
                "/v1/users/keys/jobs",
                json={"name": "write", "if_offline": "queue"},
                headers={"idempotency-key": key},
            )
            assert answer.status_code == 202
            jobs.append(answer.json()["job"])
    assert jobs[0] == jobs[1]


PATHS: list[tuple[str, str, int, str]] = [
    ("GET", "/", 404, "not-found"),
    ("GET", "/v1/users//presence", 404, "not-found"),
    ("GET", "/v1/users/a/b/presence", 404, "not-found"),
    ("GET", "/v1/users/a%2Fb/presence", 404, "not-found"),
    ("GET", "/v1/users/%00/presence", 400, "invalid-request"),
    ("GET", "/v1/users/-a/presence", 400, "invalid-request"),
    ("GET", f"/v1/users/{'a' * 201}/presence", 400, "invalid-request"),
    ("GET", "/v1/users/a%0Ab/presence", 400, "invalid-request"),
    ("GET", "/v1/users/a/presence?probe=yes", 400, "invalid-request"),
    ("GET", "/v1/jobs/nothing", 404, "not-found"),
    ("GET", "/v1/jobs/%00", 404, "not-found"),
    ("GET", "/v1/jobs/01890000-0000-7000-8000-000000000000", 404, "not-found"),
    ("GET", "/v1/users/a/jobs?limit=0", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?limit=201", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?limit=%D9%A3", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?limit=1&limit=2", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?cursor=nonsense", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?cursor=%FF%00", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?state=done", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?idempotency_key=%00", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?idempotency_key=", 400, "invalid-request"),
    ("GET", "/v1/users/a/jobs?status=queued", 400, "invalid-request"),
    ("GET", "/openapi.json?pretty", 400, "invalid-request"),
    ("PUT", "/v1/users/a/jobs", 405, "method-not-allowed"),
    ("OPTIONS", "/v1/users/a/jobs", 405, "method-not-allowed"),
    ("DELETE", "/v1/users/a/machine-tokens/nothing", 404, "not-found"),
    ("DELETE", "/v1/api-keys/nothing", 404, "not-found"),
    ("GET", "/problems/nothing", 404, "not-found"),
]


@pytest.mark.parametrize(("method", "path", "status", "slug"), PATHS)
async def test_a_bad_path_or_query_is_a_problem(door: Door, method: str, path: str, status: int, slug: str) -> None:
    """Routing's own refusals are problems too."""
    async with door.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert problem_of(answer)["type"] == f"/problems/{slug}"
    assert (status == 405) == ("allow" in answer.headers)


@pytest.mark.parametrize(
    ("path", "members", "names"),
    [
        ("/v1/users/a/machine-tokens", {"ttl_s": 0}, "$.ttl_s"),
        ("/v1/users/a/machine-tokens", {"name": "x" * 201}, "$.name"),
        ("/v1/users/a/machine-tokens", {"expires": 1}, "expires"),
        ("/v1/api-keys", {"name": "k", "scopes": []}, "$.scopes"),
        ("/v1/api-keys", {"name": "k", "scopes": ["root"]}, "$.scopes[0]"),
        ("/v1/api-keys", {"name": "k", "scopes": ["jobs"], "users": []}, "$.users"),
        ("/v1/api-keys", {"name": "k", "scopes": ["jobs"], "users": ["a b"]}, "$.users[0]"),
    ],
)
async def test_bad_bodies_of_credentials_are_problems(
    door: Door, path: str, members: Mapping[str, Any], names: str
) -> None:
    """No half-made credential."""
    async with door.client() as client:
        before = len((await client.get("/v1/api-keys")).json()["items"])
        answer = await client.post(path, json=members)
        assert answer.status_code == 400
        assert names in problem_of(answer)["detail"]
        assert len((await client.get("/v1/api-keys")).json()["items"]) == before
        assert (await client.get("/v1/users/a/machine-tokens")).json()["items"] == []


@pytest.mark.parametrize("declares_length", [True, False], ids=["with Content-Length", "chunked"])
async def test_a_caller_who_sends_too_much_can_read_the_answer(door: Door, declares_length: bool) -> None:
    """The rest of the body is read before 413 is answered: a reset would hide it. A raw socket that reads only at the
    end, as many clients do.
    """
    size = 900 * 1024
    reader, writer = await asyncio.open_connection("127.0.0.1", door.stack.gateways[0].port)
    framing = f"Content-Length: {size}" if declares_length else "Transfer-Encoding: chunked"
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {door.stack.api_key}\r\nIdempotency-Key: big\r\n"
        f"Content-Type: application/json\r\n{framing}\r\n\r\n"
    )
    writer.write(head.encode())
    for _ in range(size // 65_536 + 1):
        chunk = b"x" * min(65_536, size)
        size -= len(chunk)
        writer.write(chunk if declares_length else b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
        await asyncio.sleep(0.002)  # a line slower than loopback: the gateway decides while the caller is still sending
    if not declares_length:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert await door.count(USER) == 0


async def test_a_limit_is_met_exactly(door: Door) -> None:
    """A body of exactly the limit passes, and its args come through whole."""
    filler = "x" * (256 * 1024 - len('{"name":"w","args":{"x":""},"if_offline":"queue"}'))
    content = f'{{"name":"w","args":{{"x":"{filler}"}},"if_offline":"queue"}}'.encode()
    assert len(content) == 256 * 1024 == ARGS_BYTES_MAX
    async with door.client() as client:
        answer = await client.post(
            "/v1/users/exact/jobs",
            content=content,
            headers={"content-type": "application/json; charset=utf-8", "idempotency-key": "exact"},
        )
    assert answer.status_code == 202
    assert await door.rows("select args from requests where user_id = 'exact'") == [(f'{{"x":"{filler}"}}',)]


async def test_every_problem_is_documented_where_its_type_says(door: Door) -> None:
    """No credential is needed to read it."""
    async with httpx.AsyncClient(base_url=door.stack.gateways[0].url) as client:
        problem = (await client.get("/v1/api-keys")).json()
        page = await client.get(problem["type"])
    assert page.status_code == 200
    assert "unauthenticated" in page.text


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1.2", True), ("x" * 129, False), ("a b", False), ('a"b', False), ("", False)]
)
async def test_every_response_has_a_request_id(door: Door, given: str, echoed: bool) -> None:
    """A well-formed one of the caller's is kept; anything else is replaced, never written to a log."""
    async with door.client() as client:
        answers = [
            await client.get(path, headers={"x-request-id": given})
            for path in ("/v1/api-keys", "/nowhere", "/openapi.json")
        ]
    for answer in answers:
        assert (answer.headers["x-request-id"] == given) is echoed
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("size", [70_000, 1], ids=["key over what a head may have", "no Host"])
async def test_what_never_reaches_the_gateway_is_a_problem_too(door: Door, size: int) -> None:
    """Refused by the server below it; documented at its address like every other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.stack.gateways[0].port)
    writer.write(f"POST {PATH} HTTP/1.1\r\nIdempotency-Key: {'k' * size}\r\n\r\n".encode())
    head, _, text = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 431 " if size > 1 else b"HTTP/1.1 400 ")
    assert b"\r\nx-request-id: " in head.lower()
    async with door.client() as client:
        page = await client.get(json.loads(text)["type"])
    assert page.status_code == 200
    assert await door.count(USER) == 0


async def post_raw(door: Door, header_lines: bytes, content: bytes) -> tuple[int, dict[str, Any]]:
    """Submit a job with headers as they are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.stack.gateways[0].port)
    writer.write(
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {door.stack.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n".encode()
        + header_lines
        + b"\r\n"
        + content
    )
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(text)


def problem_of(answer: httpx.Response) -> dict[str, Any]:
    """The answer as a problem."""
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["detail"]
    assert problem["type"].startswith("/problems/")
    return problem
