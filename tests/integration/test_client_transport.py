"""What the client repeats and what it does not, against a server that drops links and refuses like a load balancer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from towline import transport
from towline.client import ApiProblem, Client, GatewayUnreachable, InvalidRequest, outcome_of

DROP = None
JOB = {
    "job": "j1",
    "user": "alice",
    "name": "echo",
    "state": "queued",
    "attempts": 0,
    "accepted_at": "2026-01-02T03:04:05.000Z",
    "deadline_at": "2026-01-02T03:09:05.000Z",
    "replayed": False,
}
ENDED = {**JOB, "state": "completed", "ended_at": "2026-01-02T03:04:06.000Z", "outcome": {"result": 7}}
TOKEN = {"token_id": "t", "user": "alice", "name": "", "created_at": "", "expires_at": None, "revoked_at": None}


@dataclass
class Request:
    """One request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    def wait_s(self) -> int:
        return int(self.headers.get("prefer", "wait=0").removeprefix("wait="))


@dataclass
class Script:
    """Answers in order, the last one for ever; `DROP` closes the link without one."""

    answers: Sequence[bytes | None]
    requests: list[Request] = field(default_factory=list)
    links: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.links += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append(Request(method, target, headers, body))
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                if answer is DROP:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()


def answer(status: int, document: Any, headers: str = "") -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return f"HTTP/1.1 {status} Some Reason\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def refusal(status: int, slug: str, headers: str = "", **members: Any) -> bytes:
    document = {"type": f"/problems/{slug}", "title": "T", "status": status, "detail": "d", **members}
    return answer(status, document, headers)


@contextlib.asynccontextmanager
async def client_of(*answers: bytes | None, path: str = "") -> AsyncIterator[tuple[Client, Script]]:
    script = Script(answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}{path}", "tlk_secret", timeout_s=5) as client:
        yield client, script


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE_FIRST_S", 0.001)


async def test_a_submission_whose_link_broke_is_sent_again_with_its_key() -> None:
    """The first may have been accepted: only the same key makes the second one safe."""
    async with client_of(DROP, DROP, answer(202, JOB)) as (client, script):
        job = await client.submit("alice", "echo", {"value": "é"}, idempotency_key='order "17"')
    assert (job.job, job.terminal, outcome_of(job)) == ("j1", False, None)
    assert len(script.requests) == 3
    assert {(r.method, r.target, r.headers["idempotency-key"], r.body) for r in script.requests} == {
        ("POST", "/v1/users/alice/jobs", '"order \\"17\\""', script.requests[0].body)
    }
    assert json.loads(script.requests[0].body)["args"] == {"value": "é"}
    assert script.requests[0].headers["authorization"] == "Bearer tlk_secret"


@pytest.mark.parametrize("call", ["read_job", "cancel_job"])
async def test_reads_and_cancels_are_sent_again(call: str) -> None:
    async with client_of(DROP, answer(200, ENDED)) as (client, script):
        job = await getattr(client, call)("j1")
    assert outcome_of(job).result == 7
    assert len(script.requests) == 2


async def test_what_is_not_safe_to_repeat_is_sent_once() -> None:
    """A second mint makes a second token, which nobody knows of."""
    async with client_of(DROP, answer(201, {**TOKEN, "token": "tlm_x"})) as (client, script):
        with pytest.raises(GatewayUnreachable):
            await client.mint_machine_token("alice")
    assert len(script.requests) == 1


async def test_attempts_are_bounded() -> None:
    async with client_of(DROP) as (client, script):
        with pytest.raises(GatewayUnreachable, match="does not answer"):
            await client.read_job("j1")
    assert len(script.requests) == transport.ATTEMPTS_MAX


async def test_a_silent_server_is_not_asked_again() -> None:
    """It was waited for as long as the caller wanted: asking again would multiply that."""
    async with client_of(b"HTTP/1.1 200 OK\r\n") as (client, script):
        client._transport._timeout_s = 0.05
        with pytest.raises(GatewayUnreachable, match="ReadTimeout"):
            await client.read_job("j1")
    assert len(script.requests) == 1


async def test_a_503_that_says_when_is_waited_out() -> None:
    busy = refusal(503, "store-unavailable", "Retry-After: 0\r\n")
    async with client_of(busy, busy, answer(202, JOB)) as (client, script):
        await client.submit("alice", "echo", idempotency_key="k")
    assert len(script.requests) == 3


@pytest.mark.parametrize(
    ("refused", "retry_after_s"),
    [
        (refusal(503, "presence-unknown", "Retry-After: 20\r\n"), 20.0),  # longer than a caller would want to hang
        (refusal(503, "presence-unknown"), None),
        (refusal(429, "queue-full", "Retry-After: 1\r\n"), 1.0),  # full by the callers' own doing
        (refusal(409, "machine-offline"), None),
        (refusal(500, "internal"), None),
    ],
)
async def test_every_other_refusal_is_the_callers_at_once(refused: bytes, retry_after_s: float | None) -> None:
    async with client_of(refused) as (client, script):
        with pytest.raises(ApiProblem) as raised:
            await client.submit("alice", "echo", idempotency_key="k")
    assert raised.value.retry_after_s == retry_after_s
    assert len(script.requests) == 1


async def test_a_problem_is_read_whole() -> None:
    async with client_of(refusal(400, "bad-request", place="$.args", more=[1])) as (client, _):
        with pytest.raises(ApiProblem) as raised:
            await client.read_job("j1")
    problem = raised.value
    assert (problem.status, problem.slug, problem.title, problem.detail) == (400, "bad-request", "T", "d")
    assert problem.members == {"place": "$.args", "more": [1]}
    assert str(problem) == "bad-request (400): d"


