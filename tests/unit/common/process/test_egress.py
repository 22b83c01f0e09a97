"""Egress guard: what is not allowed is refused, however it is written."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.process.egress import Allowlist, EgressRefused, Proxy, Target, resolve
from common.process.lookups import LookUps

EVERYTHING = Allowlist.parse(["0.0.0.0/0", "::/0"])
NOTHING = Allowlist.parse([])

ipv4 = st.ip_addresses(v=4)
METADATA = ipaddress.IPv4Address("169.254.169.254")


def spellings(address: ipaddress.IPv4Address) -> list[str]:
    """Ways to write an IPv4 address in a URL that some parser or resolver understands, the plain one first."""
    number = int(address)
    a, b, c, d = address.packed
    return [
        str(address),
        str(number),
        hex(number),
        oct(number).replace("0o", "0"),
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{number & 0xFFFF}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a}.{b}.{c}.{d:#x}",
        f"{address}.",
        f"{address}..",
        f"[::ffff:{address}]",
        f"[::{address}]",
        f"[::ffff:0:{address}]",
        f"[64:ff9b::{address}]",
        f"[64:ff9b:1::{address}]",
        f"[2002:{a:02x}{b:02x}:{c:02x}{d:02x}::1]",
        f"[::ffff:{address}%25eth0]",
        f"[::ffff:{address}%eth0]",
        "".join(chr(0xFF10 + int(x)) if x.isdigit() else "\u3002" for x in str(address)),  # full width
        "".join(f"%{ord(x):02x}" for x in str(address)),
        f"user@{address}",
        f"allowed.example@{address}",
        f"allowed.example\\@{address}",
        f"{address}#@allowed.example",
        f"{address}\\.allowed.example",
        f" {address}",
        f"{address}\t",
        f"{address}\x00.allowed.example",
    ]


@pytest.mark.parametrize("spelling", spellings(METADATA))
@pytest.mark.parametrize(
    "allow", [["0.0.0.0/0", "::/0"], ["169.254.169.254"], ["allowed.example", "0.0.0.0/0", "::/0"]]
)
def test_the_metadata_address_is_refused_in_every_spelling(spelling: str, allow: list[str]) -> None:
    """Even where the operator allowed every network, or this very address."""
    with pytest.raises(EgressRefused):
        Allowlist.parse(allow).check_url(f"http://{spelling}/latest/meta-data")


@given(ipv4, st.sampled_from(["http", "https"]), st.data())
def test_no_spelling_reaches_an_address_outside_the_list(
    address: ipaddress.IPv4Address, scheme: str, data: st.DataObject
) -> None:
    inside = ipaddress.ip_network("10.0.0.0/8")
    guard = Allowlist.parse([str(inside), "allowed.example"])
    spelling = data.draw(st.sampled_from(spellings(address)))
    try:
        target = guard.check_url(f"{scheme}://{spelling}/")
    except EgressRefused:
        # Only an odd spelling of an allowed address may be refused, never its plain one.
        assert not (address in inside and spelling in (str(address), f"[::ffff:{address}]", f"[64:ff9b::{address}]"))
        return
    reached = ipaddress.ip_address(target.host)
    assert address in inside
    assert reached == address or (isinstance(reached, ipaddress.IPv6Address) and reached.packed[-4:] == address.packed)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "::",
        "169.254.0.1",
        "fe80::1",
        "fe80::1%eth0",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "ff02::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2001:0:a9fe:a9fe::1",
        "::ffff:0:a9fe:a9fe",
        "::a9fe:a9fe",
    ],
)
def test_some_addresses_are_never_called(address: str) -> None:
    guard = Allowlist.parse(["0.0.0.0/0", "::/0", "inside.example"])
    with pytest.raises(EgressRefused, match="never allowed"):
        guard.check_address("inside.example", ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("allow", "host", "address", "allowed"),
    [
        (["10.0.0.0/8"], "agent.internal", "10.1.2.3", True),
        (["10.0.0.0/8"], "agent.internal", "11.1.2.3", False),
        (["10.0.0.0/8"], "agent.internal", "::ffff:10.1.2.3", True),
        (["10.0.0.0/8"], "agent.internal", "64:ff9b::10.1.2.3", True),
        (["10.0.0.7"], "10.0.0.7", "10.0.0.7", True),
        (["10.0.0.7"], "10.0.0.8", "10.0.0.8", False),
        (["agent.internal"], "agent.internal", "192.168.1.1", True),
        (["agent.internal"], "agent.internal", "2606:4700::1", True),
        (["agent.internal"], "other.internal", "192.168.1.1", False),
        # A name that was rebound to this machine.
        (["agent.internal"], "agent.internal", "127.0.0.1", False),
        (["agent.internal"], "agent.internal", "::1", False),
        (["agent.internal"], "agent.internal", "::ffff:127.0.0.1", False),
        (["localhost"], "localhost", "127.0.0.1", True),
        (["localhost"], "localhost", "::1", True),
        (["127.0.0.0/8"], "agent.internal", "127.0.0.1", True),
        (["::1"], "::1", "::1", True),
        (["10.0.0.0/8"], "::1", "::1", False),
        ([], "agent.internal", "8.8.8.8", False),
    ],
)
def test_an_address_needs_its_name_or_network(allow: list[str], host: str, address: str, allowed: bool) -> None:
    guard = Allowlist.parse(allow)
    if allowed:
        guard.check_address(host, ipaddress.ip_address(address))
    else:
        with pytest.raises(EgressRefused, match="not allowed"):
            guard.check_address(host, ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://Agent.Example", Target("http", "agent.example", 80)),
        ("HTTPS://agent.example./v1?x=1", Target("https", "agent.example", 443)),
        ("https://agent.example:8443/", Target("https", "agent.example", 8443)),
        ("http://xn--bcher-kva.example/", Target("http", "xn--bcher-kva.example", 80)),
        ("http://my_agent:8000/", Target("http", "my_agent", 8000)),
        ("http://[2606:4700:0:0::1]:80/", Target("http", "2606:4700::1", 80)),
        ("http://1.2.3.4/a%20b?q=@", Target("http", "1.2.3.4", 80)),
    ],
)
def test_plain_urls_are_read(url: str, target: Target) -> None:
    assert EVERYTHING.check_url(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "agent.example",
        "//agent.example/",
        "http:agent.example",
        "http:///agent.example",
        "ftp://agent.example/",
        "file:///etc/passwd",
        "javascript://agent.example/",
        "http://",
        "http://:80/",
        "http://agent.example:/",
        "http://agent.example:0/",
        "http://agent.example:65536/",
        "http://agent.example:8o/",
        "http://agent..example/",
        "http://.agent.example/",
        "http://-agent.example/",
        "http://agent.example-/",
        "http://agent.example,evil.example/",
        "http://agent%2eexample/",
        "http://b\u00fccher.example/",
        "http://agent.example\u3002evil.example/",
        "http://user:pass@agent.example/",
        "http://@agent.example/",
        "http://agent.example/#x",
        "http://agent.example/a b",
        "http://agent.example/\r\nHost:evil",
        "http://agent.example\\.evil.example/",
        "http://[::1/",
        "http://[agent.example]/",
        "http://[1.2.3.4]/",
        "http://[fe80::1%25eth0]/",
        "http://[2606:4700::1%eth0]/",
        "http://[v1.x]/",
        "http://" + "a" * 64 + ".example/",
        "http://" + "a." * 130 + "example/",
        "http://agent.example/" + "a" * 2048,
        "http://1.2.3.4.5/",
        "http://1.2.3.256/",
        "http://agent.0x7f/",
    ],
)
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(EgressRefused):
        EVERYTHING.check_url(url)


@given(st.text(max_size=60).map("http://".__add__) | st.text(max_size=60))
def test_any_text_is_read_or_refused_and_nothing_passes_an_empty_list(text: str) -> None:
    try:
        target = EVERYTHING.check_url(text)
    except EgressRefused:
        pass
    else:
        assert target.scheme in ("http", "https")
        assert 1 <= target.port <= 65535
        assert target.host == target.host.lower().strip(".[]") != ""
    with pytest.raises(EgressRefused):
        NOTHING.check_url(text)


@pytest.mark.parametrize(
    "entry", ["a..b", "http://a.example", "10.0.0.1/8", "10.0.0.0/33", "1.2.3", "*.a.example", "a:80"]
)
def test_a_wrong_entry_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="'") as caught:
        Allowlist.parse(["good.example", entry])
    assert entry in str(caught.value)


async def test_the_resolved_addresses_are_checked() -> None:
    """`localhost` is the one name that resolves everywhere."""
    look_ups = LookUps()
    assert "127.0.0.1" in await resolve(Allowlist.parse(["localhost"]), Target("http", "localhost", 80), look_ups)
    assert await resolve(Allowlist.parse(["::1"]), Target("http", "::1", 80), look_ups) == ["::1"]
    with pytest.raises(EgressRefused):
        await resolve(Allowlist.parse(["10.0.0.0/8"]), Target("http", "localhost", 80), look_ups)


@pytest.mark.parametrize(
    ("allow", "host", "allowed"),
    [
        (["agent.example"], "agent.example", True),
        (["agent.example"], "other.example", False),
        (["0.0.0.0/0"], "other.example", False),  # its address is not known here
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "192.0.2.1", False),
        (["0.0.0.0/0"], "169.254.169.254", False),
    ],
)
def test_where_a_proxy_looks_names_up_a_host_counts_as_it_is_written(
    allow: list[str], host: str, allowed: bool
) -> None:
    guard = Allowlist.parse(allow)
    if allowed:
        guard.check_name(host)
    else:
        with pytest.raises(EgressRefused):
            guard.check_name(host)


def test_a_proxy_is_a_host_and_a_port() -> None:
    assert Proxy.parse("http://egress-proxy:3128") == Proxy("egress-proxy", 3128)
    assert Proxy.parse("http://10.0.0.1/") == Proxy("10.0.0.1", 80)


@pytest.mark.parametrize(
    "url",
    ["", "egress-proxy:3128", "https://proxy:3128", "http://user:word@proxy:3128", "http://proxy/x", "http://a?b"],
)
def test_what_is_no_proxy_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Proxy.parse(url)
