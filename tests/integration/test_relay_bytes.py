"""Bytes of an upstream that are easily misread: what of them gets into the log."""

import json
import zlib
from collections.abc import AsyncIterator

import pytest
from followed_runs import FollowedRun, RawUpstream, Relay, source
from support import eventually

SEPARATORS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"]


@pytest.fixture
async def upstream() -> AsyncIterator[RawUpstream]:
    async with RawUpstream() as running:
        yield running


async def stored(run: FollowedRun, count: int, *, within_s: float = 10.0) -> list[dict[str, str]]:
    async def enough() -> bool:
        return len(await run.upstream()) >= count

    await eventually(enough, within_s)
    return await run.upstream()


@pytest.mark.parametrize("piece", [1, 10_000], ids=["byte-by-byte", "at-once"])
async def test_unicode_separators_split_nothing(
    relay: Relay, run: FollowedRun, upstream: RawUpstream, piece: int
) -> None:
    """The last one is the terminal event: cut in two, the run would never end."""
    texts = [f"before{separator}after" for separator in SEPARATORS]
    raw = "".join(f"event: output\ndata: {text}\n\n" for text in texts[:-1]) + f"event: result\ndata: {texts[-1]}\n\n"
    sent = raw.encode()
    upstream.pieces = [sent[i : i + piece] for i in range(0, len(sent), piece)]
    await run.put(source(upstream.url, resume="live"))
    assert (await run.ended()).state == "completed"
    assert [e["data"] for e in await run.upstream()] == texts


@pytest.mark.parametrize(
    "raw",
    [
        b"data: a\n\ndata: b\n\ndata: c\n\n",
        b"data: a\r\n\r\ndata: b\r\n\r\ndata: c\r\n\r\n",
        b"data: a\r\rdata: b\r\rdata: c\r\r",
        b"data: a\r\ndata: \n\ndata: b\n\r\n\rdata: c\r\n\r",
    ],
    ids=["lf", "crlf", "cr", "mixed"],
)
async def test_all_line_ends_end_lines(relay: Relay, run: FollowedRun, upstream: RawUpstream, raw: bytes) -> None:
    """The last event comes without waiting for a further byte, while the connection stays open."""
    upstream.pieces = [raw]
    await run.put(source(upstream.url, resume="live"))
    assert [e["data"].rstrip("\n") for e in await stored(run, 3)] == ["a", "b", "c"]
    assert upstream.open_connections == 1


async def test_characters_split_over_chunks_stay_whole_and_broken_ones_are_mended(
    relay: Relay, run: FollowedRun, upstream: RawUpstream
) -> None:
    text = "é漢🜚"
    before = relay.metric("towline_relay_mended_events_total")
    raw = f"data: {text}\n\n".encode() + b"data: bad \xff byte\n\ndata: good\n\n"
    upstream.pieces = [raw[i : i + 1] for i in range(len(raw))]
    await run.put(source(upstream.url, resume="live"))
    assert [e["data"] for e in await stored(run, 3)] == [text, "bad \ufffd byte", "good"]
    assert [e.get("mended") for e in await run.upstream()] == [None, "1", None]
    assert relay.metric("towline_relay_mended_events_total") == before + 1


async def test_small_field_rules(relay: Relay, run: FollowedRun, upstream: RawUpstream) -> None:
    upstream.pieces = [
        b"\xef\xbb\xbf:comment\n\n"
        b"id: 7\ndata:x\n\n"
        b"data\ndata\n\n"
        b"data:  two spaces\n\n"
        b"id: 8\0\ndata: nul\n\n"
        b"retry: 10x\n\nretry: 86400000\n\n"
        b"event:\ndata: y\n\n"
        b"foo: bar\n\n"
        b"event: towline.run.ended\ndata: forged\n\n"
        b"event: error\ndata: e\n\n"
    ]
    await run.put(source(upstream.url))
    found = await stored(run, 7)
    assert [e["data"] for e in found] == ["x", "\n", " two spaces", "nul", "y", "forged", "e"]
    assert {e["type"] for e in found} == {"message"}
    assert [e["uid"] for e in found] == ["7", "", "", "", "", "", ""]
    assert await run.state() == "active"