@pytest.mark.parametrize("status", [302, 404, 502])
@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", b'{"type": 3}', b'"text"', b"\xff"])
async def test_a_proxys_own_page_is_a_problem_without_a_slug(status: int, body: bytes) -> None:
    async with client_of(answer(status, body, "Location: http://127.0.0.1:1/\r\n")) as (client, script):
        with pytest.raises(ApiProblem) as raised:
            await client.read_job("j1")
    assert (raised.value.status, raised.value.slug, raised.value.title) == (status, "", "Some Reason")
    assert len(script.requests) == 1


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"{}", b"[]", b'{"job": 3}'])
async def test_an_answer_of_something_else_is_no_answer(body: bytes) -> None:
    """The URL leads to some other site, which says 200 to everything."""
    async with client_of(answer(200, body)) as (client, _):
        with pytest.raises(GatewayUnreachable, match="not this API's"):
            await client.read_job("j1")


async def test_members_of_a_newer_gateway_are_ignored() -> None:
    async with client_of(answer(200, {**ENDED, "since_version_2": True})) as (client, _):
        assert (await client.read_job("j1")).terminal


async def test_calls_share_one_connection() -> None:
    async with client_of(answer(200, ENDED)) as (client, script):
        for _ in range(5):
            await client.read_job("j1")
    assert (len(script.requests), script.links) == (5, 1)


async def test_a_wait_goes_on_over_several_requests_until_the_job_ends() -> None:
    """A replica that drains answers early; what is asked for is only ever what is left of the wait."""
    replayed = {**JOB, "replayed": True, "payload_matches": False}
    async with client_of(answer(202, replayed), answer(200, JOB), answer(200, ENDED)) as (client, script):
        job = await client.submit("alice", "echo", idempotency_key="k", wait_s=120)
    assert (job.state, job.replayed, job.payload_matches) == ("completed", True, False)
    assert [(r.method, r.target) for r in script.requests] == [
        ("POST", "/v1/users/alice/jobs"),
        ("GET", "/v1/jobs/j1"),
        ("GET", "/v1/jobs/j1"),
    ]
    assert [r.wait_s() for r in script.requests] == [50, 50, 50]


async def test_a_wait_asks_only_for_what_is_left() -> None:
    async with client_of(DROP, answer(202, JOB)) as (client, script):
        job = await client.submit("alice", "echo", idempotency_key="k", wait_s=1.5)
    assert not job.terminal
    waits = [r.wait_s() for r in script.requests]
    assert waits[0] == 2
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] in (0, 1)  # 0: a last look after a pause that outlasted the wait


async def test_a_wait_ends_when_the_machine_goes_offline() -> None:
    """The job may take until its deadline now; the caller is told instead of being held."""
    async with client_of(answer(202, {**JOB, "machine": "offline"})) as (client, script):
        job = await client.submit("alice", "echo", idempotency_key="k", wait_s=60)
    assert job.machine == "offline"
    assert len(script.requests) == 1


async def test_an_api_below_a_path_is_reached() -> None:
    async with client_of(answer(200, ENDED), path="/towline/") as (client, script):
        await client.read_job("j1")
    assert script.requests[0].target == "/towline/v1/jobs/j1"


@pytest.mark.parametrize("user", ["", "..", "a/b", "a b", "-a", "a" * 201, "é", "a?b", "a%2Fb"])
async def test_ids_that_could_mean_another_path_are_not_sent(user: str) -> None:
    async with client_of(answer(200, ENDED)) as (client, script):
        for call in (client.submit(user, "echo", idempotency_key="k"), client.presence(user), client.read_job(user)):
            with pytest.raises(InvalidRequest, match=r"is no (user|job) id"):
                await call
    assert script.requests == []


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"a": float("nan")}, "args cannot be written"),
        ({"a": float("inf")}, "args cannot be written"),
        ({"a": object()}, "args cannot be written"),
        ({"a": 2**64}, r"integer beyond 64 bit at \$\.a"),
        ({"a": "\ud800"}, r"lone surrogate in text at \$\.a"),
        ({"a": "\x00"}, r"U\+0000 in text"),
        ({1: "a", "1": "b"}, "duplicate"),
    ],
)
async def test_arguments_that_json_cannot_carry_are_not_sent(args: dict[str, Any], reason: str) -> None:
    async with client_of(answer(202, JOB)) as (client, script):
        with pytest.raises(InvalidRequest, match=reason):
            await client.submit("alice", "echo", args, idempotency_key="k")
    assert script.requests == []


@pytest.mark.parametrize("key", ["", " ", "é", "a\nb", "k" * 256])
async def test_keys_that_no_header_carries_are_not_sent(key: str) -> None:
    async with client_of(answer(202, JOB)) as (client, script):
        with pytest.raises(InvalidRequest, match="Idempotency-Key"):
            await client.submit("alice", "echo", idempotency_key=key)
    assert script.requests == []


@pytest.mark.parametrize(
    ("url", "api_key"),
    [
        ("", "k"),
        ("ws://h", "k"),
        ("http://", "k"),
        ("h:80", "k"),
        ("http://user:password@h", "k"),
        ("http://h", ""),
        ("http://h", "k\n"),
        ("http://h", "ké"),
    ],
)
def test_a_client_that_could_never_work_is_not_made(url: str, api_key: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Client(url, api_key)
    assert "password@" not in str(raised.value)
