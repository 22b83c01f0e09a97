"""The first steps of every service: the environment is read, once, and logging is set up.

Used by:  `__main__` of each service.
"""

import sys
from typing import TypeVar

import structlog

from common.process import logs
from common.process.settings import CommonSettings, SettingsError, load, unknown_variables

logger = structlog.get_logger(__name__)

# As tools end that were called wrongly: starting again does not help.
WRONG_SETTINGS = 2

S = TypeVar("S", bound=CommonSettings)


def start(service: str, settings_class: type[S]) -> S:
    """Read the settings of a service and set up its log, where a variable stands that nobody reads.

    Raises:
        SystemExit: the settings are wrong; each of them was named on standard error.
    """
    try:
        settings = load(settings_class)
    except SettingsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(WRONG_SETTINGS) from None
    logs.configure(service=service, level=settings.log_level, log_format=settings.log_format)
    if unknown := unknown_variables(settings_class):
        logger.warning("settings_unknown", names=unknown)
    return settings
