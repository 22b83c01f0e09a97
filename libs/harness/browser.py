"""A real browser without a window: Chromium, driven over its own protocol (CDP) through the `websockets` we have.

No WebDriver: that takes a second program whose version must match the browser's, and a library, for three calls.

Owns:     the browser's process and its profile, both gone at the end of the context.
"""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from harness.runner import Process
from harness.stack import inherited_environment

PROGRAMS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
# The first start makes a profile, on one core perhaps.
READY_WITHIN_S = 60.0
ANSWER_WITHIN_S = 30.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024


class PageFailed(Exception):
    """The page could not be loaded, or a script in it threw; `str()` says what."""


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome; None without one."""
    return next((path for program in PROGRAMS if (path := shutil.which(program))), None)


class Page:
    """One page of the browser. One call at a time."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._session: str | None = None

    async def open(self, url: str) -> None:
        """Load a URL; returns when the browser has begun to show it. Raises: PageFailed."""
        if self._session is None:
            target = await self._call("Target.createTarget", url="about:blank")
            attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._session = attached["sessionId"]
        navigated = await self._call("Page.navigate", url=url)
        if "errorText" in navigated:
            raise PageFailed(f"{url}: {navigated['errorText']}")

    async def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; a promise is awaited. Returns what JSON makes of it. Raises: PageFailed."""
        answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageFailed(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def _call(self, method: str, **params: object) -> dict[str, Any]:
        request: dict[str, object] = {"id": next(self._ids), "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        await self._socket.send(json.dumps(request))
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while (answer := json.loads(await self._socket.recv())).get("id") != request["id"]:
                pass  # The browser tells of much else.
        if "error" in answer:
            raise PageFailed(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result


@asynccontextmanager
async def open_browser(program: str, directory: Path) -> AsyncIterator[Page]:
    """Run a browser with a fresh profile in `directory`, an absolute path, for as long as the context lasts.

    Raises:
        ProcessFailed: it did not start; the message has the end of its log.
    """
    profile = directory / "profile"
    argv = [
        program,
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--no-first-run",
        "--no-default-browser-check",
        "--disable-gpu",
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-dev-shm-usage",  # containers have little of it
        # Its sandbox refuses root, which is who runs in a container; the page is ours.
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
    ]
    process = Process("browser", argv, directory=directory, env=inherited_environment())
    address = profile / "DevToolsActivePort"

    async def has_address() -> bool:
        return address.exists() and len(address.read_text().splitlines()) == 2

    await process.start()
    try:
        await process.wait_ready(has_address, within_s=READY_WITHIN_S)
        port, path = address.read_text().splitlines()
        async with connect(f"ws://127.0.0.1:{port}{path}", max_size=ANSWER_BYTES_MAX, proxy=None) as socket:
            yield Page(socket)
    finally:
        await process.stop()
