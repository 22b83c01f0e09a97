"""The demonstration reaches the end of its timeline, stays up, and leaves nothing behind."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from support import eventually

from harness.runner import is_alive


@pytest.mark.timeout(180)
async def test_the_demo_reaches_its_end_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    with log.open("wb") as out:
        demo = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "towline.cli", "demo", stdout=out, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path
        )
    try:

        async def is_complete() -> bool:
            assert demo.returncode is None, log.read_text()
            return "Everything stays up" in log.read_text()

        await eventually(is_complete, within_s=120)
        started = psutil.Process(demo.pid).children(recursive=True)
        assert len(started) >= 9  # two stores, two gateways, two workers, two relays, a sidecar
        demo.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(demo.wait(), 30) == 0
        assert not any(map(is_alive, started))
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()
    assert "filled 1 time; the job's key has one answer" in log.read_text()
    assert "after 2 attempts: filled 1 time, finished model calls repeated 0, usage rows 1" in log.read_text()
    assert re.search(r"seen (\d+) events of \1: none missing, none twice, in order", log.read_text())
