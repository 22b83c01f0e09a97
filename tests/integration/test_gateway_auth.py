"""Credentials at the door: who is let in, how far a key reaches, and how long a verdict is remembered."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from gateway_door import Door, open_door
from starlette.types import Message
from support import eventually

from common.store.tokens import ApiKey, Tokens
from gateway.auth import Auth
from gateway.problems import Refusal
from gateway.request import Request
from gateway.stream_tokens import StreamTokens
from harness.servers import Servers

JOB = {"name": "write", "if_offline": "queue"}


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway."""
    async with open_door(servers, postgres_url, state_directory / "auth") as opened:
        yield opened


async def mint(door: Door, scopes: Sequence[str], users: Sequence[str] | None = None) -> str:
    """An API key."""
    minted = await Tokens(door.postgres).add_api_key("test", scopes, users)
    assert minted is not None
    return minted[1]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer tlk"],
        ["Basic dXNlcjpwYXNz"],
        ["Bearer tlk_" + "x" * 43],
        ["Bearer tlk_" + "x" * 10_000],
        ["Bearer tlm_" + "x" * 43],
        ["Bearer \u00e9"],
        ["{good}", "{good}"],
    ],
)
async def test_without_a_good_key_nothing_is_answered(door: Door, values: list[str]) -> None:
    """401 with a challenge, and the value is nowhere in answer or log."""
    headers = [("authorization", value.format(good=f"Bearer {door.stack.api_key}").encode()) for value in values]
    async with httpx.AsyncClient(base_url=door.stack.gateways[0].url) as client:
        for method, path in (("GET", "/v1/users/a/presence"), ("POST", "/v1/users/a/jobs"), ("GET", "/v1/api-keys")):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["type"] == "/problems/unauthenticated"
            assert answer.headers["www-authenticate"].startswith('Bearer realm="towline"')
    log = door.stack.gateways[0].read_log()
    for value in (door.stack.api_key, "x" * 43, "dXNlcjpwYXNz"):
        assert value not in log


async def test_a_machine_token_opens_no_door(door: Door) -> None:
    """It is for a sidecar's handshake with a worker."""
    token = await door.stack.mint_machine_token("ada")
    async with door.client(key=token) as client:
        assert (await client.get("/v1/users/ada/presence")).status_code == 401


@pytest.mark.parametrize(
    ("scopes", "method", "path", "status"),
    [
        (["runs", "threads"], "GET", "/v1/users/a/presence", 403),
        (["admin"], "POST", "/v1/users/a/jobs", 403),
        (["admin"], "GET", "/v1/jobs/01890000-0000-7000-8000-000000000000", 403),
        (["jobs"], "GET", "/v1/api-keys", 403),
        (["jobs"], "POST", "/v1/api-keys", 403),
        (["jobs"], "DELETE", "/v1/api-keys/01890000-0000-7000-8000-000000000000", 403),
        (["admin"], "GET", "/v1/api-keys", 200),
        (["jobs"], "GET", "/v1/users/a/presence", 200),
    ],
)
async def test_a_scope_opens_what_it_names(door: Door, scopes: list[str], method: str, path: str, status: int) -> None:
    """The problem names the scope that is missing."""
    async with door.client(key=await mint(door, scopes)) as client:
        answer = await client.request(method, path, json={"name": "k", "scopes": ["admin"]})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["type"] == "/problems/insufficient-scope"
        assert "'admin'" in answer.json()["detail"] or "'jobs'" in answer.json()["detail"]


