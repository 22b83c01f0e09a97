"""A stand-in model in a process of its own, and what it counted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from harness.model.server import ModelRequest
from harness.stand_in import StandIn, running_stand_in


class RemoteModel:
    """What can be asked of a model process; made by `running_model`."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    @property
    def url(self) -> str:
        """What an OpenAI client takes for its `base_url`."""
        return f"http://127.0.0.1:{self._stand_in.port}/v1"

    async def about(self, text: str) -> list[ModelRequest]:
        """The requests whose question contains the text, in order."""
        response = await self._stand_in.http.get("/control/requests", params={"about": text})
        return msgspec.json.decode(response.raise_for_status().content, type=list[ModelRequest])


@asynccontextmanager
async def running_model(directory: Path, name: str = "model") -> AsyncIterator[RemoteModel]:
    """Run a model process, with its log in `directory`, for as long as the context lasts."""
    async with running_stand_in("harness.model", directory, name) as stand_in:
        yield RemoteModel(stand_in)
