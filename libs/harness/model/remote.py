"""A stand-in model in a process of its own, or in a container, and what it counted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from harness.model.server import ModelRequest
from harness.stand_in import running_stand_in


class RemoteModel:
    """What can be asked of a model."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        """`url`: its root, as workers reach it; `http`: has its root as we reach it for the base URL."""
        self._url = url
        self._http = http

    @property
    def url(self) -> str:
        """What an OpenAI client takes for its `base_url`."""
        return f"{self._url}/v1"

    async def about(self, text: str) -> list[ModelRequest]:
        """The requests whose question contains the text, in order."""
        response = await self._http.get("/control/requests", params={"about": text})
        return msgspec.json.decode(response.raise_for_status().content, type=list[ModelRequest])


@asynccontextmanager
async def running_model(directory: Path, name: str = "model") -> AsyncIterator[RemoteModel]:
    """Run a model process, with its log in `directory`, for as long as the context lasts."""
    async with running_stand_in("harness.model", directory, name) as stand_in:
        yield RemoteModel(stand_in.url, stand_in.http)
