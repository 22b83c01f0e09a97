"""Requests over plain sockets, one a connection or left open."""

import asyncio
from typing import NamedTuple

HOST = "127.0.0.1"
DEADLINE_S = 15.0
# At once, on a busy machine: what it is told from are seconds of a budget, or no end at all.
AT_ONCE_S = 3.0


class Answer(NamedTuple):
    status: int
    head: str
    body: str


async def get(port: int, path: str, *headers: str) -> Answer:
    """One request on a connection of its own."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        lines = (f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *headers)
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    return Answer(int(head.split()[1]), head, body)


async def read_until(reader: asyncio.StreamReader, text: bytes) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        return await reader.readuntil(text)


async def open_request(
    port: int, path: str, *headers: str, method: str = "GET"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, port, limit=1024)
    writer.write("\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", *headers, "\r\n")).encode())
    return reader, writer
