"""The command `towline` as a script runs it: a process, its output, its exit code."""

import asyncio
import json
import sys
from typing import Any, NamedTuple

from harness.stack import inherited_environment


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str

    def document(self) -> Any:
        return json.loads(self.out)

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


async def towline(*arguments: str, **variables: str) -> Ended:
    """Run it to its end with these variables; expected failures have no traceback, so one is an error of the test."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "towline.cli",
        *arguments,
        env={**inherited_environment(), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return Ended(process.returncode, out.decode(), err.decode())
