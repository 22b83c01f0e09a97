"""Built-in tools, safe by default: none changes anything, or reaches a host or folder that was not allowed by name.

Used by: cli.sidecar, which registers them beside the user's own.
"""

import asyncio
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec

from towline import __version__
from towline.sidecar.files import file_tools
from towline.sidecar.tools import tool

HTTP_BYTES_MAX = 512 * 1024
# What an agent can use of a response, without cookies and tokens.
_HEADERS = ("content-type", "content-length", "content-language", "last-modified", "etag", "date")


class HostNotAllowed(Exception):
    """`http_get` was asked for a host that the user has not allowed."""


def builtin_tools(allowed_hosts: Sequence[str] = (), allowed_folders: Sequence[Path] = ()) -> list[Callable[..., Any]]:
    """The built-in tools.

    Args:
        allowed_hosts: what `http_get` may open, each `host` (any port) or `host:port`; none by default.
        allowed_folders: what `files_list` and `files_read` may look into, absolute; none by default.
    """
    allowed = frozenset(host.strip().lower() for host in allowed_hosts)

    @tool(read_only=True)
    async def http_get(
        url: Annotated[str, msgspec.Meta(max_length=4096)],
        max_bytes: Annotated[int, msgspec.Meta(ge=1, le=HTTP_BYTES_MAX)] = 65536,
    ) -> dict[str, Any]:
        """Fetch a page that this machine can see: status, some headers and the text, cut at max_bytes and then marked.

        Only hosts that the user has allowed; a redirect is an error and is not followed.
        """
        return await _http_get(url, max_bytes, allowed)

    return [http_get, *file_tools(allowed_folders), system_info, echo, sleep]


@tool(read_only=True)
def system_info() -> dict[str, Any]:
    """What kind of machine this is: operating system, architecture, CPUs, Python and sidecar version."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "towline": __version__,
    }


@tool(read_only=True)
async def echo(value: Any) -> Any:
    """Give back the value: for trying the connection out."""
    return value


@tool(read_only=True)
async def sleep(seconds: Annotated[float, msgspec.Meta(ge=0, le=600)]) -> dict[str, float]:
    """Wait so many seconds, at most 600: for trying out what happens meanwhile."""
    await asyncio.sleep(seconds)
    return {"slept_s": seconds}


async def _http_get(url: str, max_bytes: int, allowed: frozenset[str]) -> dict[str, Any]:
    target = httpx.URL(url)
    if target.scheme not in ("http", "https"):
        raise HostNotAllowed(f"only http and https are fetched, not {target.scheme!r}")
    port = target.port or {"http": 80, "https": 443}[target.scheme]
    host = f"[{target.host}]" if ":" in target.host else target.host
    if not allowed & {target.host, host, f"{host}:{port}"}:
        raise HostNotAllowed(f"{host}:{port} is not among the hosts that this machine's user has allowed")
    # Straight from this machine, past proxy variables: the point is to see what this machine sees.
    async with (
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=30) as client,
        # Undecoded, so that a few bytes cannot inflate into many.
        client.stream("GET", target, headers={"Accept-Encoding": "identity"}) as response,
    ):
        if response.is_redirect:
            raise HostNotAllowed(
                f"{host}:{port} answered {response.status_code}, a redirect; redirects are not followed"
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("the server compressed the page although it was asked not to")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                break
    return {
        "status": response.status_code,
        "headers": {name: response.headers[name] for name in _HEADERS if name in response.headers},
        "text": bytes(body[:max_bytes]).decode(response.encoding or "utf-8", errors="replace"),
        "truncated": len(body) > max_bytes,
    }
