"""The gateway's composition root: what is built, in which order it starts and stops."""

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from common.ids import GatewayId, process_name
from common.process import health, http_server
from common.process.egress import Allowlist
from common.process.lifecycle import Lifecycle
from common.process.metrics import ProcessMetrics
from common.process.secrets import Secrets
from common.process.settings import words_of
from common.store import keys
from common.store.agents import Agents
from common.store.eventlog import EventLog
from common.store.jobs import Jobs
from common.store.postgres import DOOR_TIMEOUT_S, open_postgres
from common.store.redis import open_redis
from common.store.replies import Waiters
from common.store.requests import Requests
from common.store.runs import Runs
from common.store.threadlog import ThreadLog
from common.store.threads import Threads
from common.store.tokens import Tokens
from common.store.turns import Turns
from common.store.usage import Usage
from gateway.agents import AgentRoutes
from gateway.announcements import Announcements
from gateway.api_keys import ApiKeyRoutes
from gateway.auth import Auth
from gateway.fanout import Fanout
from gateway.http import Application
from gateway.jobs import JobRoutes
from gateway.machines import MachineRoutes
from gateway.metrics import GatewayMetrics
from gateway.routes import Handlers, routes
from gateway.runs import RunRoutes
from gateway.settings import GatewaySettings
from gateway.stream import StreamRoutes
from gateway.stream_token_routes import StreamTokenRoutes
from gateway.stream_tokens import StreamTokens
from gateway.threads import ThreadRoutes
from gateway.topics import Topics, stream_of
from gateway.turn_waiters import TurnWaiters
from gateway.turns import TurnRoutes
from gateway.usage import UsageRoutes

logger = structlog.get_logger(__name__)

# What was committed a moment ago is said within it, unless Redis is away: then the workers say it.
ANNOUNCEMENTS_DRAIN_S = 1.0
# What the last command to Redis may take; without it the stream goes by its time to live.
INBOX_DRAIN_S = 1.0
# After their window, what streams have for their last words.
STREAMS_CUT_S = 2.0


async def run(settings: GatewaySettings, lifecycle: Lifecycle, registry: CollectorRegistry) -> None:
    """Serve until the lifecycle drains, then leave within the budgets."""
    process_metrics = ProcessMetrics(registry, service="gateway", revision=settings.revision)
    metrics = GatewayMetrics(registry)
    admin = http_server.open_listener(settings.admin_host, settings.admin_port)
    async with (
        open_redis(settings.redis_url.get_secret_value()) as redis,
        open_postgres(settings.database_url.get_secret_value(), answer_timeout_s=DOOR_TIMEOUT_S) as postgres,
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
        threads = Threads(postgres, key_retention_s=settings.key_retention_s)
        turns = Turns(postgres)
        topics = Topics(runs)
        log = EventLog(redis, stream_of)
        stream_tokens = StreamTokens(words_of(settings.token_keys))
        auth = Auth(tokens, stream_tokens)
        gateway = GatewayId(process_name())
        waiters = Waiters(
            redis,
            jobs,
            requests,
            gateway=gateway,
            timing=timing,
        )
        fanout = Fanout(
            redis,
            log,
            topics,
            gateway=gateway,
            take_notes=waiters.take,
            lost_notes=waiters.renew,
            metrics=metrics,
            keepalive_s=settings.sse_keepalive_s,
            buffer_bytes=settings.sse_buffer_bytes,
        )
        turn_waiters = TurnWaiters(turns, log, fanout)

        def count_waiters() -> int:
            return waiters.count + turn_waiters.count

        def is_full() -> bool:
            return count_waiters() >= settings.waiters_max

        metrics.waiters.set_function(count_waiters)
        announcements = Announcements(ThreadLog(redis), turns)
        egress = Allowlist.parse(settings.egress_allow)
        secrets = Secrets(words_of(settings.secret_keys))
        handlers = Handlers(
            jobs=JobRoutes(
                auth=auth,
                redis=redis,
                jobs=jobs,
                requests=requests,
                tokens=tokens,
                waiters=waiters,
                is_full=is_full,
                timing=timing,
                metrics=metrics,
                is_strict=settings.idempotency == "strict",
            ),
            machines=MachineRoutes(auth=auth, redis=redis, jobs=jobs, tokens=tokens, waiters=waiters, timing=timing),
            runs=RunRoutes(auth=auth, redis=redis, runs=runs, egress=egress, secrets=secrets),
            streams=StreamRoutes(auth=auth, topics=topics, threads=threads, log=log, fanout=fanout),
            stream_tokens=StreamTokenRoutes(auth=auth, threads=threads, tokens=stream_tokens),
            threads=ThreadRoutes(
                auth=auth,
                threads=threads,
                turns=turns,
                announcements=announcements,
                is_strict=settings.idempotency == "strict",
            ),
            turns=TurnRoutes(
                auth=auth,
                turns=turns,
                waiters=turn_waiters,
                is_full=is_full,
                announcements=announcements,
                metrics=metrics,
            ),
            usage=UsageRoutes(auth=auth, usage=Usage(postgres)),
            agents=AgentRoutes(auth=auth, agents=Agents(postgres), egress=egress, secrets=secrets),
            keys=ApiKeyRoutes(auth=auth, tokens=tokens),
        )
        application = Application(
            routes(handlers),
            metrics=metrics,
            body_bytes_max=settings.body_bytes_max,
            cors_origins=settings.cors_origins,
        )
        stop = asyncio.Event()
        loops = [
            group.create_task(waiters.run(), name="waiters"),
            group.create_task(turn_waiters.run(), name="turn-waiters"),
            group.create_task(announcements.run(), name="announcements"),
            group.create_task(fanout.run(), name="fanout"),
        ]
        public = http_server.open_listener(settings.http_host, settings.http_port)
        server = group.create_task(
            http_server.serve(
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
        turn_waiters.leave()
        # Before the server is told: it would wait for streams, and cut them off.
        await lifecycle.run_budgeted(
            "streams", fanout.drain(settings.sse_drain_s), settings.sse_drain_s + STREAMS_CUT_S
        )
        stop.set()
        await server
        await lifecycle.run_budgeted("announcements", announcements.flush(), ANNOUNCEMENTS_DRAIN_S)
        for loop in loops:
            loop.cancel()
        await lifecycle.run_budgeted("inbox", fanout.close(), INBOX_DRAIN_S)
        lifecycle.mark_stopped()