async def test_what_lies_outside_a_key_is_answered_like_what_does_not_exist(door: Door) -> None:
    """A key bound to one user learns nothing about another: every answer has the same bytes as for a name made up."""
    async with door.client() as all_users:
        job = (await all_users.post("/v1/users/other/jobs", json=JOB, headers={"idempotency-key": "k"})).json()["job"]
        token_id = (await all_users.post("/v1/users/other/machine-tokens", json={})).json()["token_id"]
    unknown = "01890000-0000-7000-8000-000000000000"
    bound = await mint(door, ["jobs"], ["mine"])

    async def answers(user: str, job: str, token_id: str) -> list[tuple[int, str]]:
        async with door.client(key=bound) as client:
            given = [
                await client.get(f"/v1/jobs/{job}"),
                await client.delete(f"/v1/jobs/{job}"),
                await client.post(f"/v1/users/{user}/jobs", json=JOB, headers={"idempotency-key": "k"}),
                await client.get(f"/v1/users/{user}/jobs"),
                await client.get(f"/v1/users/{user}/presence?probe=true"),
                await client.get(f"/v1/users/{user}/tools"),
                await client.post(f"/v1/users/{user}/machine-tokens", json={}),
                await client.get(f"/v1/users/{user}/machine-tokens"),
                await client.delete(f"/v1/users/{user}/machine-tokens/{token_id}"),
            ]
        return [(answer.status_code, answer.text) for answer in given]

    real = await answers("other", job, token_id)
    assert {status for status, _ in real} == {404}
    assert real == await answers("made-up", unknown, unknown)
    async with door.client(key=bound) as client:
        assert (await client.get("/v1/users/mine/presence")).status_code == 200
        # A token of another user is not reached through one's own name either.
        assert (await client.delete(f"/v1/users/mine/machine-tokens/{token_id}")).status_code == 404
    assert await door.rows("select state from requests where user_id = 'other'") == [("queued",)]
    assert await door.rows("select revoked_at from machine_tokens where user_id = 'other'") == [(None,)]


async def test_an_admin_key_that_is_bound_to_users_manages_no_keys(door: Door) -> None:
    """It could mint itself one that reaches everyone."""
    async with door.client(key=await mint(door, ["admin", "jobs"], ["mine"])) as client:
        answer = await client.post("/v1/api-keys", json={"name": "k", "scopes": ["jobs"]})
    assert answer.status_code == 403


async def test_keys_are_minted_listed_and_revoked(door: Door) -> None:
    """The value is shown once; a revoked key is refused everywhere within ten seconds; revoking again is no error."""
    async with door.client() as admin:
        minted = (await admin.post("/v1/api-keys", json={"name": "shop", "scopes": ["jobs"], "users": ["a"]})).json()
        value, key_id = minted.pop("api_key"), minted["key_id"]
        listed = (await admin.get("/v1/api-keys?limit=1")).json()
        assert listed["items"] == [minted]
        assert value not in (await admin.get("/v1/api-keys?limit=200")).text
        older = (await admin.get(f"/v1/api-keys?limit=1&cursor={listed['next_cursor']}")).json()
        assert older["items"][0]["key_id"] < key_id
        async with door.client(key=value) as client:
            assert (await client.get("/v1/users/a/presence")).status_code == 200
            revoked_at = time.monotonic()
            for _ in range(2):
                assert (await admin.delete(f"/v1/api-keys/{key_id}")).status_code == 204

            async def is_refused() -> bool:
                return (await client.get("/v1/users/a/presence")).status_code == 401

            await eventually(is_refused, within_s=15)
            assert time.monotonic() - revoked_at < 11


class CountedTokens(Tokens):
    """The real table, and how often it was asked."""

    asked = 0

    async def find_api_key(self, value: str) -> ApiKey | None:
        self.asked += 1
        return await super().find_api_key(value)


@pytest.mark.parametrize("is_good", [True, False])
async def test_verdicts_are_remembered(door: Door, is_good: bool) -> None:
    """A hundred calls with one key at once cost one look-up, good or bad, and more calls none."""
    tokens = CountedTokens(door.postgres)
    auth = Auth(tokens, StreamTokens(()))
    key = await mint(door, ["jobs"]) if is_good else "tlk_" + secrets.token_urlsafe(32)
    for _ in range(2):
        checks = (auth.require(_request(key), "jobs") for _ in range(100))
        verdicts = await asyncio.gather(*checks, return_exceptions=True)
        assert {type(verdict) for verdict in verdicts} == {ApiKey if is_good else Refusal}
    assert tokens.asked == 1


async def test_a_flood_of_wrong_keys_pushes_out_no_right_one(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and good verdicts are kept apart from bad ones."""
    monkeypatch.setattr("gateway.auth.VERDICTS_MAX", 5)
    tokens = CountedTokens(door.postgres)
    auth = Auth(tokens, StreamTokens(()))
    good = await mint(door, ["jobs"])
    await auth.require(_request(good), "jobs")
    for n in range(20):
        with pytest.raises(Refusal):
            await auth.require(_request(f"tlk_{n}"), "jobs")
    await auth.require(_request(good), "jobs")
    assert tokens.asked == 21
    assert len(auth._bad) == 5


def _request(key: str) -> Request:
    async def receive() -> Message:
        raise AssertionError("a credential is checked by the head alone")

    return Request([(b"authorization", f"Bearer {key}".encode())], receive, params={}, query={}, body_bytes_max=0)
