"""Stream tokens: what they open, what they do not, and that nobody reads them in a log."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_door import Door, open_door
from gateway_streams import Browser, PlayedRun, Watcher

from common.ids import RunId, ThreadId, new_id
from gateway.stream_tokens import PREFIX, TOKEN_CHARACTERS_MAX, StreamTokens
from gateway.topics import of_run, of_thread
from harness.servers import Servers
from towline.wire.runs import STREAM_RUNS_MAX, STREAM_THREADS_MAX

ORIGIN = "https://app.example.com"
OLD_KEY, KEY, FOREIGN_KEY = ("o" * 32, "n" * 32, "f" * 32)


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """A gateway in the middle of a change of keys, which one origin may call from browsers."""
    env = {
        "TOWLINE_TOKEN_KEYS": f"{KEY},{OLD_KEY}",
        "TOWLINE_CORS_ORIGINS": ORIGIN,
        "TOWLINE_LOG_LEVEL": "debug",
    }
    async with open_door(servers, postgres_url, state_directory / "tokens", env=env) as opened:
        yield opened


@pytest.fixture
async def run(door: Door) -> PlayedRun:
    """A run with one event."""
    played = await (await PlayedRun(door).put()).begin()
    await played.add(1)
    return played


async def mint(door: Door, *runs: str, **body: object) -> str:
    async with door.client() as client:
        answer = await client.post("/v1/stream-tokens", json={"runs": list(runs), **body})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return str(answer.json()["token"])


@pytest.mark.parametrize("place", ["header", "query"])
async def test_a_token_opens_its_stream(door: Door, run: PlayedRun, place: str) -> None:
    """By header, or in the query where an EventSource can send no header."""
    token = await mint(door, run.run)
    async with door.client(key=token if place == "header" else "none") as client:
        params = {} if place == "header" else {"access_token": token}
        if place == "query":
            del client.headers["authorization"]
        async with Watcher(client, f"/v1/runs/{run.run}/events", params=params) as watcher:
            assert await watcher.has(1) == ["coder 1"]


async def test_a_token_opens_nothing_else(door: Door, run: PlayedRun) -> None:
    """Other runs, more runs, and everything that is no stream: not found, or no credential."""
    other = await PlayedRun(door).put()
    token = await mint(door, run.run)
    async with door.client(key=token) as client:
        assert (await client.get(f"/v1/runs/{other.run}/events")).status_code == 404
        assert (await client.get("/v1/events", params={"runs": f"{run.run},{other.run}"})).status_code == 404
        for method, path in [
            ("GET", f"/v1/runs/{run.run}"),
            ("DELETE", f"/v1/runs/{run.run}"),
            ("GET", "/v1/runs"),
            ("POST", "/v1/stream-tokens"),
            ("GET", "/v1/users/someone/presence"),
            ("GET", "/v1/api-keys"),
        ]:
            assert (await client.request(method, path)).status_code == 401, path


async def test_a_token_may_name_several_runs_and_ones_to_come(door: Door, run: PlayedRun) -> None:
    """A page is given its token before the run is put; each of the runs may be read alone, or all together."""
    later = PlayedRun(door)
    token = await mint(door, run.run, later.run)
    async with door.client(key=token) as client:
        assert (await client.get(f"/v1/runs/{later.run}/events")).status_code == 404
        await (await later.put()).begin()
        await later.add(7)
        async with Watcher(client, "/v1/events", params={"runs": f"{run.run},{later.run}"}) as watcher:
            assert sorted(await watcher.has(2)) == ["coder 1", "coder 7"]


@pytest.mark.parametrize(
    "broken", ["old key", "foreign key", "expired", "changed", "cut", "long", "empty", "api key", "not ascii"]
)
async def test_what_is_no_valid_token_is_refused(door: Door, run: PlayedRun, broken: str) -> None:
    """Signed by a key that is still known: good. Anything else: 401, before it is looked at whether the run exists."""
    in_a_minute = int(time.time() * 1000) + 60_000
    good = StreamTokens([KEY]).mint([of_run(run.run)], in_a_minute)
    token = {
        "old key": StreamTokens([OLD_KEY]).mint([of_run(run.run)], in_a_minute),
        "foreign key": StreamTokens([FOREIGN_KEY]).mint([of_run(run.run)], in_a_minute),
        "expired": StreamTokens([KEY]).mint([of_run(run.run)], in_a_minute - 61_000),
        "changed": good[:10] + ("A" if good[10] != "A" else "B") + good[11:],
        "cut": good[:-5],
        "long": PREFIX + "A" * TOKEN_CHARACTERS_MAX,
        "empty": "",
        "api key": door.stack.api_key,
        "not ascii": good + "\u00e9",
    }[broken]
    async with door.client() as client:
        del client.headers["authorization"]
        url = f"/v1/runs/{run.run}/events"
        if broken == "old key":
            async with Watcher(client, url, params={"access_token": token}) as watcher:
                assert await watcher.has(1) == ["coder 1"]
            return
        answer = await client.get(url, params={"access_token": token})
        assert (answer.status_code, answer.json()["type"]) == (401, "/problems/unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_two_credentials_are_none(door: Door, run: PlayedRun) -> None:
    """Which of them was meant is not guessed."""
    async with door.client() as client:
        answer = await client.get(f"/v1/runs/{run.run}/events", params={"access_token": await mint(door, run.run)})
    assert answer.status_code == 400


def test_a_token_for_the_most_and_longest_names_is_not_too_long() -> None:
    """What can be minted can be used."""
    opens = [of_run(RunId(f"{n:02}" + "x" * 198)) for n in range(STREAM_RUNS_MAX)]
    opens += [of_thread(ThreadId(new_id())) for _ in range(STREAM_THREADS_MAX)]
    tokens = StreamTokens([KEY])
    token = tokens.mint(opens, 2**43)
    assert len(token) <= TOKEN_CHARACTERS_MAX
    assert tokens.verify(token, 0) == frozenset(opens)
    assert tokens.verify(token, 2**43) is None


async def test_keys_bound_to_users_mint_none_and_read_none(door: Door, run: PlayedRun) -> None:
    """Runs belong to no user, so they are beyond such a key."""
    async with door.client() as client:
        body = {"name": "bound", "scopes": ["runs"], "users": ["someone"]}
        bound = (await client.post("/v1/api-keys", json=body)).json()["api_key"]
        unfit = (await client.post("/v1/api-keys", json={"name": "jobs", "scopes": ["jobs"]})).json()["api_key"]
    for key in (bound, unfit):
        async with door.client(key=key) as client:
            assert (await client.post("/v1/stream-tokens", json={"runs": [run.run]})).status_code == 403
            assert (await client.get(f"/v1/runs/{run.run}/events")).status_code == 403
            assert (await client.get(f"/v1/runs/{run.run}")).status_code == 403


async def test_a_browser_of_another_origin_may_read(door: Door, run: PlayedRun) -> None:
    """What EventSource needs on the stream itself, and the preflight of a fetch that sends an id."""
    token = await mint(door, run.run)
    url = f"/v1/runs/{run.run}/events"
    async with door.client() as client:
        del client.headers["authorization"]
        async with Watcher(client, url, params={"access_token": token}) as watcher:
            assert "access-control-allow-origin" not in watcher.response.headers
        client.headers["origin"] = ORIGIN
        async with Watcher(client, url, params={"access_token": token}) as watcher:
            assert watcher.response.headers["access-control-allow-origin"] == ORIGIN
        preflight = {"access-control-request-method": "GET", "access-control-request-headers": "last-event-id"}
        answer = await client.options(url, headers=preflight)
        assert answer.status_code == 200
        assert "last-event-id" in answer.headers["access-control-allow-headers"]


async def test_tokens_are_in_no_log(door: Door, run: PlayedRun) -> None:
    """Neither a good one nor a bad one, wherever it was sent."""
    token = await mint(door, run.run)
    async with Browser(door) as browser:
        del browser.client.headers["authorization"]
        async with browser.watch(run.run, access_token=token) as watcher:
            await watcher.has(1)
        await browser.client.get(f"/v1/runs/{run.run}/events", params={"access_token": token[:-1], "odd": "1"})
        await browser.client.get(f"/v1/runs/{run.run}/nothing", params={"access_token": token})
    log = door.stack.gateways[0].read_log()
    assert token.removeprefix(PREFIX)[:30] not in log


async def test_without_keys_there_are_no_tokens(door: Door, run: PlayedRun) -> None:
    """An installation that was not given keys says so."""
    gateway = await door.add_gateway({"TOWLINE_TOKEN_KEYS": ""})
    try:
        async with door.client(gateway) as client:
            answer = await client.post("/v1/stream-tokens", json={"runs": [run.run]})
            assert (answer.status_code, answer.json()["type"]) == (501, "/problems/not-configured")
            del client.headers["authorization"]
            answer = await client.get(f"/v1/runs/{run.run}/events", params={"access_token": await mint(door, run.run)})
            assert answer.status_code == 401
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
