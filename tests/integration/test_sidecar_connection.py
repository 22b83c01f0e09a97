"""The sidecar against a stand-in worker: dialling, being refused, handing over, sleeping, leaving."""

import asyncio
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

import pytest
import sidecar_tools
from sidecar_hub import Hub
from sidecar_starts import Start, logged, open_sidecars
from support import eventually

from towline.sidecar import ConfigurationError, Sidecar, app, backoff
from towline.wire import frames


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as running:
        yield running


@pytest.fixture
async def start(hub: Hub, tmp_path: Path, executions: Path) -> AsyncIterator[Start]:
    async with open_sidecars(hub.url, tmp_path) as starter:
        yield starter


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """First pauses and looks at the token take a tenth of their time: all would be over within half a second."""
    monkeypatch.setattr(backoff, "BASE_S", backoff.BASE_S / 10)
    monkeypatch.setattr(backoff, "RESTART_SPREAD_S", backoff.RESTART_SPREAD_S / 10)
    monkeypatch.setattr(app, "TOKEN_POLL_S", app.TOKEN_POLL_S / 10)


async def test_a_restart_of_the_server_is_over_within_seconds(hub: Hub, start: Start) -> None:
    start()
    session = await hub.session()
    began = time.monotonic()
    await session.socket.close(1012, "restarting")
    await hub.session(2)
    assert time.monotonic() - began < 4


async def test_a_server_that_accepts_and_closes_is_not_stormed(hub: Hub, start: Start) -> None:
    hub.close_at_hello = (1012, "")
    start()
    await eventually(lambda: hub.hellos == 2)
    hub.close_at_hello = None
    await hub.session()
    assert 2 <= hub.handshakes[2] - hub.handshakes[1] < 5


async def test_stands_by_for_as_long_as_told(hub: Hub, start: Start) -> None:
    hub.close_at_hello = (4003, "1.5 another machine is connected")
    start()
    await eventually(lambda: hub.hellos == 1)
    hub.close_at_hello = None
    await hub.session()
    assert 1.5 <= hub.handshakes[1] - hub.handshakes[0] < 2.5


@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize("code", [4501, 4502, 4503])
async def test_codes_that_forbid_dialling_are_heeded_and_the_process_stays(hub: Hub, start: Start, code: int) -> None:
    async with logged() as lines:
        start()
        session = await hub.session()
        await session.socket.close(code, "no")
        await eventually(lambda: [line for line in lines if line["event"] == "stopped_dialling"])
    # Longer than the first pauses: it does not dial.
    await asyncio.sleep(0.5)
    assert len(hub.handshakes) == 1


async def test_a_replaced_old_socket_does_not_stop_the_new_one(hub: Hub, start: Start) -> None:
    """4503 is heeded only on the socket dialled last: here it comes on the one that is being handed over."""
    start()
    old = await hub.session()
    hub.may_welcome.clear()
    await old.send(frames.Draining())
    await eventually(lambda: len(hub.handshakes) == 2)
    await old.socket.close(4503, "replaced")
    hub.may_welcome.set()
    new = await hub.session(2)
    assert (await new.run("look", hinted=True)).outcome == "completed"


async def test_a_hand_over_serves_on_the_old_socket_until_the_new_one_is_welcomed(
    hub: Hub, start: Start, executions: Path
) -> None:
    start()
    old = await hub.session()
    hub.may_welcome.clear()
    await old.send(frames.Draining())
    await eventually(lambda: len(hub.handshakes) == 2)
    assert (await old.run("click", {"button": "during"}, job="during")).outcome == "completed"
    runs = await old.deliver("click_plain", job="runs")
    await eventually(lambda: "plain" in executions.read_text())
    await old.deliver("look", {"at": "waits"}, job="waits", hinted=True)
    hub.may_welcome.set()

    new = await hub.session(2)
    await asyncio.wait_for(old.closed.wait(), 5)
    assert old.socket.close_code == 1000
    assert not [frame for frame in old.received if isinstance(frame, frames.Goodbye)], "it has not left"
    again = await new.deliver("click_plain", job="runs", attempt=2)
    sidecar_tools.release.set()
    assert (await new.result(frame=again)).outcome == "completed"
    assert not old.results(frame=runs)
    assert executions.read_text() == "click during\nclick_plain\n"


async def test_a_silent_worker_is_noticed(hub: Hub, start: Start) -> None:
    """No pong within two heartbeats: the socket is dropped and dialled again, while TCP still believes in it."""
    hub.heartbeat_s = 0.2
    start()
    session = await hub.session()
    await eventually(lambda: [f for f in session.received if isinstance(f, frames.Ping)])
    await asyncio.sleep(0.6)
    assert not session.closed.is_set()
    session.answers_pings = False
    await asyncio.wait_for(session.closed.wait(), 2)
    await hub.session(2)


