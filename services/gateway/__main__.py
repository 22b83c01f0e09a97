"""`python -m gateway`: read the environment once, then serve."""

# ruff: noqa: E402
import os
import signal
import sys

# Loading the rest takes half a second and more, and process 1 of a container does not hear a signal that it has not
# asked for: told to stop in that time, it would be killed at the end of its grace period. Nothing is begun yet.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

from common.process import logs
from common.process.lifecycle import run_service
from common.process.metrics import new_registry
from common.process.settings import SettingsError, load
from gateway.app import run
from gateway.settings import GatewaySettings


def main() -> int:
    """Run a gateway to its end; returns the exit code (2: the settings are wrong)."""
    try:
        settings = load(GatewaySettings)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logs.configure(service="gateway", level=settings.log_level, log_format=settings.log_format)
    registry = new_registry()
    return run_service(lambda lifecycle: run(settings, lifecycle, registry))


if __name__ == "__main__":
    sys.exit(main())
