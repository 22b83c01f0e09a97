"""The crowd of the fan-out rows, against small real servers: every delivery is counted, wherever the bytes were cut."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bench.crowd import OBSERVE_EVERY, Failed, open_crowd
from harness.bench.payload import STREAM_HEAD, event_frame, read_stamps, stamp_of

CLIENTS = OBSERVE_EVERY + 3


@contextlib.contextmanager
def serving(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Answer each connection in a thread of its own, once its request is there."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=[connection], daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            talk(connection)
            over.wait(20)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)


def deadline() -> float:
    return time.monotonic() + 20


def test_each_client_is_told_each_event_however_the_bytes_are_cut():
    sent_us = time.time_ns() // 1000
    stream = b"".join(event_frame(number, sent_us) for number in range(3))

    def talk(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = STREAM_HEAD + stream
        for at in range(0, len(answer), 37):
            connection.sendall(answer[at : at + 37])

    with serving(talk) as port, open_crowd(port, "/", {}) as crowd:
        crowd.connect(CLIENTS, deadline=deadline())
        crowd.deliver(3, deadline=deadline())

        assert [client.counted for client in crowd.clients] == [3] * CLIENTS
        assert len(crowd.connect_ms) == CLIENTS
        assert len(crowd.waits_ms) <= 3 * 2  # two observe; what came with the head is not looked into
        assert all(0 <= wait_ms < 20_000 for wait_ms in crowd.waits_ms)


def test_a_client_that_is_told_an_event_twice_ends_the_run():
    with (
        serving(lambda connection: connection.sendall(STREAM_HEAD + 2 * event_frame(0))) as port,
        open_crowd(port, "/", {}) as crowd,
    ):
        crowd.connect(2, deadline=deadline())
        with pytest.raises(Failed, match="told more than"):
            crowd.deliver(1, deadline=deadline())


def test_a_refused_client_ends_the_run():
    refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with serving(lambda connection: connection.sendall(refusal)) as port, open_crowd(port, "/", {}) as crowd:  # noqa: SIM117
        with pytest.raises(Failed, match="404"):
            crowd.connect(1, deadline=deadline())


def test_a_stream_that_is_closed_ends_the_run():
    def talk(connection: socket.socket) -> None:
        connection.sendall(STREAM_HEAD)
        connection.shutdown(socket.SHUT_WR)

    with serving(talk) as port, open_crowd(port, "/", {}) as crowd:
        crowd.connect(1, deadline=deadline())
        with pytest.raises(Failed, match="closed a stream"):
            crowd.deliver(1, deadline=deadline())


def test_a_client_that_is_told_nothing_ends_the_run_in_time():
    with serving(lambda connection: connection.sendall(STREAM_HEAD)) as port, open_crowd(port, "/", {}) as crowd:
        crowd.connect(1, deadline=deadline())
        with pytest.raises(Failed, match="not in time"):
            crowd.deliver(1, deadline=time.monotonic() + 0.2)


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=5), st.data())
def test_stamps_are_read_once_each_however_the_bytes_are_cut(sent_us, data):
    text = b"".join(event_frame(number, us) for number, us in enumerate(sent_us))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    times, rest = [], b""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found, rest = read_stamps(rest + text[start:end])
        times += found

    assert times == sent_us


def test_an_event_has_one_mark_and_is_known_by_its_stamp():
    frames = [event_frame(number) for number in (0, 1, 11, 111)]

    assert [frame.count(b"~") for frame in frames] == [1] * 4
    assert [sum(stamp_of(number) in frame for frame in frames) for number in (0, 1, 11, 111)] == [1] * 4
