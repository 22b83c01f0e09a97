"""Runs over HTTP: put, read, list, stop; what is refused; and that secrets stay secret."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_stores import new_run
from gateway_door import Door, open_door
from gateway_streams import SOURCE, PlayedRun
from http2_connection import Http2Connection
from support import eventually

from common.process.secrets import Secrets, new_key
from common.store.leases import Held
from harness.servers import Servers
from harness.stack import Gateway
from towline.wire import json

KEY = new_key()


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway that may keep headers."""
    async with open_door(servers, postgres_url, state_directory / "runs", env={"TOWLINE_SECRET_KEYS": KEY}) as opened:
        yield opened


@pytest.fixture
async def client(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    async with door.client() as opened:
        yield opened


def body(**changes: Any) -> dict[str, Any]:
    return {"sources": [SOURCE | changes]}


async def test_a_run_is_put_once_and_read(client: httpx.AsyncClient) -> None:
    """Created; the same again; then read: every default is shown, and that nobody follows it yet."""
    run = new_run()
    first = await client.put(f"/v1/runs/{run}", json=body())
    assert (first.status_code, first.headers["location"]) == (201, f"/v1/runs/{run}")
    again = await client.put(f"/v1/runs/{run}", json=body())
    assert again.status_code == 200
    read = (await client.get(f"/v1/runs/{run}")).json()
    assert again.json() == read
    created_at = read.pop("created_at")
    assert created_at == first.json()["created_at"]
    (source,) = read.pop("sources")
    assert read == {
        "run": run,
        "state": "active",
        "reason": None,
        "owner": None,
        "ended_at": None,
        "progress_types": ["output", "result", "assistant", "tool_result"],
        "terminal_types": ["result"],
        "stall_after_s": 900.0,
        "max_duration_s": 86_400.0,
    }
    assert source == {
        **SOURCE,
        "idle_timeout_s": 1800.0,
        "connected": False,
        "live_at": None,
        "progress_at": None,
        "verdict": "unknown",
        "failure": None,
        "state": None,
        "reason": None,
        "detail": None,
    }


async def test_another_body_is_refused_and_changes_nothing(client: httpx.AsyncClient) -> None:
    """A run is what it was put as."""
    run = new_run()
    await client.put(f"/v1/runs/{run}", json=body())
    for other in (body(resume="live"), {**body(), "stall_after_s": 5}, {"sources": [SOURCE, SOURCE | {"source": "b"}]}):
        answer = await client.put(f"/v1/runs/{run}", json=other)
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/run-differs")
    assert (await client.put(f"/v1/runs/{run}", json=body())).status_code == 200


async def test_concurrent_puts_make_one_run(client: httpx.AsyncClient) -> None:
    """One is told that it was created, the others that it is the same."""
    run = new_run()
    answers = await asyncio.gather(*(client.put(f"/v1/runs/{run}", json=body()) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]


async def test_an_ended_id_is_used_up(door: Door, client: httpx.AsyncClient) -> None:
    """Neither put again nor stopped again; DELETE of what has ended is no error."""
    run = await PlayedRun(door).put()
    await run.runs.end(run.run, "completed", "all-sources-ended", 0)
    answer = await client.put(f"/v1/runs/{run.run}", json=body())
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/run-ended")
    answer = await client.delete(f"/v1/runs/{run.run}")
    assert (answer.status_code, answer.json()["state"]) == (200, "completed")


async def test_stopping_is_asked_for_and_told(door: Door, client: httpx.AsyncClient) -> None:
    """202 until its relay has ended it; the relays hear of it at once."""
    heard: list[str | None] = []
    run = await PlayedRun(door).put()
    listening = asyncio.create_task(run.runs.run_listener(heard.append))
    await eventually(lambda: heard)
    for _ in range(2):
        answer = await client.delete(f"/v1/runs/{run.run}")
        assert (answer.status_code, answer.json()["state"]) == (202, "stopping")
        assert answer.headers["location"] == f"/v1/runs/{run.run}"
    await eventually(lambda: run.run in heard)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert (await client.delete("/v1/runs/nobody")).status_code == 404
    assert (await client.get("/v1/runs/nobody")).status_code == 404


async def test_what_its_relay_says_is_shown(door: Door, client: httpx.AsyncClient) -> None:
    """Owner, connection, both heartbeats and the verdict of each source; no connection where nobody is."""
    run = await (await PlayedRun(door).put()).begin()
    said = {"connected": True, "live_ms": 1_790_000_000_123, "progress_ms": 1_790_000_000_001, "verdict": "stalled"}
    held = Held(run.run, run.writer.tail.epoch, run.writer.tail, True, json.dumps({"coder": said}))
    assert await run.relay.leases.refresh([held]) == ["kept"]
    shown = (await client.get(f"/v1/runs/{run.run}")).json()
    assert shown["owner"] == "relay-a"
    source = shown["sources"][0]
    assert (source["connected"], source["verdict"]) == (True, "stalled")
    assert source["live_at"].endswith(".123Z")
    assert source["progress_at"].endswith(".001Z")
    await run.relay.release(run.writer)
    shown = (await client.get(f"/v1/runs/{run.run}")).json()
    assert (shown["owner"], shown["sources"][0]["connected"]) == (None, False)


async def test_a_source_that_was_never_reached_says_why(door: Door, client: httpx.AsyncClient) -> None:
    """Nothing was heard of it, so there is no verdict yet, and no time that would look like a sign of life."""
    run = await (await PlayedRun(door).put()).begin()
    said = {"connected": False, "live_ms": None, "progress_ms": None, "verdict": "active", "failure": "refused"}
    held = Held(run.run, run.writer.tail.epoch, run.writer.tail, False, json.dumps({"coder": said}))
    assert await run.relay.leases.refresh([held]) == ["kept"]
    source = (await client.get(f"/v1/runs/{run.run}")).json()["sources"][0]
    assert (source["connected"], source["verdict"], source["failure"]) == (False, "unknown", "refused")
    assert (source["live_at"], source["progress_at"]) == (None, None)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "https://10.0.0.1:8443/events",
        "http://10.0.0.1/",
        "ftp://127.0.0.1/",
        "http://user:pw@127.0.0.1/",
        "not a url",
        "http://[::1]/",
    ],
)
async def test_a_url_that_may_not_be_called_is_refused(client: httpx.AsyncClient, url: str) -> None:
    """Before anything is recorded, with the place."""
    run = new_run()
    answer = await client.put(f"/v1/runs/{run}", json={"sources": [SOURCE, {**SOURCE, "source": "b", "url": url}]})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/egress-refused")
    assert answer.json()["place"] == "$.sources[1].url"
    assert (await client.get(f"/v1/runs/{run}")).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"sources": []},
        {"sources": [SOURCE, SOURCE]},
        {"sources": [SOURCE | {"source": "a b"}]},
        {"sources": [SOURCE | {"resume": "never"}]},
        {"sources": [{k: v for k, v in SOURCE.items() if k != "resume"}]},
        {"sources": [SOURCE | {"idle_timeout_s": 0}]},
        {"sources": [SOURCE | {"extra": 1}]},
        {"sources": [SOURCE | {"headers": {"a b": "x"}}]},
        {"sources": [SOURCE | {"headers": {"x": "a\r\nb: c"}}]},
        {"sources": [SOURCE | {"headers": {"Last-Event-ID": "7"}}]},
        {"sources": [SOURCE | {"headers": {"HOST": "elsewhere"}}]},
        {"sources": [SOURCE], "stall_after_s": -1},
        {"sources": [SOURCE], "terminal_types": [""]},
        {"sources": [SOURCE] * 21},
    ],
    ids=lambda wrong: str(wrong)[:60],
)
async def test_a_wrong_body_is_refused(client: httpx.AsyncClient, wrong: dict[str, Any]) -> None:
    """And nothing is recorded."""
    run = new_run()
    answer = await client.put(f"/v1/runs/{run}", json=wrong)
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-request")
    assert (await client.get(f"/v1/runs/{run}")).status_code == 404


