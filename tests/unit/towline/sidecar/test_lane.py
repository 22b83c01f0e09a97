"""What a socket that is being left still delivers, and what it delivered before, does not start."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from towline.sidecar import tool
from towline.sidecar.journal import Journal
from towline.sidecar.lane import Lane
from towline.sidecar.memory import Memory
from towline.sidecar.tools import Registry
from towline.sidecar.work import Delivery
from towline.wire import frames

NEVER = time.time() + 3600


class Asker:
    """The end of a socket: what it would send is kept."""

    user = "ada"

    def __init__(self) -> None:
        self.starts_jobs = True
        self.sent: list[frames.Frame] = []

    def send(self, frame: frames.Frame) -> None:
        self.sent.append(frame)

    def server_now(self) -> float:
        return time.time()


class Machine:
    """A lane with one tool.

    Attributes:
        ran: the jobs whose tool was called.
        is_awake: what the clocks say.
    """

    def __init__(self, journal: Journal) -> None:
        self.ran: list[str] = []
        self.is_awake = True
        self.may_return = asyncio.Event()

        @tool(read_only=True)
        async def act(job: str) -> None:
            self.ran.append(job)
            await self.may_return.wait()

        self.lane = Lane(Registry([act]), Memory(journal), is_awake=lambda: self.is_awake)

    def deliver(self, asker: Asker, job: str) -> None:
        args = msgspec.Raw(msgspec.json.encode({"job": job}))
        frame = frames.Job(f"f-{job}", job, "k", "", "act", args, timeout_s=30, deadline_at="", hinted=True)
        self.lane.deliver(Delivery(asker, frame, time.time(), NEVER))


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    journal = Journal(tmp_path / "journal.db")
    machine = Machine(journal)
    yield machine
    machine.may_return.set()
    await machine.lane.leave(5)
    await journal.aclose()


async def one_step() -> None:
    """Let what can run now run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_socket_that_is_being_left_starts_nothing(machine: Machine) -> None:
    """Its frames may still be in a buffer when it was given up: they come again by the next socket."""
    left, next_one = Asker(), Asker()
    left.starts_jobs = False
    machine.deliver(left, "job-1")
    await one_step()
    assert (machine.ran, left.sent, machine.lane.queue) == ([], [], 0)
    machine.deliver(next_one, "job-1")
    await one_step()
    assert machine.ran == ["job-1"]


async def test_what_waits_is_forgotten_with_its_socket_and_the_rest_moves_up(machine: Machine) -> None:
    left, stays = Asker(), Asker()
    machine.deliver(stays, "runs")
    machine.deliver(left, "forgotten")
    machine.deliver(stays, "next")
    await one_step()
    machine.lane.forget(left)
    assert machine.lane.queue == 1
    machine.may_return.set()
    await one_step()
    assert machine.ran == ["runs", "next"]
    assert left.sent == []


async def test_nothing_starts_when_the_clocks_tell_of_a_sleep(machine: Machine) -> None:
    """Neither at once nor from the queue; nor is it answered: the server sends it again after the next welcome."""
    asker = Asker()
    machine.deliver(asker, "runs")
    machine.deliver(asker, "waits")
    await one_step()
    machine.is_awake = False
    machine.may_return.set()
    await one_step()
    assert machine.ran == ["runs"]
    assert len(asker.sent) == 1
    machine.lane.forget(asker)
    machine.deliver(asker, "at-once")
    await one_step()
    assert machine.ran == ["runs"]
