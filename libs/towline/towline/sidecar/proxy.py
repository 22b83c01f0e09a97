"""Which way the socket takes: through a proxy that the environment names, or straight.

Promises: on a network where a proxy is the only way out it is used, for `wss` never one that is meant for plain HTTP;
          what is on this machine is dialled straight, whatever the environment says.
Used by:  sidecar.app.
"""

import ipaddress
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

# Where the WebSocket library looks. It knows nothing of ALL_PROXY.
_LIBRARY_LOOKS_AT = {"wss": {"wss", "socks", "https"}, "ws": {"ws", "socks", "https", "http"}}


def proxy_for(url: str) -> str | Literal[True] | None:
    """What to tell the WebSocket library: a proxy's URL, True for what it finds itself, None for none."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    if is_loopback(parts.hostname):
        return None
    proxies = getproxies()
    if not _LIBRARY_LOOKS_AT[parts.scheme] & proxies.keys():
        return None if proxy_bypass(parts.netloc) else proxies.get("all")
    return True


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine for certain."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
