"""Programs that others give us for speaking with what they run: `docker`, `kubectl`, `podman`.

Used by:  the targets that are containers.
"""

import asyncio
import os
import shlex
import shutil

from harness.drills.target import DrillFailed

CALL_WITHIN_S = 60.0


def find(name: str, *, variable: str = "") -> list[str]:
    """How a program is called: as an environment variable has it, the same as for scripts/, or by its name.

    Raises:
        DrillFailed: it is not installed.
    """
    words = shlex.split(os.environ.get(variable, "")) or [name]
    path = shutil.which(words[0])
    if path is None:
        raise DrillFailed(f"`{words[0]}` is needed for this target and is not on the PATH")
    return [path, *words[1:]]


async def call(*argv: str, within_s: float = CALL_WITHIN_S) -> str:
    """Run a program to its end, and return what it printed.

    Raises:
        DrillFailed: it ended non-zero, with the last line that it complained in; or it did not end in time.
    """
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(within_s):
            out, complaints = await process.communicate()
    except TimeoutError as error:
        raise DrillFailed(f"`{' '.join(argv)}` took more than {within_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = complaints.decode(errors="replace").strip().rpartition("\n")[2]
        raise DrillFailed(f"`{' '.join(argv)}` ended with {process.returncode}: {last}")
    return out.decode(errors="replace")
