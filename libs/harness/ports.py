"""Loopback ports: which one a server may take, and whether a service on one is ready."""

import asyncio
import random
import socket

# Below the ranges from which Linux (32768-) and macOS (49152-) take ports of outgoing connections: otherwise, while a
# server is down, a client that redials it can be given the server's own port, and the server cannot come back.
PORTS = range(20_000, 32_000)
_ports_given: set[int] = set()


def free_port() -> int:
    """Choose a TCP port of the loopback address that nobody listens on; never the same one twice in this process.

    Another program may still take it before it is used: whoever starts a server on it retries with another one.
    """
    for port in random.sample(PORTS, min(1000, len(PORTS))):
        if port in _ports_given:
            continue
        with socket.socket() as candidate:
            # As servers do; without it ports of recently closed connections look taken.
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        _ports_given.add(port)
        return port
    raise RuntimeError(f"no free TCP port in {PORTS.start}-{PORTS.stop - 1}")


async def is_http_ready(port: int) -> bool:
    """Whether `GET /readyz` on a loopback port is answered with 200 within a second."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: a line without end, of another program
        return False
    return status_line.split(b" ")[1:2] == [b"200"]
