"""The peers of fan-out: a reader per client, Hypercorn's floor, and nchan.

nchan is nginx's module for this, in C: what fan-out can cost when nothing is remembered beyond the last messages. It is
used where it is installed, as Debian's packages have it.
"""

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import redis.asyncio

from harness.bench import naive_streams, publish
from harness.bench.crowd import raise_file_limit
from harness.bench.ground import Ground
from harness.bench.peers import READY_WITHIN_S, has_said, running
from harness.bench.relays import wait_until_said
from harness.bench.streams import Stream
from harness.ports import free_port, is_http_ready
from harness.runner import KILL_WITHIN_S, Process
from harness.stack import inherited_environment

NGINX_PATH = "/usr/local/sbin:/usr/sbin:/usr/bin"
NCHAN_MODULE = Path("/usr/lib/nginx/modules/ngx_nchan_module.so")
NCHAN_MISSING = "nchan is not installed (Debian: nginx, libnginx-mod-nchan)"
NGINX_CONFIG = """
load_module {module};
{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {directory}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {directory}/nginx-body;
  proxy_temp_path {directory}/nginx-proxy;
  fastcgi_temp_path {directory}/nginx-fastcgi;
  uwsgi_temp_path {directory}/nginx-uwsgi;
  scgi_temp_path {directory}/nginx-scgi;
  keepalive_requests 1000000;
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location = /readyz {{ return 200; }}
    location ~ ^/publish/(.+)$ {{
      nchan_publisher;
      nchan_channel_id $1;
      nchan_message_buffer_length 10000;
      nchan_message_timeout 10m;
    }}
    location ~ ^/events/(.+)$ {{
      nchan_subscriber eventsource;
      nchan_channel_id $1;
      nchan_subscriber_first_message oldest;
    }}
  }}
}}
"""


class NaiveStreams:
    """`naive_streams`: a blocking read of Redis per client."""

    def __init__(self, ground: Ground, process: Process, port: int) -> None:
        self._redis_url = ground.servers.redis_url
        self._process = process
        self._port = port

    @property
    def pids(self) -> Mapping[str, int]:
        """See `StreamServer`."""
        return {"server": self._process.pid}

    async def describe_stream(self) -> Stream:
        """See `StreamServer`."""
        run = uuid4().hex
        return Stream(run, self._port, f"/runs/{run}/events", publish.ToStream(naive_streams.stream_key(run)))

    async def restart(self) -> None:
        """See `StreamServer`."""
        await _start_afresh(self._process)
        await wait_until_said(self._process, naive_streams.READY)

    async def forget(self, stream: Stream) -> None:
        """See `StreamServer`."""
        async with redis.asyncio.Redis.from_url(self._redis_url) as client:
            await client.unlink(naive_streams.stream_key(stream.name))


@asynccontextmanager
async def open_naive_streams(ground: Ground, name: str) -> AsyncIterator[NaiveStreams]:
    """Run the reader-per-client server until the block ends. Raises: ProcessFailed."""
    port = free_port()
    process = ground.process(name, "harness.bench.naive_streams", str(port))
    async with running(process, is_ready=has_said(process, naive_streams.READY)):
        yield NaiveStreams(ground, process, port)


class Posted:
    """A server that takes events over HTTP and keeps them itself. `takes_many`: see `publish.ToHttp`."""

    def __init__(self, process: Process, port: int, *, takes_many: bool) -> None:
        self._process = process
        self._port = port
        self._takes_many = takes_many

    @property
    def pids(self) -> Mapping[str, int]:
        """See `StreamServer`."""
        return {"server": self._process.pid}

    async def describe_stream(self) -> Stream:
        """See `StreamServer`."""
        channel = uuid4().hex
        target = publish.ToHttp(self._port, f"/publish/{channel}", self._takes_many)
        return Stream(channel, self._port, f"/events/{channel}", target)

    async def restart(self) -> None:
        """See `StreamServer`."""
        await _start_afresh(self._process)
        await self._process.wait_ready(lambda: is_http_ready(self._port), within_s=READY_WITHIN_S)

    async def forget(self, stream: Stream) -> None:
        """See `StreamServer`: it is gone with the process."""


@asynccontextmanager
async def open_floor(ground: Ground, name: str) -> AsyncIterator[Posted]:
    """Run Hypercorn's floor until the block ends. Raises: ProcessFailed."""
    port = free_port()
    async with _serving(ground.process(name, "harness.bench.stream_floor", str(port)), port, takes_many=True) as server:
        yield server


@asynccontextmanager
async def open_nchan(ground: Ground, name: str) -> AsyncIterator[Posted]:
    """Run nginx with nchan until the block ends. Raises: ProcessFailed."""
    port, directory = free_port(), ground.directory / name
    directory.mkdir(exist_ok=True)
    user = "user root;" if os.geteuid() == 0 else ""  # else its worker could not reach the directory
    config = directory / "nginx.conf"
    config.write_text(NGINX_CONFIG.format(module=NCHAN_MODULE, user=user, directory=directory, port=port))
    nginx = find_nginx()
    assert nginx is not None, "only opened where it is installed"
    process = Process(
        name,
        [nginx, "-p", str(directory), "-c", str(config), "-e", "stderr"],
        directory=ground.directory,
        env=inherited_environment(),
    )
    async with _serving(process, port, takes_many=False) as server:
        yield server


def find_nginx() -> str | None:
    """Where nginx is, if it and nchan are installed."""
    return shutil.which("nginx", path=NGINX_PATH) if NCHAN_MODULE.exists() else None


async def _start_afresh(process: Process) -> None:
    # It holds nothing that matters, and would wait for responses that nobody reads any more.
    process.kill()
    await process.wait(within_s=KILL_WITHIN_S)
    await process.start()


@asynccontextmanager
async def _serving(process: Process, port: int, *, takes_many: bool) -> AsyncIterator[Posted]:
    raise_file_limit()  # what is started inherits it
    await process.start()
    try:
        await process.wait_ready(lambda: is_http_ready(port), within_s=READY_WITHIN_S)
        yield Posted(process, port, takes_many=takes_many)
    finally:
        process.kill()
        await process.wait(within_s=KILL_WITHIN_S)
