"""Tools for tests of the sidecar.

Each writes a line to the file `EXECUTIONS` before it does anything, so that executions are counted by what happened,
also across a killed process.
"""

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from towline.sidecar import tool

release = threading.Event()


def _note(line: str) -> None:
    with Path(os.environ["EXECUTIONS"]).open("a") as file:
        file.write(line + "\n")


@tool
async def click(button: str, seconds: float = 0) -> str:
    """Press a button: has a side effect."""
    _note(f"click {button}")
    await asyncio.sleep(seconds)
    return f"clicked {button}"


@tool(read_only=True)
async def look(at: str = "", seconds: float = 0) -> str:
    """Changes nothing."""
    _note(f"look {at}")
    await asyncio.sleep(seconds)
    return f"saw {at}"


@tool
def click_plain() -> str:
    """A plain function that returns when the test lets it."""
    _note("click_plain")
    release.wait(30)
    return "done"


@tool(read_only=True)
async def stubborn(seconds: float) -> str:
    """Ignores that it is cancelled."""
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)
    return "at last"


@tool(read_only=True)
async def give(kind: str) -> Any:
    """Return or raise something odd."""
    match kind:
        case "nan":
            return {"rows": [1.0, float("nan")]}
        case "surrogate":
            return "half \ud800"
        case "huge":
            return "x" * (1024 * 1024)
        case "object":
            return object()
        case "exit":
            raise SystemExit(3)
        case _:
            raise KeyError(kind)


def refuse(name: str, args: dict[str, Any]) -> bool:
    """The confirm hook of `click_confirmed`."""
    _note(f"asked {name} {args['button']}")
    return args["button"] == "allowed"


@tool(confirm=refuse)
async def click_confirmed(button: str) -> str:
    """Asks first."""
    _note(f"click {button}")
    return f"clicked {button}"


async def ask_nobody(name: str, args: dict[str, Any]) -> bool:
    """The confirm hook of `click_unanswered`: the user is at lunch."""
    _note(f"asked {name} {args['button']}")
    await asyncio.Event().wait()
    return True


@tool(confirm=ask_nobody)
async def click_unanswered(button: str) -> str:
    """Asks, and never hears."""
    _note(f"click {button}")
    return f"clicked {button}"


ALL = [click, look, click_plain, stubborn, give, click_confirmed, click_unanswered]
