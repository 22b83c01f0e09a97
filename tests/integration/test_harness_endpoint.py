"""The stand-in endpoint: it answers who signed, counts by turn, and fails in exactly the way it was told to."""

import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support import eventually

from harness.endpoint import SECRET, Endpoint, running_endpoint
from harness.runner import temporary_directory


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10) as client:
        yield client


def signed(turn: str, *, secret: str = SECRET, age_s: int = 0) -> dict[str, Any]:
    """What `httpx` takes for a request about a turn."""
    body = json.dumps({"turn": turn, "text": "How are you?"}).encode()
    sent_at = str(int(time.time()) - age_s)
    digest = hmac.new(secret.encode(), sent_at.encode() + b"." + body, hashlib.sha256).hexdigest()
    return {"content": body, "headers": {"Towline-Timestamp": sent_at, "Towline-Signature": f"v1={digest}"}}


async def test_a_signed_request_is_answered_and_counted(endpoint: Endpoint, http: httpx.AsyncClient) -> None:
    answer = await http.post(endpoint.url("fast"), **signed("t1"))
    assert answer.json()["text"] == "You said: How are you?"
    assert answer.json()["usage"]["output_tokens"] == 5
    (request,) = endpoint.of("t1")
    assert (request.is_signed, request.end, request.body["text"]) == (True, "answered", "How are you?")
    assert endpoint.of("t2") == []


@pytest.mark.parametrize("how", [{"secret": "another"}, {"age_s": 3600}, {"age_s": -3600}], ids=str)
async def test_a_bad_signature_is_refused(endpoint: Endpoint, http: httpx.AsyncClient, how: dict[str, Any]) -> None:
    assert (await http.post(endpoint.url("fast"), **signed("t1", **how))).status_code == 401
    assert [request.end for request in endpoint.of("t1")] == ["refused"]


async def test_a_stream_says_the_answer_in_pieces_and_then_whole(endpoint: Endpoint, http: httpx.AsyncClient) -> None:
    answer = await http.post(endpoint.url("sse+slow-0.2"), **signed("t1"))
    assert answer.headers["content-type"] == "text/event-stream"
    events = [part.split("\n") for part in answer.text.strip().split("\n\n")]
    pieces = [json.loads(data[6:])["text"] for kind, data in events if kind == "event: delta"]
    assert events[-1][0] == "event: message"
    assert json.loads(events[-1][1][6:])["text"] == "".join(pieces) == "You said: How are you? 1 2"


async def test_it_fails_as_often_as_it_was_told_to_for_each_turn(endpoint: Endpoint, http: httpx.AsyncClient) -> None:
    url = endpoint.url("fail-503-2")
    assert [(await http.post(url, **signed("t1"))).status_code for _ in range(3)] == [503, 503, 200]
    assert (await http.post(url, **signed("t2"))).status_code == 503
    assert (await http.post(endpoint.url("nobody"), **signed("t3"))).status_code == 404


async def test_silence_lasts_until_the_caller_leaves(endpoint: Endpoint, http: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post(endpoint.url("hang"), **signed("t1"), timeout=0.2)
    await eventually(lambda: [request.end for request in endpoint.of("t1")] == ["left"])


async def test_a_stream_is_cut_in_the_middle(endpoint: Endpoint, http: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.TransportError):
        await http.post(endpoint.url("cut-1+sse"), **signed("t1"))
    assert (await http.post(endpoint.url("cut-1+sse"), **signed("t1"))).status_code == 200


async def test_what_is_malformed_is_no_json(endpoint: Endpoint, http: httpx.AsyncClient) -> None:
    answer = await http.post(endpoint.url("malformed"), **signed("t1"))
    assert answer.status_code == 200
    with pytest.raises(ValueError):
        answer.json()


async def test_an_endpoint_in_a_process_counts_likewise(http: httpx.AsyncClient) -> None:
    with temporary_directory() as directory:
        async with running_endpoint(directory) as endpoint:
            await http.post(endpoint.url("fast"), **signed("t1"))
            assert [request.end for request in await endpoint.of("t1")] == ["answered"]
