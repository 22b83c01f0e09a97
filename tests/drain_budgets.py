"""How long each service may take to leave: what grace periods of manifests and Compose files are held against."""

from common.process import health, http_server
from common.process.lifecycle import CANCEL_GRACE_S
from common.process.settings import CommonSettings
from gateway import app as gateway_app
from gateway.settings import GatewaySettings
from relay.settings import RelaySettings
from worker import app as worker_app
from worker.settings import WorkerSettings

# Pools, the admin port and the interpreter; what was cancelled has its own grace.
CLOSING_S = 2.0 + health.ADMIN_CLOSE_S + 2 * http_server.CUT_GRACE_S + CANCEL_GRACE_S


def drain_budget_s(settings: CommonSettings) -> float:
    """The longest that a service takes from SIGTERM to its exit, step by step as in its app.py."""
    match settings:
        case GatewaySettings():
            streams_s = settings.sse_drain_s + gateway_app.STREAMS_CUT_S
            last_s = gateway_app.ANNOUNCEMENTS_DRAIN_S + gateway_app.INBOX_DRAIN_S
            return settings.unready_s + streams_s + settings.drain_s + last_s + CLOSING_S
        case WorkerSettings():
            last_s = worker_app.OUTCOMES_DRAIN_S + worker_app.INBOX_DRAIN_S
            return worker_app.TURNS_DRAIN_S + settings.drain_s + last_s + CLOSING_S
        case RelaySettings():
            return settings.drain_s + CLOSING_S
    raise AssertionError(settings)
