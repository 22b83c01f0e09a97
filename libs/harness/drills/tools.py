"""Tools of the drills' machines. They note when they begin and when they have ended, so that executions are counted
where they happen and not where they are reported.
"""

import asyncio
import os
import signal
from pathlib import Path

from towline.sidecar import tool

# The file that takes a line `began MARK` or `ended MARK`; one for all machines of a user.
NOTES_VARIABLE = "DRILL_NOTES"


@tool
async def work(mark: str, seconds: float = 0.0) -> str:
    """Have a side effect, which takes a while: runs at most once."""
    return await _act(mark, seconds)


@tool(read_only=True)
async def look(mark: str, seconds: float = 0.0) -> str:
    """Look at something for a while: may run again if the sidecar died."""
    return await _act(mark, seconds)


@tool
async def crash(mark: str) -> str:
    """Take the sidecar down, with a side effect."""
    return await _die(mark)


@tool(read_only=True)
async def crash_looking(mark: str) -> str:
    """Take the sidecar down by merely looking."""
    return await _die(mark)


async def _act(mark: str, seconds: float) -> str:
    _note("began", mark)
    await asyncio.sleep(seconds)
    _note("ended", mark)
    return mark


async def _die(mark: str) -> str:
    _note("began", mark)
    os.kill(os.getpid(), signal.SIGKILL)
    # The signal may be delivered a moment later; nothing must be answered meanwhile.
    await asyncio.Event().wait()
    return mark


def _note(what: str, mark: str) -> None:
    # One small append: whole lines, also when two machines write at once, and there when the process is killed next.
    with Path(os.environ[NOTES_VARIABLE]).open("a") as notes:
        notes.write(f"{what} {mark}\n")
