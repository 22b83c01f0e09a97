"""The driver of idle memory: a crowd that listens to a stream on which nothing happens.

    python -m harness.bench.idle PLAN RESULT

Some clients come first and are not counted: they pay for what a process allocates once. The memory is read when the
system has come to rest after the rest have come; what it costs to take a client is observed along the way.
"""

import sys
import time
from pathlib import Path

import msgspec

from harness.bench.crowd import Failed, open_crowd
from harness.bench.deliver import wait_until_quiet
from harness.bench.observed import Account, Observed, Watched, memory_kib


class Plan(msgspec.Struct, frozen=True):
    """Who listens to what; see `harness.bench.deliver.Plan`. `first`: how many come before the memory is read."""

    port: int
    path: str
    headers: dict[str, str]
    first: int
    clients: int
    watched: Watched
    within_s: float


def run(plan: Plan) -> Observed:
    """Connect, come to rest, look. Raises: Failed, OSError."""
    deadline = time.monotonic() + plan.within_s
    with open_crowd(plan.port, plan.path, plan.headers) as crowd:
        crowd.connect(plan.first, deadline=deadline)
        wait_until_quiet(crowd, plan.watched, deadline=deadline)
        before = memory_kib(plan.watched.system)
        crowd.connect_ms.clear()
        account = Account(plan.watched)
        crowd.connect(plan.clients, deadline=deadline)
        taken = account.close(plan.clients, crowd.connect_ms)
        wait_until_quiet(crowd, plan.watched, deadline=deadline)
        after = memory_kib(plan.watched.system)
    grown = {name: after[name] - before[name] for name in before}
    return msgspec.structs.replace(taken, memory_kib=grown)


def main(plan_path: str, result_path: str) -> int:
    """Run the plan of one file, and write what was observed to another."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    try:
        observed = run(plan)
    except (Failed, OSError) as error:
        print(f"idle: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    Path(result_path).write_bytes(msgspec.json.encode(observed))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
