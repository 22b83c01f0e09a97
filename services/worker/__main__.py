"""`python -m worker`: read the environment once, then serve."""

# ruff: noqa: E402
import os
import signal
import sys

# Loading the rest takes half a second and more, and process 1 of a container does not hear a signal that it has not
# asked for: told to stop in that time, it would be killed at the end of its grace period. Nothing is begun yet.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

import structlog

from common.process import logs
from common.process.lifecycle import run_service
from common.process.metrics import new_registry
from common.process.settings import SettingsError, load, unknown_variables
from worker.app import run
from worker.settings import WorkerSettings

logger = structlog.get_logger(__name__)


def main() -> int:
    """Run a worker to its end; returns the exit code (2: the settings are wrong)."""
    try:
        settings = load(WorkerSettings)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logs.configure(service="worker", level=settings.log_level, log_format=settings.log_format)
    if unknown := unknown_variables(WorkerSettings):
        logger.warning("settings_unknown", names=unknown)
    registry = new_registry()
    return run_service(lambda lifecycle: run(settings, lifecycle, registry))


if __name__ == "__main__":
    sys.exit(main())
