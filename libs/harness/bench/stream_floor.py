"""The floor of fan-out: what Hypercorn itself costs when the same bytes go to many clients.

    python -m harness.bench.stream_floor PORT

A plain ASGI application. `POST /publish/{channel}` puts the lines of the body, each encoded once as an event, at the
end of the channel; `GET /events/{channel}` sends all there is and then what comes, everything of one wake-up in one
message. No cursor, no keep-alive, no limit, no end, no store: nobody can do less and use this server.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from harness.bench.crowd import raise_file_limit
from harness.bench.naive_hub import serve_app

READY = "stream floor ready"


@dataclass(slots=True)
class Channel:
    """Everything that was posted, and who waits for more."""

    frames: list[bytes] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def post(self, frames: Iterable[bytes]) -> None:
        """Add frames and wake everybody."""
        self.frames.extend(frames)
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()

    async def more(self) -> None:
        """Return when there is another frame."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        await future


class Floor:
    """The application."""

    def __init__(self) -> None:
        self._channels: defaultdict[str, Channel] = defaultdict(Channel)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a frame, or send all there are."""
        if scope["type"] != "http":
            raise RuntimeError("no lifespan here")  # as an application says that it wants none
        what, _, channel = scope["path"][1:].partition("/")
        if what == "publish":
            await self._post(self._channels[channel], receive, send)
        elif what == "events":
            await self._stream(self._channels[channel], send)
        else:
            await _answer(send, 200)  # it is ready

    async def _post(self, channel: Channel, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        numbered = enumerate(body.split(b"\n"), start=len(channel.frames))
        channel.post(b"id: %d\nevent: output\ndata: %s\n\n" % event for event in numbered)
        await _answer(send, 202)

    async def _stream(self, channel: Channel, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # A comment, so that the head leaves.
        await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
        sent = 0
        while True:
            if sent == len(channel.frames):
                await channel.more()
            body, sent = b"".join(channel.frames[sent:]), len(channel.frames)
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def main(port: str) -> None:
    """Serve on the loopback address until killed."""
    raise_file_limit()
    asyncio.run(serve_app(Floor(), int(port), READY))


if __name__ == "__main__":
    main(*sys.argv[1:])
