"""`python -m relay`: read the environment once, then serve."""

# ruff: noqa: E402
import os
import signal
import sys

# Loading the rest takes half a second and more, and process 1 of a container does not hear a signal that it has not
# asked for: told to stop in that time, it would be killed at the end of its grace period. Nothing is begun yet.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

from common.process.lifecycle import run_service
from common.process.metrics import new_registry
from common.process.startup import start
from relay.app import run
from relay.settings import RelaySettings


def main() -> int:
    """Run a relay to its end; returns the exit code. Raises: SystemExit (2), when the settings are wrong."""
    settings = start("relay", RelaySettings)
    registry = new_registry()
    return run_service(lambda lifecycle: run(settings, lifecycle, registry))


if __name__ == "__main__":
    sys.exit(main())
