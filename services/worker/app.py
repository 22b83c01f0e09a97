"""The worker's composition root: what is built, in which order it starts and stops."""

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from common.ids import WorkerId, process_name
from common.process import health
from common.process.lifecycle import Lifecycle
from common.process.metrics import ProcessMetrics
from common.store import keys
from common.store.control import control_inbox
from common.store.jobs import Jobs
from common.store.postgres import open_postgres
from common.store.redis import open_redis
from common.store.requests import Requests
from common.store.tokens import Tokens
from worker.metrics import WorkerMetrics
from worker.outcomes import Outcomes
from worker.pump import Pump
from worker.settings import WorkerSettings
from worker.sockets import Sockets
from worker.sweeper import Sweeper

logger = structlog.get_logger(__name__)

# A store that is back within this long still gets what machines have answered.
OUTCOMES_DRAIN_S = 5.0
# What the last command to Redis may take; without it the stream goes by its time to live.
INBOX_DRAIN_S = 1.0


async def run(settings: WorkerSettings, lifecycle: Lifecycle, registry: CollectorRegistry) -> None:
    """Serve until the lifecycle drains, then leave within the budgets."""
    process_metrics = ProcessMetrics(registry, service="worker")
    metrics = WorkerMetrics(registry)
    admin = health.open_listener(settings.admin_host, settings.admin_port)
    async with (
        open_redis(settings.redis_url.get_secret_value()) as redis,
        open_postgres(settings.database_url.get_secret_value()) as postgres,
        asyncio.TaskGroup() as group,
    ):
        checks = {"redis": redis.check, "postgres": postgres.check}
        group.create_task(
            health.serve_admin(admin, lifecycle=lifecycle, registry=registry, metrics=process_metrics, checks=checks),
            name="admin",
        )
        await health.wait_for_stores(checks)

        worker = WorkerId(process_name())
        requests = Requests(postgres, retention_s=settings.key_retention_s)
        jobs = Jobs(redis)
        tokens = Tokens(postgres)
        sweeper = Sweeper(requests, jobs, metrics)
        inbox = control_inbox(redis, worker)
        pump = Pump(redis, inbox, tokens, keys.Timing(settings.heartbeat_s), metrics, sweep=sweeper.hurry)
        outcomes = Outcomes(requests, jobs, metrics, bytes_max=settings.outcomes_pending_bytes_max)
        sockets = Sockets(
            settings,
            lifecycle,
            worker,
            redis=redis,
            tokens=tokens,
            requests=requests,
            outcomes=outcomes,
            pump=pump,
            metrics=metrics,
        )
        loops = [
            group.create_task(pump.run_inbox(), name="pump-inbox"),
            group.create_task(pump.run_calls(), name="pump-calls"),
            group.create_task(pump.run_beats(), name="pump-beats"),
            group.create_task(pump.run_upkeep(), name="pump-upkeep"),
            group.create_task(sweeper.run(), name="sweeper"),
        ]
        async with sockets.listening(health.open_listener(settings.bridge_host, settings.bridge_port)):
            lifecycle.mark_ready()
            logger.info("serving", worker=worker)  # the name that presence, and so the API, has for this process
            await lifecycle.draining.wait()
            await lifecycle.run_budgeted("sockets", sockets.drain(), settings.drain_s)
        await lifecycle.run_budgeted("outcomes", outcomes.drain(), OUTCOMES_DRAIN_S)
        await outcomes.close()
        for loop in loops:
            loop.cancel()
        await lifecycle.run_budgeted("inbox", inbox.remove(), INBOX_DRAIN_S)
        lifecycle.mark_stopped()
