"""`http_get` against a real HTTP server: what it opens, and what it does not."""

import http.server
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from towline.sidecar.builtin import HostNotAllowed, builtin_tools

Get = Callable[..., Awaitable[dict[str, Any]]]


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/redirect":
                self.send_response(302)
                self.send_header("Location", "/")
                body = b""
            case "/compressed":
                self.send_response(200)
                self.send_header("Content-Encoding", "gzip")
                body = b"not even gzip"
            case "/strange":
                self.send_response(404)
                self.send_header("Content-Type", "text/plain; charset=no-such")
                body = b"\xff text"
            case _:
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=latin-1")
                self.send_header("Set-Cookie", "session=secret")
                body = "schön".encode("latin-1") * 100
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def http_get(*allowed: str) -> Get:
    get: Get = builtin_tools(allowed)[0]
    return get


async def test_a_page_comes_with_status_some_headers_and_text(port: int) -> None:
    for allowed in ("127.0.0.1", f"127.0.0.1:{port}"):
        page = await http_get(allowed)(f"http://127.0.0.1:{port}/")
        assert page["status"] == 200
        assert page["text"] == "schön" * 100
        assert page["headers"]["content-type"] == "text/html; charset=latin-1"
        assert "set-cookie" not in page["headers"]
        assert not page["truncated"]


async def test_a_long_page_is_cut_and_marked(port: int) -> None:
    page = await http_get("127.0.0.1")(f"http://127.0.0.1:{port}/", max_bytes=10)
    assert (page["text"], page["truncated"]) == ("schönschön", True)


async def test_an_error_page_is_a_page(port: int) -> None:
    page = await http_get("127.0.0.1")(f"http://127.0.0.1:{port}/strange")
    assert (page["status"], page["text"]) == (404, "\ufffd text")


@pytest.mark.parametrize("allowed", [(), ("localhost",), ("127.0.0.1:1",), ("27.0.0.1",)])
async def test_hosts_that_were_not_allowed_are_not_opened(port: int, allowed: tuple[str, ...]) -> None:
    with pytest.raises(HostNotAllowed):
        await http_get(*allowed)(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    "url", ["file:///etc/hostname", "ftp://127.0.0.1/", "http://127.0.0.1@elsewhere/", "//127.0.0.1/"]
)
async def test_other_schemes_and_disguised_hosts_are_refused(url: str) -> None:
    with pytest.raises(HostNotAllowed):
        await http_get("127.0.0.1")(url)


async def test_redirects_and_compressed_bodies_are_errors(port: int) -> None:
    with pytest.raises(HostNotAllowed, match="302"):
        await http_get("127.0.0.1")(f"http://127.0.0.1:{port}/redirect")
    with pytest.raises(ValueError, match="compressed"):
        await http_get("127.0.0.1")(f"http://127.0.0.1:{port}/compressed")


async def test_proxy_variables_do_not_lead_it_away(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert (await http_get("127.0.0.1")(f"http://127.0.0.1:{port}/"))["status"] == 200
