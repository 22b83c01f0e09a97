"""The least that storing events can cost: XADD, pipelined by a hundred, of events that are already there.

    python -m harness.bench.bare_append PLAN RESULT

No upstream, no parser, no lease, no fence, no resume point, no heartbeat. `REDIS_URL` says where.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from harness.bench.observed import Account, Observed, Watched
from harness.bench.payload import EVENT_TYPE, event_data

BATCH = 100
STREAM = "bench:bare-append"
STREAM_MAXLEN = 10_000


class Plan(msgspec.Struct, frozen=True):
    """How many events. This process is the system; `watched` names the stores alone."""

    events: int
    watched: Watched
    within_s: float


async def append(plan: Plan) -> Observed:
    """Append them all. Raises: TimeoutError."""
    events: list[dict[Any, Any]] = [
        {"type": EVENT_TYPE, "uid": str(number), "data": event_data(number)} for number in range(plan.events)
    ]
    client = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], retry=Retry(NoBackoff(), 0))
    async with client, asyncio.timeout(plan.within_s):
        await client.ping()  # connected before it is measured
        account = Account(plan.watched)
        for at in range(0, len(events), BATCH):
            pipeline = client.pipeline(transaction=False)
            for event in events[at : at + BATCH]:
                pipeline.xadd(STREAM, event, maxlen=STREAM_MAXLEN, approximate=True)
            await pipeline.execute()
        observed = account.close(plan.events)
        await client.unlink(STREAM)
    return observed


def main(plan_path: str, result_path: str) -> None:
    """Run the plan of one file, and write what was observed to another."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    Path(result_path).write_bytes(msgspec.json.encode(asyncio.run(append(plan))))


if __name__ == "__main__":
    main(*sys.argv[1:])
