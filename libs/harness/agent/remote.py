"""A stand-in agent in a process of its own, or in a container, told what to do over its control API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from harness.agent.stream import Script
from harness.stand_in import running_stand_in


class RemoteAgent:
    """What can be asked of an agent."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        """`url`: its root, as relays reach it; `http`: has its root as we reach it for the base URL."""
        self._url = url
        self._http = http

    def url(self, stream: str) -> str:
        """Where a stream of that name is."""
        return f"{self._url}/streams/{stream}"

    async def put(self, stream: str, script: Script) -> None:
        """Make a stream, or begin one of that name anew."""
        response = await self._http.put(f"/control/{stream}", content=msgspec.json.encode(script))
        response.raise_for_status()

    async def act(self, stream: str, action: str, **arguments: object) -> None:
        """Do one of the control API's actions, such as `emit` with `count=3`."""
        response = await self._http.post(f"/control/{stream}/{action}", json=arguments)
        response.raise_for_status()

    async def state(self, stream: str) -> dict[str, Any]:
        """Return what `GET /control/{stream}` says."""
        response = await self._http.get(f"/control/{stream}")
        state: dict[str, Any] = response.raise_for_status().json()
        return state


@asynccontextmanager
async def running_agent(directory: Path, name: str = "agent") -> AsyncIterator[RemoteAgent]:
    """Run an agent process, with its log in `directory`, for as long as the context lasts."""
    async with running_stand_in("harness.agent", directory, name) as agent:
        yield RemoteAgent(agent.url, agent.http)
