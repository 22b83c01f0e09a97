"""Golden frames: what is on the wire today is what peers of tomorrow must read and write.

`golden/frames.json` holds each type of frame with all of its members, and once with as few as it has. A change of this
file is a change of the protocol: names, fields and codes are kept once shipped.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from towline.wire import frames

GOLDEN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("golden").joinpath("frames.json").read_text())
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
TOOL = frames.Tool(
    name="fill_form",
    description="Fills a form",
    input_schema={"type": "object", "properties": {"url": {"type": "string"}}},
    hints=frames.Hints(read_only=False, idempotent=True, destructive=True),
)

FROM_SIDECAR: dict[str, frames.FromSidecar] = {
    "hello": frames.Hello(machine="m-1", journal="j-1", name="laptop", version="0.1.0", tools=[TOOL], running=[JOB]),
    "hello, least": frames.Hello(machine="m-1", journal="j-1"),
    "job_result, completed": frames.JobResult(
        outcome="completed", id="f-1", result=msgspec.Raw(b'{"rows":[1,2.5,null,"\xc3\xa9"]}'), lane_busy=True
    ),
    "job_result, failed": frames.JobResult(
        outcome="failed",
        job=JOB,
        error=frames.Failure(code="timeout", message="took too long", retryable=True),
        replayed=True,
        mended=True,
    ),
    "job_result, unknown": frames.JobResult(
        outcome="unknown", id="f-1", error=frames.Failure(code="cut-off", message="may or may not have run")
    ),
    "status_result": frames.StatusResult(id="s-1", busy=True, queue=2, uptime_s=17.5),
    "tools": frames.Tools(tools=[TOOL, frames.Tool(name="echo")]),
    "ping": frames.Ping(n=7),
    "ping, least": frames.Ping(),
    "pong": frames.Pong(n=7),
    "goodbye": frames.Goodbye(),
}
FROM_WORKER: dict[str, frames.FromWorker] = {
    "welcome": frames.Welcome(
        session="s",
        epoch=1764000000000,
        heartbeat_s=10.0,
        max_frame_bytes=1114112,
        server_time=1764000000.25,
        user="ada",
    ),
    "job": frames.Job(
        id="f-1",
        job=JOB,
        idempotency_key="order-17",
        accepted_at="2026-11-29T12:00:00.000Z",
        name="fill_form",
        args=msgspec.Raw(b'{"url":"http://intranet/"}'),
        timeout_s=120.0,
        deadline_at="2026-11-29T12:05:00.000Z",
        attempt=2,
        hinted=True,
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ),
    "job, least": frames.Job(
        id="f-1",
        job=JOB,
        idempotency_key="order-17",
        accepted_at="2026-11-29T12:00:00.000Z",
        name="fill_form",
        args=msgspec.Raw(b"{}"),
        timeout_s=120.0,
        deadline_at="2026-11-29T12:05:00.000Z",
    ),
    "job_result_ack": frames.JobResultAck(jobs=[JOB]),
    "job_cancel": frames.JobCancel(id="f-1"),
    "status": frames.Status(id="s-1"),
    "token": frames.Token(token="tlm_fresh"),
    "ping": frames.Ping(n=7),
    "pong": frames.Pong(n=7),
    "draining": frames.Draining(),
}
CASES = [("from_sidecar", name, frame) for name, frame in FROM_SIDECAR.items()]
CASES += [("from_worker", name, frame) for name, frame in FROM_WORKER.items()]
DECODE: dict[str, Callable[[str], Any]] = {
    "from_sidecar": frames.decode_from_sidecar,
    "from_worker": frames.decode_from_worker,
}
ids = [f"{side}-{name}" for side, name, _ in CASES]


@pytest.mark.parametrize(("side", "name", "frame"), CASES, ids=ids)
def test_a_frame_is_the_golden_text(side: str, name: str, frame: frames.Frame) -> None:
    """Byte for byte: members in order, defaults left out."""
    assert frames.encode(frame) == GOLDEN[side][name]


@pytest.mark.parametrize(("side", "name", "frame"), CASES, ids=ids)
def test_the_golden_text_is_read_back(side: str, name: str, frame: frames.Frame) -> None:
    """By the peer that it is for."""
    assert DECODE[side](GOLDEN[side][name]) == frame


@pytest.mark.parametrize(("side", "name", "frame"), CASES, ids=ids)
def test_members_of_newer_peers_are_ignored(side: str, name: str, frame: frames.Frame) -> None:
    """Unknown members, nested ones too, in any order and with white space."""
    members = json.loads(GOLDEN[side][name])
    for tool in members.get("tools", []):
        tool["icon"] = {"type": "nonsense"}
    if "error" in members:
        members["error"]["cause"] = ["x"]
    newer = {"zz": [1, {"type": "hello"}], **dict(reversed(members.items())), "from": {"2030": None}}
    decoded = DECODE[side](json.dumps(newer, indent=1))
    if isinstance(frame, frames.Job):  # carried as it came, white space too
        assert json.loads(bytes(decoded.args)) == json.loads(bytes(frame.args))
        decoded.args = frame.args
    if isinstance(frame, frames.JobResult) and bytes(frame.result):
        assert json.loads(bytes(decoded.result)) == json.loads(bytes(frame.result))
        decoded.result = frame.result
    assert decoded == frame


def test_every_type_of_frame_is_golden() -> None:
    """A new frame without a golden text fails here, and so does a text without a frame."""
    assert {name: sorted(texts) for name, texts in GOLDEN.items()} == {
        "from_sidecar": sorted(FROM_SIDECAR),
        "from_worker": sorted(FROM_WORKER),
    }
    assert {type(frame) for frame in FROM_SIDECAR.values()} == set(frames.FromSidecar.__args__)
    assert {type(frame) for frame in FROM_WORKER.values()} == set(frames.FromWorker.__args__)


def test_constants_of_the_protocol() -> None:
    """Peers have these built in."""
    assert (frames.PATH, frames.SUBPROTOCOL) == ("/v1/bridge", "towline.v1")
    codes = {name: code for name, code in vars(frames.Close).items() if name.isupper()}
    assert codes == {
        "RESTARTING": 1012,
        "TRY_LATER": 1013,
        "NO_PONG": 4001,
        "TOO_SLOW": 4002,
        "OTHER_MACHINE": 4003,
        "TOKEN_REFUSED": 4500,
        "BAD_FRAME": 4501,
        "BAD_VERSION": 4502,
        "REPLACED": 4503,
    }
    # A result of 1 MiB and its envelope fit; arguments of 256 KiB and theirs too.
    assert frames.FRAME_BYTES_MAX >= frames.RESULT_BYTES_MAX + 64 * 1024
    assert frames.ARGS_BYTES_MAX == 256 * 1024
