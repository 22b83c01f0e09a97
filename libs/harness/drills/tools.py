"""Tools of the drills' machines. They note when they begin and when they have ended, so that executions are counted
where they happen and not where they are reported.
"""

import asyncio
import os
import signal
from pathlib import Path

from towline.sidecar import tool

HELD_POLL_EVERY_S = 0.02
# The file that takes a line `began MARK` or `ended MARK`; one for all machines of a user.
NOTES_VARIABLE = "DRILL_NOTES"


def let_go_file(notes: Path, mark: str) -> Path:
    """The file that lets a held job of that mark come to its end, once it is there."""
    return notes.with_name(f"{notes.name}.{mark}.let-go")


@tool
async def work(mark: str, seconds: float = 0.0, held: bool = False) -> str:
    """Have a side effect, which takes a while, or until the drill lets it go: runs at most once."""
    return await _act(mark, seconds, held)


@tool(read_only=True)
async def look(mark: str, seconds: float = 0.0, held: bool = False) -> str:
    """Look at something for a while, or until the drill lets it go: may run again if the sidecar died."""
    return await _act(mark, seconds, held)


@tool
async def crash(mark: str) -> str:
    """Take the sidecar down, with a side effect."""
    return await _die(mark)


@tool(read_only=True)
async def crash_looking(mark: str) -> str:
    """Take the sidecar down by merely looking."""
    return await _die(mark)


async def _act(mark: str, seconds: float, held: bool) -> str:
    _note("began", mark)
    await asyncio.sleep(seconds)
    while held and not let_go_file(Path(os.environ[NOTES_VARIABLE]), mark).exists():  # noqa: ASYNC110 (another process)
        await asyncio.sleep(HELD_POLL_EVERY_S)
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
