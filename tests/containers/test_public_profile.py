"""The public Compose profile, up for real in a project of its own: what comes in, gets out, and is written down.

    make images && TOWLINE_TEST_IMAGES=dev pytest tests/containers/test_public_profile.py       COMPOSE='docker-compose'

Needs Docker with Compose 2.24 or newer, and the images of others that .env.example names. Takes some minutes.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from compose_files import COMPOSE, SECRETS, is_once, public, services
from image_containers import TAG

from harness.ports import free_port

pytestmark = pytest.mark.timeout(900)

PROJECT = "towline-public-test"
HOST = "towline.localhost"
TOKEN = "a-token-that-nobody-may-find-in-a-log"
UP_WITHIN_S = 600
# nginx' own default, which cuts what is silent for longer.
NGINX_DEFAULT_S = 60.0
# Gateways that are as silent as they can be told to be, so that only the proxy's time decides; and one name too many in
# the list of what may be called: it leads to an address inside.
OVERRIDE = """
services:
  gateway: {environment: {TOWLINE_SSE_KEEPALIVE_S: "60"}}
"""
ALLOWED = "stand-in,worker"


@dataclass(frozen=True)
class Profile:
    """The profile, up. `certificate`: the self-made one."""

    command: list[str]
    https_port: int
    http_port: int
    certificate: Path
    api_key: str

    def compose(self, *arguments: str, ok: bool = True) -> str:
        done = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, timeout=UP_WITHIN_S, check=False
        )
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, service: str, source: str) -> str:
        """What a program prints inside a service's container."""
        return self.compose("exec", "-T", service, "python", "-c", source).strip()

    def client(self, **options: object) -> httpx.Client:
        """A client that believes this certificate and nobody else."""
        return httpx.Client(
            base_url=f"https://localhost:{self.https_port}",
            verify=ssl.create_default_context(cafile=str(self.certificate)),
            timeout=30,
            **options,  # type: ignore[arg-type]
        )

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profile]:
    """Brought up from nothing, and removed with all that it kept."""
    directory = tmp_path_factory.mktemp("public")
    https_port, http_port = free_port(), free_port()
    (directory / "override.yaml").write_text(OVERRIDE)
    variables = {
        **SECRETS,
        "TAG": TAG,
        "PUBLIC_HOST": HOST,
        "PUBLIC_ADDRESS": "127.0.0.1",
        "HTTPS_PORT": https_port,
        "HTTP_PORT": http_port,
        "TOWLINE_EGRESS_ALLOW": ALLOWED,
    }
    env_file = directory / "env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    program = os.environ.get("COMPOSE", "docker compose" if shutil.which("docker") else "docker-compose").split()
    files = (COMPOSE / "compose.yaml", COMPOSE / "public.yaml", directory / "override.yaml")
    if subprocess.run([*program, "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Compose: `{' '.join(program)} version` does not work")
    command = [*program, "--project-name", PROJECT, "--env-file", str(env_file)]
    command += [word for file in files for word in ("--file", str(file))]
    certificate = directory / "tls.crt"
    draft = Profile(command, https_port, http_port, certificate, "")
    try:
        draft.compose("up", "--detach", "--wait", "--wait-timeout", str(UP_WITHIN_S))
        certificate.write_text(draft.compose("exec", "-T", "proxy", "cat", "/tls/tls.crt"))
        api_key = draft.compose("run", "--rm", "--no-deps", "smoke", "cat", "/operator/api-key").strip()
        yield Profile(command, https_port, http_port, certificate, api_key)
    finally:
        draft.compose("--profile", "smoke", "down", "--volumes", "--timeout", "5", ok=False)


def test_the_whole_walk_passes_from_outside(profile: Profile) -> None:
    """Jobs, a run and turns over TLS: requests, an event stream, a socket; and out by the egress proxy alone."""
    smoked = profile.compose("run", "--rm", "--no-deps", "smoke")
    assert smoked.splitlines()[-1].endswith("ok")
    tunnels = profile.compose("logs", "--no-color", "--no-log-prefix", "egress-proxy")
    assert '"target":"stand-in:9100","status":200' in tunnels
    assert '"target":"stand-in:9101","status":200' in tunnels


def test_everything_comes_back_from_a_restart(profile: Profile) -> None:
    """Of the machine, for instance, which starts what is to stay, in no order and all at once."""
    profile.compose(
        "restart", "--timeout", "5", *(n for n, service in services(public()).items() if not is_once(service))
    )
    profile.compose("up", "--detach", "--wait", "--no-recreate", "--wait-timeout", str(UP_WITHIN_S))
    test_the_whole_walk_passes_from_outside(profile)


# ---- what comes in


def test_only_the_proxy_is_published(profile: Profile) -> None:
    published = {}
    for line in profile.compose("ps", "--format", "json").splitlines():
        container = json.loads(line)
        ports = {(p["TargetPort"], p["PublishedPort"]) for p in container["Publishers"] or () if p["PublishedPort"]}
        if ports:
            published[container["Service"]] = ports
    assert published == {"proxy": {(443, profile.https_port), (80, profile.http_port)}}


def test_plain_http_is_sent_to_https(profile: Profile) -> None:
    answer = httpx.get(f"http://127.0.0.1:{profile.http_port}/v1/runs?x=1", headers={"Host": HOST})
    assert (answer.status_code, answer.headers["location"]) == (308, f"https://{HOST}/v1/runs?x=1")


def test_browsers_get_http2_and_old_tls_is_refused(profile: Profile) -> None:
    with profile.client(http2=True) as client:
        answer = client.get("/openapi.json")
    assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
    assert "strict-transport-security" in answer.headers
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", profile.https_port)) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/livez", "/readyz", "//metrics", "/v1/../metrics", "/v1/..%2fmetrics", "/%6detrics", "/metrics/"],
)
def test_probes_and_metrics_are_nowhere(profile: Profile, path: str) -> None:
    with raw(profile) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 404"), answer
    assert b"application/problem+json" in answer
    assert b"# HELP" not in answer


