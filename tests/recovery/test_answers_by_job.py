"""What a hello lists as running is answered by job on that socket, whatever became of it meanwhile (rule 3a).

The worker holds the user's lane for it: a listed job without an answer blocks all behind it until the socket ends.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sidecar_tools
from sidecar_hub import Hub
from support import eventually

from towline.sidecar import Sidecar
from towline.wire import frames


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    """A hub with one sidecar, whose tools note what they do."""
    monkeypatch.setenv("EXECUTIONS", str(tmp_path / "executions"))
    async with Hub() as hub:
        sidecar = Sidecar(url=hub.url, token="secret", state_dir=tmp_path / "state", tools=sidecar_tools.ALL)
        running = asyncio.create_task(sidecar.run())
        yield hub
        sidecar.stop()
        await running


@pytest.mark.parametrize(("tool", "hinted"), [("look", True), ("click", False)])
async def test_job_acknowledged_during_a_hand_over_is_answered_on_the_new_socket(
    hub: Hub, tool: str, hinted: bool
) -> None:
    """The worker drains. The job ends and is acknowledged on the old socket, after the new one's hello listed it.

    The outcome is gone from the machine then; the new worker still waits, and its record decides what counts.
    """
    old = await hub.session()
    frame = await old.deliver(tool, {"seconds": 0.5} if hinted else {"button": "go", "seconds": 0.5}, hinted=hinted)
    await eventually(lambda: Path(sidecar_tools.os.environ["EXECUTIONS"]).exists())
    hub.may_welcome.clear()
    await old.send(frames.Draining())
    await eventually(lambda: hub.hellos == 2)
    assert (await old.result(frame=frame)).outcome == "completed"
    await old.send(frames.JobResultAck(["job-1"]))
    await old.status()  # what was sent before it has been read
    hub.may_welcome.set()

    new = await hub.session(2)
    assert new.hello.running == ["job-1"]
    answer = await new.result(job="job-1")
    assert answer.outcome in ("completed", "unknown")
    assert not answer.lane_busy
