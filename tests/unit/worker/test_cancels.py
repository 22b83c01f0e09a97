"""Cancels: what a session does about a job that it waits with, has sent, or knows from the hello only."""

from collections.abc import Coroutine
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from common.ids import JobId, UserId
from common.store.jobs import Entry, Taken
from towline.wire import frames
from worker.delivery import Verb, Window
from worker.dispatch import Dispatch, Machine

JOB = JobId("0197a1c0-0000-7000-8000-000000000001")
NOW_MS = 1_000_000


def hinted(job: str, *, claimed: bool = False) -> Taken:
    """What a take (or, `claimed`, a claim) brings of a job without side effects."""
    entry = Entry(
        job=JobId(job),
        key="key",
        name="tool",
        args=msgspec.Raw(b"{}"),
        accepted_ms=NOW_MS,
        deadline_ms=10**13,
        timeout_s=120,
        hinted=True,
    )
    return Taken(entry, claimed, 100)


def planned(window: Window) -> list[str]:
    """The plan as text: `SEND a`, `MARK b`."""
    return [f"{verb.name} {entry.job}" for verb, entry in window.plan(NOW_MS)]


def test_a_job_in_doubt_is_marked_in_its_turn_and_alone() -> None:
    """It is refused if it has ended, and nothing overtakes it."""
    window = Window()
    window.add([hinted("a", claimed=True), hinted("b"), hinted("c"), hinted("d")])
    assert planned(window) == ["MARK a"]
    window.doubt(JobId("c"))
    window.marked(JobId("a"))
    assert window.result(JobId("a"), lane_busy=False)
    assert planned(window) == ["SEND b"]
    assert window.result(JobId("b"), lane_busy=False)
    assert planned(window) == ["MARK c"]
    window.refused(JobId("c"), parked=False)
    assert planned(window) == ["SEND d"]


def test_only_what_waits_is_in_doubt() -> None:
    """What the machine has is not marked again, and what is not here stays unknown."""
    window = Window()
    window.add_running([JobId("r")])
    window.doubt(JobId("r"))
    window.doubt(JobId("x"))
    assert window.is_running(JobId("r"))
    assert not window.is_running(JobId("x"))
    assert window.result(JobId("r"), lane_busy=False)
    assert not window.is_running(JobId("r"))
    window.add([hinted("a"), hinted("b")])
    assert [verb for verb, _ in window.plan(NOW_MS)] == [Verb.SEND] * 2
    window.doubt(JobId("a"))
    assert window.free_places() == 14, "one that flies is as it was"


class Socket:
    """A dispatch and what it sent."""

    def __init__(self) -> None:
        self.sent: list[frames.Frame] = []
        self.outcomes = Mock()
        self.dispatch = Dispatch(
            Machine(UserId("user"), "machine-1", "journal-1"),
            requests=Mock(),
            outcomes=self.outcomes,
            metrics=Mock(redeliveries_total={"claimed": Mock()}, job_seconds=Mock(__getitem__=Mock())),
            send=self.sent.append,
            spawn=_never,
            place_freed=Mock(),
        )

    def cancels(self) -> list[str]:
        return [frame.id for frame in self.sent if isinstance(frame, frames.JobCancel)]

    def settle(self) -> None:
        """What the last answer brought is durable and gone."""
        ending = self.outcomes.finish.call_args.args[2]
        ending.settled(ending.job)


def _never(work: Coroutine[Any, Any, None], _name: str) -> None:
    work.close()
    pytest.fail("nothing is to be marked")


def test_a_running_job_is_cancelled_when_its_machine_listens() -> None:
    """Before the welcome a sidecar reads nothing else; the note that came meanwhile is not lost."""
    socket = Socket()
    socket.dispatch.window.add_running([JOB])
    for _ in range(3):
        socket.dispatch.cancel(JOB)
    assert socket.cancels() == []
    socket.dispatch.welcomed()
    assert socket.cancels() == [""]


def test_a_machine_is_asked_once_for_each_delivery() -> None:
    """A burst of cancels is no flood; let go and delivered again, the job can be cancelled again."""
    socket = Socket()
    socket.dispatch.welcomed()
    for number in range(2):
        socket.dispatch.taken([hinted(JOB)])
        job = socket.sent[-1]
        assert isinstance(job, frames.Job)
        for _ in range(300):
            socket.dispatch.cancel(JOB)
        assert len(socket.cancels()) == number + 1
        assert socket.cancels()[-1] == job.id
        socket.dispatch.result(frames.JobResult(outcome="failed", id=job.id))
        socket.settle()
