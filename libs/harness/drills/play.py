"""Play a drill on a target: a scene of its own, the scenario, then the question whether all is as before.

Used by:  `towline drill` and tests/recovery/test_*drills.py.
"""

import time
from collections.abc import Callable, Iterator

from common.errors import StoreUnavailable
from common.ids import new_id
from common.store.redis import open_redis
from harness.drills.caller import Caller
from harness.drills.catalogue import DRILLS
from harness.drills.evidence import Evidence
from harness.drills.report import Report
from harness.drills.scene import Scene
from harness.drills.target import DrillFailed, Target


async def play(
    name: str,
    target: Target,
    tell: Callable[[str], None],
    *,
    patience: float = 1.0,
    clients: int = 500,
    slow_s: float = 32.0,
) -> Report:
    """Play one drill once, with users that nobody has seen before; the target is healthy again when it returns.

    Args:
        tell: takes the lines of the timeline.
        patience: times every limit of time.
        clients: how many watch one run where it is to be many.
        slow_s: how long an answer takes where it is to take long.

    Raises:
        DrillFailed: the target could not be made healthy again.
    """
    report = Report(name)
    began = time.monotonic()
    caller = Caller(target.api_key, target.gateways)
    async with open_redis(target.redis_url) as redis:
        evidence = Evidence(target.postgres_url, redis)
        scene = Scene(
            target,
            caller,
            evidence,
            report,
            run=new_id()[-8:],
            tell=tell,
            patience=patience,
            clients=clients,
            slow_s=slow_s,
        )
        try:
            await DRILLS[name](scene)
            await scene.expect_health()
            await scene.expect_goodbyes()
        except* (DrillFailed, StoreUnavailable) as failures:
            for failure in _leaves(failures):
                scene.check("the drill goes on", "to its end", failure, is_met=False)
        finally:
            try:
                await target.heal()
            finally:
                # What the scene ends, it ends through the product.
                await scene.close()
                await caller.close()
    report.took_s = time.monotonic() - began
    return report


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