@pytest.mark.usefixtures("brisk")
async def test_a_refused_token_is_tried_three_times_and_a_new_one_needs_no_restart(
    hub: Hub, start: Start, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("old\n")
    hub.answer_upgrade = (HTTPStatus.UNAUTHORIZED, {})
    async with logged() as lines:
        start(token_file=token)
        await eventually(lambda: [line for line in lines if line["event"] == "needs_token"])
        assert hub.authorizations == {"Bearer old": 3}
        assert "old" not in str([line for line in lines if line["event"] != "needs_token"])
    # Longer than the first pauses: there is no fourth try.
    await asyncio.sleep(0.5)
    assert len(hub.handshakes) == 3
    hub.answer_upgrade = None
    token.write_text("new\n")
    await hub.session()
    assert hub.authorizations["Bearer new"] == 1


@pytest.mark.usefixtures("brisk")
async def test_a_revoked_token_stops_dialling(hub: Hub, start: Start) -> None:
    async with logged() as lines:
        start()
        session = await hub.session()
        await session.socket.close(4500, "revoked")
        await eventually(lambda: [line for line in lines if line["event"] == "needs_token"])
    # Longer than the first pauses: it does not dial.
    await asyncio.sleep(0.5)
    assert len(hub.handshakes) == 1


async def test_a_token_file_open_to_others_is_not_used(hub: Hub, start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o644)
    async with logged() as lines:
        start(token_file=token)
        await eventually(lambda: [line for line in lines if line["event"] == "token_unusable"])
        assert "chmod 600" in str(lines)
    assert not hub.handshakes
    token.chmod(0o600)
    await hub.session()


async def test_a_renewed_token_is_used_from_the_next_dial_and_stored(hub: Hub, start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("first")
    start(token_file=token)
    session = await hub.session()
    await session.send(frames.Token("second"))
    await eventually(lambda: token.read_text() == "second\n")
    assert token.stat().st_mode & 0o777 == 0o600
    await session.drop()
    await hub.session(2)
    assert hub.authorizations == {"Bearer first": 1, "Bearer second": 1}


@pytest.mark.parametrize("status", [HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE])
async def test_retry_after_is_honoured(hub: Hub, start: Start, status: HTTPStatus) -> None:
    hub.answer_upgrade = (status, {"Retry-After": "2"})
    start()
    await eventually(lambda: len(hub.handshakes) == 1)
    hub.answer_upgrade = None
    await hub.session()
    assert 2 <= hub.handshakes[1] - hub.handshakes[0] < 4


async def test_a_redirect_is_not_followed(hub: Hub, start: Start) -> None:
    async with Hub() as other:
        hub.answer_upgrade = (HTTPStatus.TEMPORARY_REDIRECT, {"Location": f"{other.url}{frames.PATH}"})
        start()
        await eventually(lambda: len(hub.handshakes) >= 2)
        assert not other.handshakes
    hub.answer_upgrade = None
    await hub.session()


async def test_comes_back_when_the_server_was_away(hub: Hub, start: Start) -> None:
    start()
    await hub.session()
    async with logged() as lines:
        await hub.stop()
        await eventually(lambda: [line for line in lines if line["event"] == "cannot_connect"])
    await hub.start()
    await hub.session(2)


async def test_after_a_sleep_all_sockets_are_dropped_and_nothing_starts(
    hub: Hub, start: Start, executions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lid closes while a job waits in the lane; on waking its turn comes at once, before any timer has fired."""
    start()
    first = await hub.session()
    await first.deliver("click_plain", job="runs")
    await eventually(executions.read_text)
    await first.deliver("look", {"at": "slept over"}, job="waits", hinted=True)
    await first.deliver("click", {"button": "slept over"}, job="waits too")
    await first.status()

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)
    sidecar_tools.release.set()
    await asyncio.wait_for(first.closed.wait(), 3)
    second = await hub.session(2)
    assert executions.read_text() == "click_plain\n"
    # Its end, kept, is told on the new socket; what waited comes again only if the server sends it.
    assert (await second.run("click_plain", job="runs", attempt=2)).replayed
    assert (await second.status()).queue == 0


async def test_stop_says_goodbye_and_closes(hub: Hub, start: Start) -> None:
    sidecar = start()
    session = await hub.session()
    sidecar.stop()
    await asyncio.wait_for(session.closed.wait(), 5)
    assert session.received[-1] == frames.Goodbye()
    assert session.socket.close_code == 1000


async def test_stop_lets_a_short_job_end_and_starts_no_other(hub: Hub, start: Start, executions: Path) -> None:
    sidecar = start(stop_budget_s=5.0)
    session = await hub.session()
    frame = await session.deliver("click", {"button": "short", "seconds": 0.5})
    await eventually(executions.read_text)
    await session.deliver("look", {"at": "never"}, job="waits", hinted=True)
    await session.status()
    await sidecar.ended()
    assert (await session.result(frame=frame)).outcome == "completed"
    assert executions.read_text() == "click short\n"


async def test_stop_leaves_a_long_job_which_is_then_unknown(hub: Hub, start: Start, executions: Path) -> None:
    sidecar = start(stop_budget_s=0.5)
    session = await hub.session()
    await session.deliver("click_plain")
    await eventually(executions.read_text)
    began = time.monotonic()
    await sidecar.ended()
    assert time.monotonic() - began < 8
    start()
    session = await hub.session(2)
    again = await session.run("click_plain", attempt=2)
    assert (again.outcome, again.replayed) == ("unknown", True)
    assert executions.read_text() == "click_plain\n"


async def test_stop_does_not_wait_for_a_coroutine_that_ignores_its_cancel(hub: Hub, start: Start) -> None:
    sidecar = start(stop_budget_s=0.2)
    session = await hub.session()
    await session.deliver("stubborn", {"seconds": 9}, hinted=True)
    assert (await session.status()).busy
    began = time.monotonic()
    await sidecar.ended()
    assert time.monotonic() - began < 6


@pytest.mark.parametrize(
    "url", ["http://host", "ws://example.com", "wss://", "wss://user:pw@host", "wss://host?x=1", ""]
)
def test_urls_that_would_betray_or_miss_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Sidecar(url=url, token="secret", state_dir=tmp_path, tools=[])
    assert "pw" not in str(raised.value)
