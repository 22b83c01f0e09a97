"""The health check of the images: what it asks, and what its exit code says."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from common.process import probe


class Admin(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/hangs":
            time.sleep(probe.TIMEOUT_S + 2)
        self.send_response({"/livez": 200, "/redirects": 302}.get(self.path, 503))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture(scope="module")
def admin_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "common.process.probe", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(("path", "code"), [("/livez", 0), ("/readyz", 1), ("/redirects", 1)])
def test_only_200_is_healthy(admin_port: int, path: str, code: int) -> None:
    done = ask(path, TOWLINE_ADMIN_PORT=str(admin_port))
    assert done.returncode == code
    assert path in done.stdout


def test_without_a_path_it_asks_whether_the_loop_turns(admin_port: int) -> None:
    assert ask(TOWLINE_ADMIN_PORT=str(admin_port)).returncode == 0


def test_a_proxy_of_the_environment_is_not_asked(admin_port: int) -> None:
    proxy = "http://127.0.0.1:1"
    assert ask(TOWLINE_ADMIN_PORT=str(admin_port), HTTP_PROXY=proxy, http_proxy=proxy, no_proxy="").returncode == 0


def test_nobody_on_the_port_is_unhealthy_and_said() -> None:
    done = ask(TOWLINE_ADMIN_PORT="1")
    assert done.returncode == 1
    assert "port 1" in done.stderr


def test_a_process_that_hangs_is_unhealthy_in_time(admin_port: int) -> None:
    began = time.monotonic()
    assert ask("/hangs", TOWLINE_ADMIN_PORT=str(admin_port)).returncode == 1
    assert time.monotonic() - began < probe.TIMEOUT_S + 2
