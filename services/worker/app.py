"""The worker's composition root: what is built, in which order it starts and stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import structlog
from prometheus_client import CollectorRegistry

from common.ids import GatewayId, WorkerId, process_name
from common.process import health, http_server
from common.process.egress import Allowlist
from common.process.lifecycle import Lifecycle
from common.process.metrics import ProcessMetrics
from common.process.outbound import open_outbound
from common.process.secrets import Secrets
from common.process.settings import words_of
from common.store import keys
from common.store.agents import Agents
from common.store.claims import Claims
from common.store.control import control_inbox
from common.store.jobs import Jobs
from common.store.postgres import Postgres, open_postgres
from common.store.redis import Redis, open_redis
from common.store.replies import Waiters
from common.store.requests import Requests
from common.store.threadlog import ThreadLog
from common.store.threads import Threads
from common.store.tokens import Tokens
from common.store.turns import Turns
from common.store.usage import Usage
from towline.wire.threads import AgentKind
from worker.agents import Answering
from worker.agents.echo import EchoAgent
from worker.agents.http import HttpAgent
from worker.handling import Handling
from worker.metrics import WorkerMetrics
from worker.net import TurnNet
from worker.outcomes import Outcomes
from worker.pump import Pump
from worker.replies import Replies
from worker.settings import WorkerSettings
from worker.sockets import Sockets
from worker.sweeper import Sweeper
from worker.tool_calls import ToolCalls
from worker.turns import TurnLoop

logger = structlog.get_logger(__name__)

# A store that is back within this long still gets what machines have answered.
OUTCOMES_DRAIN_S = 5.0
# What the last commands to Redis may take; without them the streams go by their time to live.
INBOX_DRAIN_S = 1.0
# Giving turns back is one statement each; those that are not given back lapse.
TURNS_DRAIN_S = 4.0


class Worker:
    """What both roles are built of."""

    def __init__(
        self,
        settings: WorkerSettings,
        lifecycle: Lifecycle,
        redis: Redis,
        postgres: Postgres,
        metrics: WorkerMetrics,
    ) -> None:
        self.settings = settings
        self.lifecycle = lifecycle
        self.redis = redis
        self.postgres = postgres
        self.metrics = metrics
        self.name = WorkerId(process_name())
        self.timing = keys.Timing(settings.heartbeat_s)
        self.requests = Requests(postgres, retention_s=settings.key_retention_s)
        self.jobs = Jobs(redis)
        self.tokens = Tokens(postgres)


async def run(settings: WorkerSettings, lifecycle: Lifecycle, registry: CollectorRegistry) -> None:
    """Serve until the lifecycle drains, then leave within the budgets."""
    process_metrics = ProcessMetrics(registry, service="worker", revision=settings.revision)
    metrics = WorkerMetrics(registry)
    admin = http_server.open_listener(settings.admin_host, settings.admin_port)
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

        worker = Worker(settings, lifecycle, redis, postgres, metrics)
        async with contextlib.AsyncExitStack() as roles:
            # The last one leaves first: turns are given back before sockets, whose results they may be waiting for.
            if "bridge" in settings.roles:
                await roles.enter_async_context(_bridge(worker, group))
            if "turns" in settings.roles:
                await roles.enter_async_context(_turns(worker, group))
            lifecycle.mark_ready()
            # The name that presence, and so the API, has for this process.
            logger.info("serving", worker=worker.name, roles=settings.roles)
            await lifecycle.draining.wait()
        lifecycle.mark_stopped()


@contextlib.asynccontextmanager
async def _bridge(worker: Worker, group: asyncio.TaskGroup) -> AsyncIterator[None]:
    """The sockets of machines, and the sweeper of jobs."""
    settings, lifecycle, redis, metrics = worker.settings, worker.lifecycle, worker.redis, worker.metrics
    sweeper = Sweeper(worker.requests, worker.jobs, metrics)
    inbox = control_inbox(redis, worker.name)
    pump = Pump(redis, inbox, worker.tokens, worker.timing, metrics, sweep=sweeper.hurry)
    outcomes = Outcomes(worker.requests, worker.jobs, metrics, bytes_max=settings.outcomes_pending_bytes_max)
    sockets = Sockets(
        settings,
        lifecycle,
        worker.name,
        redis=redis,
        tokens=worker.tokens,
        requests=worker.requests,
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
    async with sockets.listening(http_server.open_listener(settings.bridge_host, settings.bridge_port)):
        yield
        await lifecycle.run_budgeted("sockets", sockets.drain(), settings.drain_s)
    await lifecycle.run_budgeted("outcomes", outcomes.drain(), OUTCOMES_DRAIN_S)
    await outcomes.close()
    for loop in loops:
        loop.cancel()
    await lifecycle.run_budgeted("inbox", inbox.remove(), INBOX_DRAIN_S)


@contextlib.asynccontextmanager
async def _turns(worker: Worker, group: asyncio.TaskGroup) -> AsyncIterator[None]:
    """The turns of threads, and their net."""
    # It takes a second to import, which a worker for sockets alone need not spend.
    from worker.agents.openai import OpenAIAgent  # noqa: PLC0415

    settings, redis, metrics = worker.settings, worker.redis, worker.metrics
    claims, turns = Claims(worker.postgres), Turns(worker.postgres)
    threads = Threads(worker.postgres, key_retention_s=settings.key_retention_s)
    log = ThreadLog(redis)
    replies_name = GatewayId(worker.name)
    waiters = Waiters(
        redis,
        worker.jobs,
        worker.requests,
        gateway=replies_name,
        timing=worker.timing,
    )
    replies = Replies(redis, waiters, replies_name)
    allowlist = Allowlist.parse(settings.egress_allow)
    secrets = Secrets(words_of(settings.secret_keys))
    async with (
        open_outbound(allowlist, settings.egress_proxy) as endpoints,
        open_outbound(allowlist, settings.egress_proxy) as models,
    ):
        kinds: Mapping[AgentKind, Answering] = {
            "echo": EchoAgent(),
            "http": HttpAgent(endpoints, secrets),
            "openai": OpenAIAgent(models, secrets),
        }
        handling = Handling(
            claims=claims,
            turns=turns,
            threads=threads,
            agents=Agents(worker.postgres),
            tokens=worker.tokens,
            log=log,
            tool_calls=ToolCalls(
                redis=redis,
                jobs=worker.jobs,
                requests=worker.requests,
                waiters=waiters,
                timing=worker.timing,
                metrics=metrics,
            ),
            kinds=kinds,
            metrics=metrics,
        )
        loop = TurnLoop(worker.name, claims, handling, slots=settings.turn_slots)
        net = TurnNet(
            claims=claims, turns=turns, threads=threads, usage=Usage(worker.postgres), log=log, metrics=metrics
        )
        loops = [
            group.create_task(waiters.run(), name="waiters"),
            group.create_task(replies.run(), name="replies"),
            group.create_task(loop.run(), name="turns"),
            group.create_task(net.run(), name="turns-net"),
        ]
        yield
        await worker.lifecycle.run_budgeted("turns", loop.drain(), TURNS_DRAIN_S)
        for each in loops:
            each.cancel()
        await worker.lifecycle.run_budgeted("replies", replies.remove(), INBOX_DRAIN_S)