async def test_headers_are_encrypted_never_shown_and_the_newest_count(door: Door, client: httpx.AsyncClient) -> None:
    """Another token makes no other run; in the table, in answers and in the log there is none of them."""
    run = new_run()
    for status, secret in ((201, "s3cr3t-one"), (200, "s3cr3t-two")):
        answer = await client.put(f"/v1/runs/{run}", json=body(headers={"Authorization": f"Bearer {secret}"}))
        assert (answer.status_code, "s3cr3t" in answer.text) == (status, False)
    (row,) = await door.rows("select secrets from run_sources where run = %s", run)
    assert b"s3cr3t" not in row.secrets
    assert Secrets([KEY]).decrypt(row.secrets) == {"Authorization": "Bearer s3cr3t-two"}
    assert "s3cr3t" not in (await client.get(f"/v1/runs/{run}")).text
    answer = await client.put(f"/v1/runs/{run}", json=body(headers={"X": "s3cr3t\u00e9"}))
    assert (answer.status_code, "s3cr3t" in answer.text) == (400, False)
    assert "s3cr3t" not in door.stack.gateways[0].read_log()


async def test_lists_go_page_by_page(door: Door, client: httpx.AsyncClient) -> None:
    """Newest first, each run once, by state."""
    runs = [(await PlayedRun(door).put()).run for _ in range(5)]
    for run in runs[:3]:
        await client.delete(f"/v1/runs/{run}")
    found: list[str] = []
    params: dict[str, str] = {"limit": "2", "state": "stopping"}
    while True:
        page = (await client.get("/v1/runs", params=params)).json()
        found += [item["run"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert [run for run in found if run in runs] == runs[2::-1]
    assert len(set(found)) == len(found)
    for wrong in ({"state": "odd"}, {"cursor": "odd"}, {"limit": "0"}):
        assert (await client.get("/v1/runs", params=wrong)).status_code == 400


async def test_many_streams_share_one_connection_over_http_2(door: Door, state_directory: Path) -> None:
    """With a certificate browsers get HTTP/2: a dozen streams on one connection, where HTTP/1.1 allows them six."""
    cert, key = state_directory / "cert.pem", state_directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)  # noqa: ASYNC221 (milliseconds, once)
    async with _gateway_with_tls(door, cert, key) as gateway, Http2Connection(gateway.port, cert) as connection:
        assert connection.protocol == "h2"
        runs = [await (await PlayedRun(door).put()).begin() for _ in range(12)]
        headers = {"authorization": f"Bearer {door.stack.api_key}"}
        streams = [connection.get(f"/v1/runs/{run.run}/events", headers) for run in runs]
        await eventually(lambda: [connection.statuses.get(stream) for stream in streams] == [200] * 12)
        for run in runs:
            await run.add(1)
        await eventually(lambda: all(b"coder 1" in connection.bodies.get(stream, b"") for stream in streams))
        assert not connection.ended
        for run in runs:
            await run.end()
        await eventually(lambda: connection.ended == set(streams))
        assert all(b"event: towline.end" in connection.bodies[stream] for stream in streams)


@contextlib.asynccontextmanager
async def _gateway_with_tls(door: Door, cert: Path, key: Path) -> AsyncIterator[Gateway]:
    gateway = await door.stack.add_gateway({"TOWLINE_TLS_CERT_FILE": str(cert), "TOWLINE_TLS_KEY_FILE": str(key)})
    try:
        yield gateway
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
