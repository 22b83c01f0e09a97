"""The stand-in agent: what it says can be counted, and it fails in exactly the way it was told to."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support import eventually

from harness.agent import Agent, Answer, Script
from harness.agent.remote import RemoteAgent, running_agent
from harness.runner import temporary_directory

ACCEPT = {"Accept": "text/event-stream"}


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with Agent() as agent:
        yield agent


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(headers=ACCEPT, timeout=10) as client:
        yield client


def numbers(text: str) -> list[int]:
    return [json.loads(line.removeprefix("data: "))["n"] for line in text.splitlines() if line.startswith("data: {")]


async def test_a_paced_stream_says_its_total_in_order_and_ends(agent: Agent, http: httpx.AsyncClient) -> None:
    agent.add("a", Script(rate=200, total=20, types=("output", "ping")))
    response = await http.get(agent.url("a"))
    assert response.headers["content-type"] == "text/event-stream"
    assert numbers(response.text) == list(range(1, 22))  # and the terminal event
    assert '\nid: 21\nevent: result\ndata: {"n": 21, "stream": "a", "at": ' in response.text
    assert response.text.count("event: output\n") == response.text.count("event: ping\n") == 10


@pytest.mark.parametrize(
    ("script", "last_event_id", "seen"),
    [
        pytest.param(Script(), None, [1, 2, 3, 4], id="ids-from-the-start"),
        pytest.param(Script(), "2", [3, 4], id="ids-resumed"),
        pytest.param(Script(keep=1), "2", [4], id="ids-forgotten"),
        pytest.param(Script(resume="replay", ids=False), "2", [1, 2, 3, 4], id="replay"),
        pytest.param(Script(resume="replay", keep=2), None, [3, 4], id="replay-bounded"),
        pytest.param(Script(resume="live"), "2", [], id="live"),
    ],
)
async def test_a_new_connection_gets_what_the_script_says(
    agent: Agent, http: httpx.AsyncClient, script: Script, last_event_id: str | None, seen: list[int]
) -> None:
    stream = agent.add("a", script)
    stream.emit(4)
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    async with http.stream("GET", agent.url("a"), headers=headers) as response:
        await eventually(lambda: stream.open_connections == 1)
        stream.emit()
        stream.close()
        text = "".join([part async for part in response.aiter_text()])
    # What came after the close waits for the next connection, unless it was sent before.
    assert [number for number in numbers(text) if number <= 4] == seen
    assert stream.requests[0].last_event_id == last_event_id


async def test_every_event_comes_in_a_chunk_of_its_own(agent: Agent, http: httpx.AsyncClient) -> None:
    """A relay must be fast in this case: most upstreams are like that."""
    stream = agent.add("a", Script(comment_every_s=0.05))
    async with http.stream("GET", agent.url("a")) as response:
        chunks = response.aiter_raw()
        for number in (1, 2):
            stream.emit()
            chunk = await anext(chunks)
            while chunk.startswith(b":"):
                chunk = await anext(chunks)
            assert numbers(chunk.decode()) == [number]


async def test_a_cut_comes_in_the_middle_of_an_event(agent: Agent, http: httpx.AsyncClient) -> None:
    """The half event is complete, and one of the stream, on the next connection."""
    stream = agent.add("a")
    stream.emit(2)
    seen: list[bytes] = []

    async def read(response: httpx.Response) -> None:
        async for part in response.aiter_raw():
            seen.append(part)  # noqa: PERF401 - a comprehension would lose what came before the reset

    async with http.stream("GET", agent.url("a")) as response:
        await eventually(lambda: stream.open_connections == 1)
        stream.cut()
        with pytest.raises(httpx.TransportError):
            await read(response)
    whole, _, piece = b"".join(seen).decode().rpartition("\n\n")
    assert numbers(whole) == [1, 2]
    assert piece.startswith("id: 3\n")
    stream.end()
    response = await http.get(agent.url("a"), headers={"Last-Event-ID": "2"})
    assert numbers(response.text) == [3, 4]


async def test_whoever_has_seen_the_end_is_answered_204(agent: Agent, http: httpx.AsyncClient) -> None:
    stream = agent.add("a")
    stream.end()
    assert (await http.get(agent.url("a"), headers={"Last-Event-ID": "1"})).status_code == 204
    assert (await http.get(agent.url("a"))).status_code == 200


async def test_refusals_last_as_long_as_they_were_ordered(agent: Agent, http: httpx.AsyncClient) -> None:
    stream = agent.add("a")
    stream.end()
    stream.answer(Answer(503, {"Retry-After": "1"}), times=2)
    stream.answer(Answer(200, {"Content-Type": "text/html"}, "<p>hello"))
    responses = [await http.get(agent.url("a")) for _ in range(4)]
    assert [response.status_code for response in responses] == [503, 503, 200, 200]
    assert responses[0].headers["retry-after"] == "1"
    assert responses[2].headers["content-type"] == "text/html"
    assert [request.status for request in stream.requests] == [503, 503, 200, 200]


async def test_silence_holds_everything_back_and_loses_nothing(agent: Agent, http: httpx.AsyncClient) -> None:
    stream = agent.add("a", Script(comment_every_s=0.01))
    stream.pause()
    stream.answer(Answer(0))
    with pytest.raises(httpx.ReadTimeout):
        await http.get(agent.url("a"), timeout=0.3)
    stream.emit(3)
    with pytest.raises(httpx.ReadTimeout):
        await http.get(agent.url("a"), timeout=0.3)
    stream.go_on()
    stream.end()
    assert numbers((await http.get(agent.url("a"))).text) == [1, 2, 3, 4]


async def test_a_connection_that_is_given_up_is_noticed(agent: Agent, http: httpx.AsyncClient) -> None:
    """Tests count upstream connections: never more than one per source."""
    stream = agent.add("a")
    async with http.stream("GET", agent.url("a")):
        await eventually(lambda: stream.open_connections == 1)
    await eventually(lambda: stream.open_connections == 0)
    assert stream.most_connections == 1


async def test_an_agent_process_does_the_same(http: httpx.AsyncClient) -> None:
    with temporary_directory() as directory:
        async with running_agent(Path(directory)) as agent:
            await agent.put("a", Script(rate=100, total=5, terminal=None))
            async with http.stream("GET", agent.url("a")):
                await eventually(lambda: _has_emitted(agent, 5))
            await agent.act("a", "emit", count=2, type="ping", data="zzz")
            await agent.act("a", "answer", status=429, times=1)
            await agent.act("a", "end")
            assert (await http.get(agent.url("a"))).status_code == 429
            text = (await http.get(agent.url("a"))).text
            assert (numbers(text), text.count("event: ping\ndata: zzz\n")) == ([1, 2, 3, 4, 5, 8], 2)
            state = await agent.state("a")
            assert [request["status"] for request in state["requests"]] == [200, 429, 200]
            for refused in (agent.act("a", "explode"), agent.act("b", "emit"), agent.act("a", "emit", number=1)):
                with pytest.raises(httpx.HTTPStatusError):
                    await refused


async def _has_emitted(agent: RemoteAgent, count: int) -> bool:
    return bool((await agent.state("a"))["emitted"] == count)
