"""The relay's composition root: what is built, in which order it starts and stops."""

import asyncio
from collections.abc import Callable, Mapping

import structlog
from prometheus_client import CollectorRegistry

from common.ids import RelayId, process_name
from common.process import health, http_server
from common.process.egress import Allowlist
from common.process.lifecycle import Lifecycle
from common.process.metrics import ProcessMetrics
from common.process.outbound import open_outbound
from common.process.secrets import Secrets
from common.process.settings import words_of
from common.store.eventlog import Appends
from common.store.leases import Leases
from common.store.postgres import open_postgres
from common.store.redis import open_redis
from common.store.runs import Runs, Source
from relay.gathering import Budget
from relay.holdings import Holdings
from relay.metrics import RelayMetrics
from relay.owner import Means
from relay.scan import Scan
from relay.settings import RelaySettings

logger = structlog.get_logger(__name__)


async def run(settings: RelaySettings, lifecycle: Lifecycle, registry: CollectorRegistry) -> None:
    """Serve until the lifecycle drains, then leave within the budget."""
    process_metrics = ProcessMetrics(registry, service="relay", revision=settings.revision)
    metrics = RelayMetrics(registry)
    admin = http_server.open_listener(settings.admin_host, settings.admin_port)
    async with (
        open_redis(settings.redis_url.get_secret_value()) as redis,
        open_postgres(settings.database_url.get_secret_value()) as postgres,
        open_outbound(Allowlist.parse(settings.egress_allow), settings.egress_proxy) as http,
        asyncio.TaskGroup() as group,
    ):
        checks = {"redis": redis.check, "postgres": postgres.check}
        group.create_task(
            health.serve_admin(admin, lifecycle=lifecycle, registry=registry, metrics=process_metrics, checks=checks),
            name="admin",
        )
        await health.wait_for_stores(checks)

        relay = RelayId(process_name())
        leases = Leases(redis, relay)
        means = Means(
            http=http,
            appends=Appends(redis),
            runs=Runs(postgres),
            budget=Budget(),
            metrics=metrics,
            read_headers=_headers_reader(Secrets(words_of(settings.secret_keys))),
        )
        holdings = Holdings(relay, leases, means, retention_s=settings.key_retention_s)
        scan = Scan(redis, leases, holdings, means)
        beats = group.create_task(holdings.run_beats(), name="beats")
        loops = [
            group.create_task(scan.run_listener(), name="listener"),
            group.create_task(scan.run_reads(), name="reads"),
            group.create_task(scan.run_looks(), name="looks"),
            group.create_task(holdings.run_upkeep(), name="upkeep"),
        ]
        try:
            lifecycle.mark_ready()
            logger.info("serving", relay=relay)  # the name that leases, and so the API, have for this process
            await lifecycle.draining.wait()
            for loop in loops:
                loop.cancel()
            # Leases are refreshed to the end: Redis may be slow, and what was read must still get in.
            await lifecycle.run_budgeted("runs", holdings.drain(), settings.drain_s)
            beats.cancel()
        finally:
            await holdings.close()
        lifecycle.mark_stopped()


def _headers_reader(secrets: Secrets) -> Callable[[Source], Mapping[str, str]]:
    def read(source: Source) -> Mapping[str, str]:
        return secrets.decrypt(source.secrets) if source.secrets else {}

    return read
