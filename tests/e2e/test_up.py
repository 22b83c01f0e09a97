"""`towline up` as a person uses it: what it prints leads somewhere, it says which service has ended, and it leaves."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
from support import eventually

from harness.stack import inherited_environment

STARTS_WITHIN_S = 90.0
STOPS_WITHIN_S = 60.0


async def test_up_prints_what_is_there_says_what_ended_and_stops_when_told(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "towline.cli", "up", "--workers", "2"),
            cwd=tmp_path,
            env={**inherited_environment(), "COLUMNS": "200"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        await eventually(lambda: "Up until Ctrl-C." in out.read_text(), within_s=STARTS_WITHIN_S)
        lines = [line.split() for line in out.read_text().splitlines()]
        admins = {words[0]: words[-1] for words in lines if "/metrics:" in words}
        assert sorted(admins) == ["gateway-1", "relay-1", "worker-1", "worker-2"]
        exported = dict(words[1].split("=", 1) for words in lines if words[:1] == ["export"])
        async with httpx.AsyncClient() as http:
            for address in admins.values():
                assert (await http.get(f"{address}/readyz")).status_code == 200
                assert "towline_build_info" in (await http.get(f"{address}/metrics")).text
            headers = {"Authorization": f"Bearer {exported['TOWLINE_API_KEY']}"}
            runs = await http.get(f"{exported['TOWLINE_URL']}/v1/runs", headers=headers)
            assert runs.status_code == 200, runs.text

        logs = tmp_path / ".towline" / "up" / "stack"
        pids = {path.stem: int(path.read_text().split()[0]) for path in logs.glob("*.pid")}
        # Each is given its own settings only.
        assert not [path.name for path in logs.glob("*.log") if "settings_unknown" in path.read_text()]
        os.kill(pids["worker-2"], signal.SIGKILL)
        await eventually(lambda: f"worker-2 ended (signal 9); its log: {logs / 'worker-2.log'}" in err.read_text())
        assert "worker-1 ended" not in err.read_text()

        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), STOPS_WITHIN_S) == 0
        assert out.read_text().splitlines()[-1] == "stopped"
        assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
