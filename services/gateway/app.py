"""The gateway's composition root: what is built, in which order it starts and stops."""

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from common.ids import GatewayId, process_name
from common.process import health
from common.process.egress import Allowlist
from common.process.lifecycle import Lifecycle
from common.process.metrics import ProcessMetrics
from common.process.secrets import Secrets
from common.store import keys
from common.store.eventlog import EventLog
from common.store.jobs import Jobs
from common.store.postgres import open_postgres
from common.store.redis import open_redis
from common.store.requests import Requests
from common.store.runs import Runs
from common.store.tokens import Tokens
from gateway.auth import Auth
from gateway.fanout import Fanout
from gateway.http import Application
from gateway.jobs import JobRoutes
from gateway.keys import KeyRoutes
from gateway.machines import MachineRoutes
from gateway.metrics import GatewayMetrics
from gateway.routes import routes
from gateway.runs import RunRoutes
from gateway.settings import GatewaySettings, words_of
from gateway.stream import StreamRoutes
from gateway.stream_tokens import StreamTokens
from gateway.waiters import Waiters

logger = structlog.get_logger(__name__)

# What the last command to Redis may take; without it the stream goes by its time to live.
INBOX_DRAIN_S = 1.0
# After their window, what streams have for their last words.
STREAMS_CUT_S = 2.0


async def run(settings: GatewaySettings, lifecycle: Lifecycle, registry: CollectorRegistry) -> None:
    """Serve until the lifecycle drains, then leave within the budgets."""
    process_metrics = ProcessMetrics(registry, service="gateway")
    metrics = GatewayMetrics(registry)
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

        timing = keys.Timing(settings.heartbeat_s)
        requests = Requests(postgres, retention_s=settings.key_retention_s)
        jobs = Jobs(redis)
        tokens = Tokens(postgres)
        runs = Runs(postgres)
        log = EventLog(redis)
        stream_tokens = StreamTokens(words_of(settings.token_keys))
        auth = Auth(tokens, stream_tokens)
        gateway = GatewayId(process_name())
        waiters = Waiters(
            redis,
            jobs,
            requests,
            gateway=gateway,
            timing=timing,
            waiters_max=settings.waiters_max,
        )
        metrics.waiters.set_function(lambda: waiters.count)
        fanout = Fanout(
            redis,
            log,
            runs,
            gateway=gateway,
            take_notes=waiters.take,
            metrics=metrics,
            keepalive_s=settings.sse_keepalive_s,
            buffer_bytes=settings.sse_buffer_bytes,
        )
        table = routes(
            JobRoutes(
                auth=auth,
                redis=redis,
                jobs=jobs,
                requests=requests,
                tokens=tokens,
                waiters=waiters,
                timing=timing,
                metrics=metrics,
                is_strict=settings.idempotency == "strict",
            ),
            MachineRoutes(auth=auth, redis=redis, jobs=jobs, tokens=tokens, waiters=waiters, timing=timing),
            RunRoutes(
                auth=auth,
                redis=redis,
                runs=runs,
                egress=Allowlist.parse(settings.egress_allow),
                secrets=Secrets(words_of(settings.secret_keys)),
            ),
            StreamRoutes(auth=auth, runs=runs, log=log, fanout=fanout, tokens=stream_tokens),
            KeyRoutes(auth=auth, tokens=tokens),
        )
        application = Application(
            table, metrics=metrics, body_bytes_max=settings.body_bytes_max, cors_origins=settings.cors_origins
        )
        stop = asyncio.Event()
        loops = [
            group.create_task(waiters.run(), name="waiters"),
            group.create_task(fanout.run(), name="fanout"),
        ]
        public = health.open_listener(settings.http_host, settings.http_port)
        server = group.create_task(
            health.serve(
                application,
                public,
                stop=stop,
                budget_s=settings.drain_s,
                closing=lifecycle.draining,
                tls=settings.tls,
            ),
            name="http",
        )

        lifecycle.mark_ready()
        await lifecycle.draining.wait()
        # The door stays open while load balancers learn that this replica leaves.
        await asyncio.sleep(settings.unready_s)
        waiters.leave()
        # Before the server is told: it would wait for streams, and cut them off.
        await lifecycle.run_budgeted(
            "streams", fanout.drain(settings.sse_drain_s), settings.sse_drain_s + STREAMS_CUT_S
        )
        stop.set()
        await server
        for loop in loops:
            loop.cancel()
        await lifecycle.run_budgeted("inbox", fanout.close(), INBOX_DRAIN_S)
        lifecycle.mark_stopped()
