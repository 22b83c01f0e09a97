"""The driver of fan-out: a crowd that listens, and a publisher.

    python -m harness.bench.deliver PLAN RESULT

Observes from the first event until each client has each event. At a pace, the next event leaves when its time has come
and every client has the last one: so each wakes everybody by itself, however slow the machine is just now. Ends with 1,
and one line that says why, when a client was not served.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from harness.bench import publish
from harness.bench.cpu import cpu_seconds
from harness.bench.crowd import Crowd, Failed, open_crowd
from harness.bench.observed import Account, Observed, Watched

# A system that has just taken a thousand clients is busy with them for a while, and that is not what is measured.
QUIET_SHARE = 0.1
QUIET_FOR_S = 0.3


class Plan(msgspec.Struct, frozen=True):
    """Who listens to what.

    Attributes:
        port, path, headers: of the stream, on the loopback address.
        clients: how many listen to it.
        published: what it is fed with; each client is to get all of it.
        per_s: events per second at most, where they are published one by one.
        within_s: for everything.
    """

    port: int
    path: str
    headers: dict[str, str]
    clients: int
    published: publish.Plan
    per_s: float
    watched: Watched
    within_s: float


def run(plan: Plan, publisher_plan: Path) -> Observed:
    """Connect, publish, read. Raises: Failed, OSError."""
    deadline = time.monotonic() + plan.within_s
    with (
        open_crowd(plan.port, plan.path, plan.headers) as crowd,
        _publisher(plan.published, publisher_plan) as publisher,
    ):
        crowd.connect(plan.clients, deadline=deadline)
        wait_until_quiet(crowd, plan.watched, deadline=deadline)
        account, began = Account(plan.watched), time.monotonic()
        at_a_time = 1 if plan.published.one_by_one else plan.published.events
        for told in range(0, plan.published.events, at_a_time):
            if plan.published.one_by_one:
                crowd.drain(began + told / plan.per_s - time.monotonic())
            assert publisher.stdin is not None
            publisher.stdin.write(b"go\n")
            publisher.stdin.flush()
            crowd.deliver(told + at_a_time, deadline=deadline)
        return account.close(plan.clients * plan.published.events, crowd.waits_ms)


def wait_until_quiet(crowd: Crowd, watched: Watched, *, deadline: float) -> None:
    """Read on until the system has done next to nothing for a moment. Raises: Failed."""
    used_s = QUIET_FOR_S
    while used_s > QUIET_SHARE * QUIET_FOR_S:
        if time.monotonic() > deadline:
            raise Failed("the system did not come to rest after its clients had connected")
        before = sum(cpu_seconds(watched.system).values())
        crowd.drain(QUIET_FOR_S)
        used_s = sum(cpu_seconds(watched.system).values()) - before


@contextmanager
def _publisher(plan: publish.Plan, path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    path.write_bytes(msgspec.json.encode(plan))
    with subprocess.Popen(
        [sys.executable, "-m", "harness.bench.publish", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().decode().strip() != publish.READY:
                raise Failed("the publisher did not get ready")
            yield process
        finally:
            process.kill()
            path.unlink()


def main(plan_path: str, result_path: str) -> int:
    """Run the plan of one file, and write what was observed to another."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    try:
        observed = run(plan, Path(plan_path).with_suffix(".publisher.json"))
    except (Failed, OSError) as error:
        print(f"deliver: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    Path(result_path).write_bytes(msgspec.json.encode(observed))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
