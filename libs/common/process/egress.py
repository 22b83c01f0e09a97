"""Egress guard: where a URL that a caller gave may lead. Everything is refused that is not allowed by name or network.

Owns:     the meaning of `TOWLINE_EGRESS_ALLOW`, and the list of addresses that are never called.
Promises: a URL that two parsers could read differently is refused, so what was checked is what is called; an address
          is judged by what it reaches, however it is written (IPv4-mapped, NAT64).
Used by:  whoever opens a socket for a caller: `check_url` at the door, then `resolve`, then connect to exactly what
          it returned. A second look-up by the HTTP client would undo the check. Only `resolve` does any I/O.
          Where a forward proxy opens the connections, the address is its to look up and to judge: `check_name`.
"""

import asyncio
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from common.errors import Permanent, Retryable
from common.process.lookups import LookUps

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

URL_CHARACTERS_MAX = 2048
# A resolver that needs longer is an outage; the caller's own timeout is still to come.
RESOLVE_TIMEOUT_S = 5.0

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_HOST_CHARACTERS_MAX = 253
# Printable ASCII without the characters that parsers disagree on.
_URL = re.compile(r"[!-~]+")
_URL_REFUSED = re.compile(r"[\\\"<>^`{|}]")

_NEVER: tuple[tuple[str, tuple[Network, ...]], ...] = tuple(
    (what, tuple(ipaddress.ip_network(network) for network in networks))
    for what, networks in (
        ("link-local", ("169.254.0.0/16", "fe80::/10")),
        # Those outside link-local: AWS and GCP over IPv6, Alibaba, Azure's wire server, Oracle.
        (
            "a cloud's metadata",
            ("fd00:ec2::/32", "fd20:ce::254/128", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
        ),
        # 0.0.0.0 and :: connect to this very machine.
        ("unspecified", ("0.0.0.0/8", "::/128")),
        ("multicast or reserved", ("224.0.0.0/3", "ff00::/8")),
        # IPv4-compatible, IPv4-translated, local NAT64, Teredo, 6to4: they hide an IPv4 address and nobody needs them.
        ("a transition address", ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOOPBACK_6 = ipaddress.IPv6Address("::1")


class EgressRefused(Permanent):
    """The URL or its address is outside what this installation may call; `str()` says which and why."""


class ResolveFailed(Retryable):
    """The host name could not be resolved now."""


class Target(NamedTuple):
    """What a checked URL leads to. `host`: lower case, without a trailing dot or brackets."""

    scheme: str
    host: str
    port: int


class Proxy(NamedTuple):
    """A forward proxy that opens connections to the outside for this installation (HTTP CONNECT)."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> "Proxy":
        """Read `http://host:port`.

        Raises:
            ValueError: it is something else.
        """
        try:
            target = _read(url)
        except EgressRefused as error:
            raise ValueError(str(error)) from None
        if target.scheme != "http" or urlsplit(url).path.strip("/") or "?" in url:
            raise ValueError("not of the form http://host:port")
        return cls(target.host, target.port)


@dataclass(frozen=True, slots=True)
class Allowlist:
    """The hosts and networks that may be called.

    A host entry allows whatever address the name has, except the loopback of this machine and what is never allowed;
    loopback takes the entry `localhost` or a network that holds it.
    """

    hosts: frozenset[str]
    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, entries: Iterable[str]) -> "Allowlist":
        """Read host names, addresses and CIDRs; no entry allows nothing.

        Raises:
            ValueError: an entry is none of these.
        """
        hosts: set[str] = set()
        networks: list[Network] = []
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                if "host bits" in str(error):
                    raise ValueError(f"{entry!r} has host bits set") from None
                try:
                    hosts.add(_host_name(entry))
                except EgressRefused:
                    raise ValueError(f"{entry!r} is no host name, address or CIDR") from None
        return cls(frozenset(hosts), tuple(networks))

    def check_url(self, url: str) -> Target:
        """Read a URL strictly and refuse what cannot be allowed whatever its name resolves to.

        Raises:
            EgressRefused: not an http(s) URL in its plain form, or its host is outside the list.
        """
        target = _read(url)
        if (address := _literal(target.host)) is not None:
            self.check_address(target.host, address)
        elif target.host not in self.hosts and not self.networks:
            raise EgressRefused(f"the host {target.host} is not allowed")
        return target

    def check_name(self, host: str) -> None:
        """Judge a host as it is written, where a proxy looks up its address: a name must be in the list itself.

        Raises:
            EgressRefused: it is not, or is an address that is not allowed.
        """
        if (address := _literal(host)) is not None:
            self.check_address(host, address)
        elif host not in self.hosts:
            raise EgressRefused(f"the host {host} is not allowed by name, and its address is the proxy's to look up")

    def check_address(self, host: str, address: Address) -> None:
        """Judge one address that `host` resolved to.

        Raises:
            EgressRefused: it is never allowed, or neither the name nor a network allows it.
        """
        reached = _reached(address)
        if reached != _LOOPBACK_6:  # which lies inside ::/96
            for what, networks in _NEVER:
                if any(reached in network for network in networks):
                    raise EgressRefused(f"{host} leads to {address}, which is {what}: never allowed")
        if any(reached in network or address in network for network in self.networks):
            return
        if host not in self.hosts:
            raise EgressRefused(f"{host} leads to {address}, which is not allowed")
        if reached.is_loopback and host != "localhost":
            raise EgressRefused(f"{host} leads to {address}, the loopback of the service: not allowed by name")


async def resolve(allowlist: Allowlist, target: Target, look_ups: LookUps) -> list[str]:
    """Look the host up and check every address; connect to one of the returned ones and to nothing else.

    Raises:
        EgressRefused: an address is not allowed. A mixed answer is refused whole: it is how a name is rebound.
        ResolveFailed: no answer, or none in time.
    """
    if (literal := _literal(target.host)) is not None:
        allowlist.check_address(target.host, literal)
        return [str(literal)]
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            # With the dot it is looked up as it stands, and not first inside the search domains of the pod.
            addresses = await look_ups.find(_absolute(target.host))
    except (OSError, TimeoutError) as error:
        raise ResolveFailed(f"{target.host} cannot be resolved") from error
    for address in addresses:
        allowlist.check_address(target.host, ipaddress.ip_address(address))
    return addresses


def _absolute(host: str) -> str:
    # Short names (Compose services, `agent.namespace` in Kubernetes) live by the search domains.
    return host if host.count(".") < 2 else host + "."


def _read(url: str) -> Target:
    if len(url) > URL_CHARACTERS_MAX:
        raise EgressRefused(f"the URL is longer than {URL_CHARACTERS_MAX} characters")
    if not _URL.fullmatch(url) or _URL_REFUSED.search(url):
        raise EgressRefused("the URL holds characters that must be percent-encoded (host names: in their xn-- form)")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise EgressRefused("the URL cannot be read") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EgressRefused("the URL must begin with http:// or https:// and a host")
    if "@" in parts.netloc:
        raise EgressRefused("the URL must not hold a user name or password")
    if "#" in url:
        raise EgressRefused("the URL must not have a fragment")
    if parts.netloc.endswith(":") or port == 0:
        raise EgressRefused("the URL's port must be 1 to 65535")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, _host(parts.netloc, parts.hostname), port)


def _host(netloc: str, hostname: str) -> str:
    if not netloc.startswith("["):
        return _host_name(hostname)
    try:
        address = ipaddress.IPv6Address(hostname)
    except ValueError:
        raise EgressRefused("the URL's host is no IPv6 address") from None
    if address.scope_id is not None:
        raise EgressRefused("the URL's host must not have a zone")
    return str(address)


def _host_name(text: str) -> str:
    host = text.lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > _HOST_CHARACTERS_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise EgressRefused(f"{text[:80]!r} is no host name")
    # A last label that is a number makes some parsers read an IPv4 address (127.1, 0x7f000001, 017700000001).
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise EgressRefused(f"{text[:80]!r} is no IPv4 address of four plain decimal numbers") from None
    return host


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _reached(address: Address) -> Address:
    """The address that a connection to `address` ends at."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    plain = ipaddress.IPv6Address(int(address))  # without its zone
    if plain in _NAT64:
        return ipaddress.IPv4Address(int(plain) & 0xFFFFFFFF)
    return plain