def test_a_connection_does_not_change_its_protocol(profile: Profile) -> None:
    """What was said inside of it would go by the limits, the locations and the log."""
    with raw(profile) as connection:
        connection.sendall(
            f"GET /problems/not-found HTTP/1.1\r\nHost: {HOST}\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
            "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n".encode()
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_body_over_the_limit_is_refused_as_the_gateway_would(profile: Profile) -> None:
    with profile.client() as client:
        answer = client.post("/v1/users/ada/jobs", content=b"x" * (256 * 1024 + 1))
    assert (answer.status_code, answer.headers["content-type"]) == (413, "application/problem+json")
    assert answer.json()["type"] == "/problems/body-too-large"


async def test_who_asks_too_often_is_told_so_and_may_come_again(profile: Profile) -> None:
    """All at once, as one after the other is slow enough on a busy machine."""
    context = ssl.create_default_context(cafile=str(profile.certificate))
    async with httpx.AsyncClient(
        base_url=f"https://localhost:{profile.https_port}", verify=context, timeout=60, http2=True
    ) as client:
        answers = await asyncio.gather(*(client.get("/problems/not-found") for _ in range(150)))
        assert {answer.status_code for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["status"] == 429
        await asyncio.sleep(int(refused.headers["retry-after"]))
        assert (await client.get("/problems/not-found")).status_code == 200


@pytest.fixture
def thread(profile: Profile) -> str:
    """A thread with an agent that repeats what it is told."""
    headers = {"Authorization": f"Bearer {profile.api_key}"}
    with profile.client(headers=headers) as client:
        assert client.put("/v1/agents/echo", json={"kind": "echo"}).is_success
        created: str = client.post("/v1/threads", json={"agent": "echo"}).json()["thread"]
    return created


def test_who_holds_too_many_connections_is_told_so(profile: Profile, thread: str) -> None:
    """Event streams, as slowly as the other limit lets them in."""
    lines = [f"GET /v1/threads/{thread}/events HTTP/1.1", f"Host: {HOST}", f"Authorization: Bearer {profile.api_key}"]
    request = "\r\n".join([*lines, "", ""]).encode()
    with contextlib.ExitStack() as stack:
        for number in range(65):
            connection = stack.enter_context(raw(profile))
            connection.sendall(request)
            status = connection.recv(12)
            assert status == (b"HTTP/1.1 200" if number < 64 else b"HTTP/1.1 429"), number
            time.sleep(0.05)


def test_streams_and_sockets_outlive_the_usual_minute(profile: Profile, thread: str) -> None:
    """A stream that is silent for longer than nginx would allow by itself still brings what comes after."""
    headers = {"Authorization": f"Bearer {profile.api_key}"}
    connected = profile.compose("logs", "--no-color", "--no-log-prefix", "sidecar")
    with (
        profile.client(headers=headers) as client,
        client.stream("GET", f"/v1/threads/{thread}/events", timeout=2 * NGINX_DEFAULT_S) as stream,
    ):
        lines = stream.iter_lines()
        assert "keepalive_s=60" in next(lines)
        began = time.monotonic()
        say = threading.Timer(NGINX_DEFAULT_S + 10, _say, (profile, thread, "after the silence"))
        say.start()
        assert next(line for line in lines if "after the silence" in line)
        assert time.monotonic() - began > NGINX_DEFAULT_S
        say.join()
    # Not one line more: the laptop's socket is the same.
    assert profile.compose("logs", "--no-color", "--no-log-prefix", "sidecar") == connected


def _say(profile: Profile, thread: str, text: str) -> None:
    headers = {"Authorization": f"Bearer {profile.api_key}", "Idempotency-Key": "late"}
    with profile.client(headers=headers) as client:
        assert client.post(f"/v1/threads/{thread}/entries", json={"text": text}).is_success


# ---- what gets out


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[str, int]]:
    """A port of this machine that listens everywhere: what stands for the world."""
    with socket.create_server(("0.0.0.0", 0), backlog=64) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent; it only says by which address this machine goes out.
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        yield address, server.getsockname()[1]


def can_reach(profile: Profile, service: str, host: str, port: int) -> bool:
    source = f"import socket\ntry: socket.create_connection(({host!r}, {port}), 5)\nexcept OSError: print('no')"
    return profile.python(service, source) != "no"


@pytest.mark.parametrize("service", ["gateway", "worker", "relay", "stand-in", "sidecar"])
def test_no_service_has_a_way_out(profile: Profile, listener: tuple[str, int], service: str) -> None:
    """Not to the world, and not to this machine by the address that it would have in their networks."""
    assert not can_reach(profile, service, *listener)
    name = profile.compose("ps", "--quiet", service).split()[0]
    found = subprocess.run(
        ["docker", "inspect", "--format", "{{json .NetworkSettings.Networks}}", name],
        capture_output=True,
        text=True,
        check=True,
    )
    gateways = {network["Gateway"] for network in json.loads(found.stdout).values()} - {""}
    for address in gateways:
        assert not can_reach(profile, service, address, listener[1]), address


def test_the_egress_proxy_has_one(profile: Profile, listener: tuple[str, int]) -> None:
    """Or the test above would hold of anything."""
    address, port = listener
    profile.compose("exec", "-T", "egress-proxy", "timeout", "5", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("stand-in:9100", 200),
        ("stand-in:22", 403),
        ("agents.example.com:443", 403),  # in no list
        ("worker:443", 403),  # in the list, and inside
        ("169.254.169.254:80", 403),
        ("redis:6379", 403),
    ],
)
def test_the_egress_proxy_lets_through_what_is_allowed(profile: Profile, target: str, status: int) -> None:
    request = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
    source = (
        "import socket; s = socket.create_connection(('egress-proxy', 3128), 10);"
        f"s.sendall({request.encode()!r}); print(s.recv(100).split()[1].decode())"
    )
    assert profile.python("worker", source) == str(status)


