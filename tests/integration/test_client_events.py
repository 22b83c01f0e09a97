"""`client.events`: a stream that goes on by itself, against a server that closes, repeats, falls silent and refuses."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from played_gateway import CUT, NO_CONTENT, SILENT, PlayedGateway, Step, end, event, gap, opened, refusal
from support import eventually

from towline.client import ApiProblem, Break, Client, End, Gap, GatewayUnreachable, InvalidRequest, RunEvent
from towline.stream import FIRST_ATTEMPTS_MAX
from towline.wire import sse

KEY = "secret-key"
FAR_S = 30.0


async def follow(
    gateway: PlayedGateway, run: str | Sequence[str] = "r", **arguments: Any
) -> list[RunEvent | Gap | End]:
    async with asyncio.timeout(FAR_S), Client(gateway.url, KEY) as client:
        return [item async for item in client.events(run, **arguments)]


def numbers(items: Sequence[RunEvent | Gap | End]) -> list[int | str]:
    return [int(item.uid[1:]) if isinstance(item, RunEvent) else type(item).__name__ for item in items]


async def test_a_stream_from_its_start_to_its_end() -> None:
    async with PlayedGateway.start(opened(event(1), event(2) + event(3), end())) as gateway:
        items = await follow(gateway)
    assert items[0] == RunEvent("r", "7-1", "planner", "u1", 1764000000001, "output", '{"n":1}')
    assert numbers(items) == [1, 2, 3, "End"]
    assert items[-1] == End("r", "completed")
    (request,) = gateway.requests
    assert request.target == "/v1/runs/r/events"
    assert request.last_event_id is None
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "lost",
    [
        [],
        [CUT],
        # Half an event is none: it comes again, whole.
        [event(3)[:-1], CUT],
        [event(3)[:10]],
        # HTTP that is broken.
        [CUT, b""],
    ],
    ids=["closed", "cut", "cut in mid-event", "closed in mid-event", "cut between chunks"],
)
async def test_a_lost_connection_is_resumed_after_the_last_event(lost: list[Step]) -> None:
    breaks: list[Break] = []
    async with PlayedGateway.start(opened(event(1), event(2), *lost), opened(event(3), end())) as gateway:
        items = await follow(gateway, on_break=breaks.append)
    assert numbers(items) == [1, 2, 3, "End"]
    assert [request.last_event_id for request in gateway.requests] == [None, "7-2"]
    assert len(breaks) == 1


async def test_connections_that_bring_nothing_move_nothing() -> None:
    async with PlayedGateway.start(opened(event(1)), opened(), opened(CUT), opened(event(2), end())) as gateway:
        assert numbers(await follow(gateway)) == [1, 2, "End"]
    assert [request.last_event_id for request in gateway.requests] == [None, "7-1", "7-1", "7-1"]


async def test_garbage_in_place_of_http_is_a_lost_connection() -> None:
    garbage = [b"\x16\x03\x01 no HTTP at all\r\n\r\n"]
    broken_chunk = [*opened(event(1)), b"zz\r\nno chunk"]
    async with PlayedGateway.start(broken_chunk, garbage, opened(event(2), end())) as gateway:
        assert numbers(await follow(gateway)) == [1, 2, "End"]
    assert [request.last_event_id for request in gateway.requests] == [None, "7-1", "7-1"]


async def test_events_that_come_again_are_left_out() -> None:
    """A server that repeats, as a proxy may that answers from what it has: no event twice, none out of order."""
    async with PlayedGateway.start(
        opened(event(1), event(2)), opened(event(1), event(2), event(3)), opened(event(2), event(3), event(4), end())
    ) as gateway:
        assert numbers(await follow(gateway)) == [1, 2, 3, 4, "End"]
    assert [request.last_event_id for request in gateway.requests] == [None, "7-2", "7-3"]


async def test_a_silent_connection_is_given_up_after_the_interval_that_it_stated() -> None:
    """The server believes it is connected, and so does the kernel; only the missing comments tell."""
    breaks: list[Break] = []
    silent = opened(event(1), SILENT, keepalive_s=0.2)
    async with PlayedGateway.start(silent, opened(event(2), end())) as gateway:
        assert numbers(await follow(gateway, on_break=breaks.append)) == [1, 2, "End"]
    assert gateway.requests[1].last_event_id == "7-1"
    assert breaks[0].reason == "silent for 0.5 s"


async def test_a_connection_with_signs_of_life_is_kept() -> None:
    """Comments alone, for longer than silence would be borne."""
    breaks: list[Break] = []
    items: list[RunEvent | Gap | End] = []
    async with PlayedGateway.start(opened(event(1), SILENT, keepalive_s=0.8)) as gateway:

        async def comments() -> None:
            await eventually(lambda: items)
            for _ in range(13):
                gateway.send(sse.comment())
                await asyncio.sleep(0.2)
            gateway.send(event(2) + end())

        async with asyncio.timeout(FAR_S), Client(gateway.url, KEY) as client, asyncio.TaskGroup() as group:
            group.create_task(comments())
            async for item in client.events("r", on_break=breaks.append):
                items.append(item)  # noqa: PERF401 (the other task watches it grow)
    assert numbers(items) == [1, 2, "End"]
    assert (len(gateway.requests), breaks) == (1, [])


async def test_a_gap_is_a_value_in_its_place() -> None:
    async with PlayedGateway.start(opened(event(1)), opened(gap(), event(9), end())) as gateway:
        items = await follow(gateway)
    assert numbers(items) == [1, "Gap", 9, "End"]
    assert items[1] == Gap("r", after="7-1", first_available="7-9")


async def test_a_run_that_has_been_read_to_its_end_is_over_at_once() -> None:
    """204, as a browser gets it."""
    async with PlayedGateway.start(NO_CONTENT) as gateway:
        assert await follow(gateway, last_event_id="7-3") == []
    assert [request.last_event_id for request in gateway.requests] == ["7-3"]


async def test_the_end_may_be_lost_with_its_connection() -> None:
    async with PlayedGateway.start(opened(event(1), CUT), NO_CONTENT) as gateway:
        assert numbers(await follow(gateway)) == [1]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
@pytest.mark.parametrize("opens_first", [False, True], ids=["at first", "later"])
async def test_a_final_refusal_is_raised(status: int, opens_first: bool) -> None:
    before = [opened(event(1))] if opens_first else []
    async with PlayedGateway.start(*before, refusal(status, "no")) as gateway:
        with pytest.raises(ApiProblem) as raised:
            await follow(gateway)
    assert (raised.value.status, raised.value.slug, raised.value.detail) == (status, "no", "why")
    assert len(gateway.requests) == len(before) + 1


@pytest.mark.parametrize("status", [503, 429])
async def test_retry_after_is_kept_to(status: int) -> None:
    breaks: list[Break] = []
    async with PlayedGateway.start(
        opened(event(1)), refusal(status, "later", "Retry-After: 1\r\n"), opened(event(2), end())
    ) as gateway:
        assert numbers(await follow(gateway, on_break=breaks.append)) == [1, 2, "End"]
    _, refused, again = gateway.requests
    assert again.at_s - refused.at_s >= 0.99
    assert again.last_event_id == "7-1"
    assert breaks[1].reason.startswith("later")


async def test_a_page_in_place_of_a_stream_is_tried_again() -> None:
    page = [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"]
    async with PlayedGateway.start(opened(event(1)), page, opened(event(2), end())) as gateway:
        assert numbers(await follow(gateway)) == [1, 2, "End"]


async def test_who_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towline.stream.PAUSE_FIRST_S", 0.01)
    async with PlayedGateway.start([CUT]) as gateway:
        with pytest.raises(GatewayUnreachable, match="does not answer"):
            await follow(gateway)
    assert len(gateway.requests) == FIRST_ATTEMPTS_MAX
    async with PlayedGateway.start(refusal(503, "later")) as gateway:
        with pytest.raises(ApiProblem, match="later"):
            await follow(gateway)
    assert len(gateway.requests) == FIRST_ATTEMPTS_MAX


@pytest.mark.parametrize(
    "frame",
    [b"id: 1\ndata: no JSON\n\n", b'id: 1\ndata: {"source":"a"}\n\n', b"event: output\ndata: {}\n\n"],
    ids=["no JSON", "members missing", "no id"],
)
async def test_what_no_gateway_sends_is_an_error_and_not_passed_on(frame: bytes) -> None:
    async with PlayedGateway.start(opened(event(1), frame)) as gateway:
        with pytest.raises(GatewayUnreachable, match="not this API's"):
            await follow(gateway)
    assert len(gateway.requests) == 1


async def test_frames_of_a_later_version_are_passed_over() -> None:
    async with PlayedGateway.start(opened(b"event: towline.news\ndata: {}\n\n", event(1), end())) as gateway:
        assert numbers(await follow(gateway)) == [1, "End"]


async def test_several_runs_over_one_connection() -> None:
    """The stream is over when all of them are; each event says whose it is."""
    async with PlayedGateway.start(
        opened(event(1, run="a"), event(2, run="b"), end("a", "failed")), opened(event(3, run="b"), end("b"))
    ) as gateway:
        items = await follow(gateway, ["a", "b"])
    assert [item.run for item in items] == ["a", "b", "a", "b", "b"]
    assert [request.target.partition("?")[0] for request in gateway.requests] == ["/v1/events"] * 2
    assert gateway.requests[0].target in ("/v1/events?runs=a,b", "/v1/events?runs=a%2Cb")
    assert gateway.requests[1].last_event_id == "7-2"


async def test_from_live_leaves_no_silent_hole() -> None:
    """Lost before anything came: nobody can say what came meanwhile, so it is a gap."""
    async with PlayedGateway.start(opened(), opened(event(4)), opened(event(5), end())) as gateway:
        items = await follow(gateway, from_="live")
    assert numbers(items) == ["Gap", 4, 5, "End"]
    assert [request.target for request in gateway.requests] == [
        "/v1/runs/r/events?from=live",
        "/v1/runs/r/events?from=live",
        "/v1/runs/r/events",
    ]


async def test_from_live_goes_on_from_where_the_stream_said_it_began() -> None:
    async with PlayedGateway.start(opened(b"id: 7-3\n\n"), opened(event(4), end())) as gateway:
        assert numbers(await follow(gateway, from_="live")) == [4, "End"]
    assert [request.last_event_id for request in gateway.requests] == [None, "7-3"]


async def test_leaving_closes_the_connection() -> None:
    async with PlayedGateway.start(opened(event(1), SILENT)) as gateway, Client(gateway.url, KEY) as client:
        async with asyncio.timeout(FAR_S), contextlib.aclosing(client.events("r")) as stream:
            async for _ in stream:
                break
        await eventually(lambda: gateway.connections == 0, FAR_S)


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        ("a/b", {}),
        ([], {}),
        (["a", "a"], {}),
        ([f"r{n}" for n in range(21)], {}),
        ("r", {"last_event_id": "7-1\r\nX-Other: 1"}),
    ],
    ids=["no id", "no run", "twice", "too many", "header"],
)
async def test_what_cannot_be_asked_for(run: str | list[str], arguments: dict[str, str]) -> None:
    async with Client("http://127.0.0.1:1", KEY) as client:
        with pytest.raises(InvalidRequest):
            client.events(run, **arguments)  # type: ignore[arg-type]


async def test_text_that_had_to_be_mended_says_so() -> None:
    data = {"source": "planner", "uid": "u1", "ts": 1, "type": "output", "data": "\ufffd", "mended": True}
    async with PlayedGateway.start(opened(sse.encode("7-1", "output", json.dumps(data).encode()), end())) as gateway:
        mended, _ = await follow(gateway)
    assert mended == RunEvent("r", "7-1", "planner", "u1", 1, "output", "\ufffd", mended=True)