async def test_an_event_over_the_limit_is_replaced_by_one_that_says_so(
    relay: Relay, run: FollowedRun, upstream: RawUpstream
) -> None:
    """It kills neither the connection nor the run, and its id still counts; a terminal one still ends the source."""
    big = b"x" * (300 * 1024)
    before = relay.metric("towline_relay_too_large_events_total")
    upstream.pieces = [
        b"id: 1\nevent: output\ndata: small\n\n",
        *[b"id: 2\nevent: output\ndata: " + big + b"\n\n"],
        b"id: 3\nevent: output\ndata: small again\n\n",
        b"id: 4\nevent: result\ndata: " + big + b"\n\n",
    ]
    await run.put(source(upstream.url))
    assert (await run.ended()).state == "completed"
    entries = await run.entries()
    assert [(e["type"], e["uid"]) for e in entries] == [
        ("output", "1"),
        ("towline.event.too_large", "2"),
        ("output", "3"),
        ("towline.event.too_large", "4"),
        ("towline.source.ended", ""),
        ("towline.run.ended", ""),
    ]
    told = json.loads(entries[1]["data"])
    assert (told["source"], told["type"]) == ("coder", "output")
    assert told["size_bytes"] >= len(big)
    assert relay.metric("towline_relay_too_large_events_total") == before + 2


async def test_an_event_without_end_is_bounded(relay: Relay, run: FollowedRun, upstream: RawUpstream) -> None:
    """8 MiB on one line, never ended: they are not held, and the connection is not lost."""
    upstream.pieces = [b"data: "] + [b"y" * 65536] * 128 + [b"\n\ndata: after\n\n"]
    await run.put(source(upstream.url, resume="live"))
    await stored(run, 1)
    assert [e["type"] for e in await run.entries()] == ["towline.event.too_large", "message"]


async def test_a_compressed_stream_comes_event_by_event(relay: Relay, run: FollowedRun, upstream: RawUpstream) -> None:
    """Identity was asked for; an upstream that compresses nevertheless is read, and a cut one leaves no torn entry."""
    upstream.head = upstream.head.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    deflater = zlib.compressobj(wbits=31)
    for number in range(3):
        piece = deflater.compress(f"id: {number}\ndata: {number}\n\n".encode()) + deflater.flush(zlib.Z_SYNC_FLUSH)
        upstream.pieces.append(piece)
    await run.put(source(upstream.url))
    assert [e["data"] for e in await stored(run, 3)] == ["0", "1", "2"]
    assert upstream.open_connections == 1
    assert "accept-encoding: identity" in upstream.heads[0].lower()


async def test_a_compressed_bomb_is_not_inflated_at_once(relay: Relay, run: FollowedRun, upstream: RawUpstream) -> None:
    """64 MiB out of 64 KiB: one oversized event, and what follows."""
    upstream.head = upstream.head.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    deflater = zlib.compressobj(wbits=31)
    upstream.pieces = [
        deflater.compress(b"data: " + b"z" * (64 * 1024 * 1024)),
        deflater.compress(b"\n\ndata: after\n\n") + deflater.flush(zlib.Z_SYNC_FLUSH),
    ]
    await run.put(source(upstream.url, resume="live"))
    await stored(run, 1)
    assert [e["type"] for e in await run.entries()] == ["towline.event.too_large", "message"]


async def test_a_body_that_is_no_gzip_is_retried_and_nothing_of_it_stored(
    relay: Relay, run: FollowedRun, upstream: RawUpstream
) -> None:
    upstream.head = upstream.head.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    upstream.pieces = [b"data: plain\n\n"]
    await run.put(source(upstream.url))
    await eventually(lambda: len(upstream.heads) >= 2)
    assert await run.entries() == []