def test_services_meet_only_whom_they_need(profile: Profile) -> None:
    assert can_reach(profile, "gateway", "redis", 6379)
    assert can_reach(profile, "worker", "egress-proxy", 3128)
    for service, host, port in (
        ("gateway", "egress-proxy", 3128),
        ("worker", "stand-in", 9100),
        ("sidecar", "gateway", 8080),
        ("sidecar", "redis", 6379),
        ("stand-in", "postgres", 5432),
    ):
        assert not can_reach(profile, service, host, port), f"{service} → {host}"


# ---- what is written down


def test_no_log_holds_a_token(profile: Profile) -> None:
    """Neither of requests that are answered nor of those that fail, are refused or cannot be read."""
    query = f"access_token={TOKEN}"
    with profile.client() as client:
        assert client.get(f"/v1/events?runs=a&{query}").status_code == 401
        assert client.get(f"/nowhere?{query}").status_code == 404
        assert client.post(f"/v1/threads?{query}", content=b"x" * 300_000).status_code == 413
    await_refusal(profile, f"/problems/not-found?{query}")
    httpx.get(f"http://127.0.0.1:{profile.http_port}/v1/events?{query}", headers={"Referer": f"https://x/?{query}"})
    with raw(profile) as connection:
        connection.sendall(f"GET /v1/events?{query} HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".encode())
        assert b"400" in connection.recv(100)
    profile.compose("stop", "--timeout", "1", "gateway")
    try:
        with profile.client() as client:
            # It was asked too often a moment ago, and says so (429) for a while.
            deadline = time.monotonic() + 30
            while (answer := client.get(f"/v1/events?runs=a&{query}")).status_code != 503:
                assert time.monotonic() < deadline, answer.status_code
                time.sleep(0.2)
            assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
            assert "retry-after" in answer.headers
    finally:
        profile.compose("start", "gateway")
        profile.compose("up", "--detach", "--wait", "--no-recreate", "gateway")
    logs = profile.logs()
    assert '"path":"/v1/events"' in logs
    assert TOKEN not in logs
    assert profile.api_key not in logs
    assert not [name for name, secret in SECRETS.items() if secret in logs]


def await_refusal(profile: Profile, path: str) -> None:
    """Ask until it is too often, on as many connections as that takes."""
    with profile.client() as client, ThreadPoolExecutor(max_workers=20) as pool:
        statuses: list[int] = []
        while 429 not in statuses:
            statuses = [answer.status_code for answer in pool.map(client.get, [path] * 100)]


@contextlib.contextmanager
def raw(profile: Profile) -> Iterator[ssl.SSLSocket]:
    """A connection on which anything can be said."""
    context = ssl.create_default_context(cafile=str(profile.certificate))
    with (
        socket.create_connection(("127.0.0.1", profile.https_port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as connection,
    ):
        yield connection


def read_all(connection: ssl.SSLSocket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)
