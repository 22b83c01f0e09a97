"""The stand-in agent's server: named SSE streams, and a control API that says what they do.

    GET  /streams/{stream}               the stream (SSE, one event per HTTP chunk)
    PUT  /control/{stream}               make it, or begin it anew; body: a `Script`
    GET  /control/{stream}               `{emitted, is_ended, open_connections, most_connections, requests: [...]}`
    POST /control/{stream}/{action}      emit {count, type, data} · end {type} · close · cut · pause · go_on ·
                                         answer {status, headers, body, times}
    GET  /readyz

Owns:     the streams and what paces them; they end with the context.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec

from harness.agent.stream import Answer, Script, Stream
from harness.loopback import SSE_HEAD, Call, Connection, LoopbackServer


class Agent(LoopbackServer):
    """A stand-in agent on a loopback port, as an async context manager.

    Attributes:
        streams: by name.
    """

    def __init__(self, port: int = 0) -> None:
        """Describe it; port 0 takes any free one."""
        super().__init__(port)
        self.streams: dict[str, Stream] = {}
        self._paces: dict[str, asyncio.Task[None]] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the port, every stream and every connection."""
        for pace in self._paces.values():
            pace.cancel()
        await asyncio.gather(*self._paces.values(), return_exceptions=True)
        await super().__aexit__(kind, error, trace)

    def add(self, name: str, script: Script | None = None) -> Stream:
        """Make a stream, or begin one of that name anew."""
        if name in self._paces:
            self._paces.pop(name).cancel()
            self.streams[name].close()
        stream = self.streams[name] = Stream(name, script or Script())
        self._paces[name] = asyncio.create_task(stream.run_pace(), name=f"pace:{name}")
        return stream

    def url(self, name: str) -> str:
        """Where a stream of that name is."""
        return f"http://127.0.0.1:{self.port}/streams/{name}"

    async def serve(self, call: Call, connection: Connection) -> None:
        """Serve a stream, or do what the control API was asked to."""
        match call.method, call.path:
            case "GET", ("streams", name) if name in self.streams:
                await _stream(self.streams[name], call.headers, connection)
            case _, ("control", *rest):
                await connection.answer(self._control(call.method, rest, call.body))
            case "GET", ("readyz",):
                await connection.answer(Answer(200))
            case _:
                await connection.answer(Answer(404))

    def _control(self, method: str, path: Sequence[str], body: bytes) -> Answer:
        try:
            match method, path:
                case "PUT", [name]:
                    self.add(name, msgspec.json.decode(body or b"{}", type=Script))
                case "GET", [name]:
                    return Answer(200, body=_state(self.streams[name]))
                case "POST", [name, action]:
                    arguments = msgspec.json.decode(body or b"{}", type=dict[str, Any])
                    _actions(self.streams[name])[action](**arguments)
                case _:
                    return Answer(404)
        except KeyError as error:
            return Answer(404, body=f"no {error}")
        except (TypeError, msgspec.MsgspecError) as error:
            return Answer(400, body=str(error))
        return Answer(200, body=_state(self.streams[path[0]]))


async def _stream(stream: Stream, headers: dict[str, str], connection: Connection) -> None:
    admitted = stream.admit(headers)
    if not isinstance(admitted, Answer):
        connection.writer.write(SSE_HEAD)
        await connection.while_open(stream.send(admitted, connection))
    elif admitted.status:
        await connection.answer(admitted)
    else:
        await connection.while_open()


def _actions(stream: Stream) -> dict[str, Callable[..., object]]:
    def answer(*, times: int = 1, **arguments: object) -> None:
        stream.answer(msgspec.convert(arguments, Answer), times=times)

    return {
        "emit": stream.emit,
        "end": stream.end,
        "close": stream.close,
        "cut": stream.cut,
        "pause": stream.pause,
        "go_on": stream.go_on,
        "answer": answer,
    }


def _state(stream: Stream) -> str:
    state = {
        "emitted": stream.emitted,
        "is_ended": stream.is_ended,
        "open_connections": stream.open_connections,
        "most_connections": stream.most_connections,
        "requests": [request._asdict() for request in stream.requests],
    }
    return msgspec.json.encode(state).decode()
