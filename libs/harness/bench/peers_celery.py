"""Celery on Redis, as a peer.

    python -m harness.bench.peers_celery work
    python -m harness.bench.peers_celery drive PLAN RESULT

Set up for many short tasks on two cores, as its manual has it: a pool of two processes, prefetch of 64, JSON, results
in Redis (told by publish/subscribe, not asked for), no gossip, mingle, heartbeat or events, no rate limits. Tasks are
acknowledged early, which is Celery's default and faster: a worker that dies loses what it had begun. (`--pool=solo` is
a tenth faster on tasks that do nothing, and runs one at a time.) Takes `REDIS_URL`.
"""

import os
import sys
import time
from collections import deque
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from harness.bench.load import Measured
from harness.bench.task_queues import READY, VALUE, Plan, WrongAnswer, read_plan, write_measured

POOL = 2
PREFETCH = 64

app = Celery("bench_celery", broker=os.environ.get("REDIS_URL"), backend=os.environ.get("REDIS_URL"))
app.conf.update(
    accept_content=["json"],
    broker_connection_retry_on_startup=True,
    result_expires=300,
    task_acks_late=False,
    task_default_queue="bench:celery",
    worker_disable_rate_limits=True,
    worker_prefetch_multiplier=PREFETCH // POOL,
    worker_send_task_events=False,
)


@app.task(name="echo")  # type: ignore[untyped-decorator]
def echo(value: str) -> str:
    """Give back the value."""
    return value


@worker_ready.connect  # type: ignore[untyped-decorator]
def _say_ready(**_: Any) -> None:
    print(READY, flush=True)


def work() -> None:
    """Run the workers until SIGTERM."""
    options = ["--pool=prefork", f"--concurrency={POOL}", "--loglevel=WARNING"]
    app.worker_main(["worker", *options, "--without-gossip", "--without-mingle", "--without-heartbeat"])


def drive(plan: Plan) -> Measured:
    """Keep `plan.in_flight` tasks out; the backend's own subscription says when one is done.

    Raises:
        TimeoutError: they were not all answered in time.
        WrongAnswer: one came back with something else.
    """
    latencies_ms: list[float] = []
    done: deque[Any] = deque()
    sent_at: dict[str, float] = {}

    def send() -> None:
        now = time.perf_counter()
        result = echo.delay(VALUE)
        sent_at[result.id] = now
        result.then(done.append)

    over_at, deadline = time.monotonic() + plan.seconds, time.monotonic() + plan.within_s
    cpu, began = time.process_time(), time.perf_counter()
    sent = min(plan.in_flight, plan.jobs)
    for _ in range(sent):
        send()
    while sent_at:
        if not done:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(sent_at)} of {sent} tasks were not answered")
            app.backend.result_consumer.drain_events(timeout=1)
            continue
        result = done.popleft()
        latencies_ms.append((time.perf_counter() - sent_at.pop(result.id)) * 1000)
        if result.result != VALUE:
            raise WrongAnswer(repr(result.result))
        if sent < plan.jobs and time.monotonic() < over_at:
            sent += 1
            send()
    return Measured(time.perf_counter() - began, time.process_time() - cpu, latencies_ms)


def main(role: str, plan_path: str = "", result_path: str = "") -> None:
    """Play one of the two."""
    if role == "work":
        work()
    else:
        write_measured(result_path, drive(read_plan(plan_path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
