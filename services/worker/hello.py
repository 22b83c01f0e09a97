"""What a machine says of itself: its hello, and its catalogue whenever that changes.

Promises: what is taken can be stored and told to anybody; text that cannot is mended, for no machine is turned away for
          a U+0000 in a description.
Used by:  worker.sockets (the first frame), worker.session (`tools`).
"""

import msgspec

from common.ids import is_uuid
from towline.wire import frames, json
from towline.wire.ids import TOOL_NAME_CHARACTERS_MAX, is_id, is_tool_name

RUNNING_MAX = 64


def read_hello(text: str | bytes) -> frames.Hello:
    """Read the first frame of a socket.

    Raises:
        FrameError: says what is wrong with it.
    """
    if not isinstance(text, str):
        raise frames.FrameError("a binary frame: frames are JSON text")
    try:
        hello = frames.decode_from_sidecar(text)
    except frames.FrameError as error:
        raise frames.FrameError(f"a bad hello: {error}") from error
    if not isinstance(hello, frames.Hello):
        raise frames.FrameError("the first frame must be hello")
    if not is_id(hello.machine) or not is_id(hello.journal):
        raise frames.FrameError("hello: machine and journal must be ids (1-200 of A-Z a-z 0-9 . _ : @ -)")
    if len(hello.running) > RUNNING_MAX or not all(is_uuid(job) for job in hello.running):
        raise frames.FrameError(f"hello: running must be at most {RUNNING_MAX} job ids")
    try:
        hello.tools = read_catalogue(hello.tools)
    except frames.FrameError as error:
        raise frames.FrameError(f"hello: {error}") from error
    hello.name, hello.version = json.mend_text(hello.name), json.mend_text(hello.version)
    return hello


def read_catalogue(tools: list[frames.Tool]) -> list[frames.Tool]:
    """Check the tools that a machine announces; returns them, mended if need be.

    Raises:
        FrameError: says what is wrong with them.
    """
    if len(tools) > frames.TOOLS_MAX:
        raise frames.FrameError(f"{len(tools)} tools, at most {frames.TOOLS_MAX} are allowed")
    if len({tool.name for tool in tools}) != len(tools) or not all(is_tool_name(tool.name) for tool in tools):
        raise frames.FrameError(f"tool names must be ids of at most {TOOL_NAME_CHARACTERS_MAX} characters, each once")
    try:
        raw, mended = json.check_raw(json.dumps({"tools": tools}))
    except json.JsonProblem as problem:
        raise frames.FrameError(str(problem)) from problem
    return msgspec.json.decode(raw, type=dict[str, list[frames.Tool]])["tools"] if mended else tools
