"""`python -m gateway`: read the environment once, then serve."""

import sys

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
