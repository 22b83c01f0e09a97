"""Secrets as options name them: by the file or the variable that holds them.

Promises: a secret never stands on the command line, where every user of the machine can read it.
Used by:  `--header` of `towline runs start`, `--api-key` and `--signing-secret` of `towline agents create`.
"""

import os
from pathlib import Path

import typer


def read_secret(where: str, option: str) -> str:
    """Read what `@FILE` or `env:VARIABLE` holds; a line end at the end of a file does not count.

    Raises:
        typer.BadParameter: for this option, without repeating what may be the secret itself.
    """
    if where.startswith("@"):
        try:
            return Path(where[1:]).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"cannot read {where[1:]}: {error}", param_hint=option) from error
    if where.startswith("env:"):
        value = os.environ.get(where[4:])
        if value is None:
            raise typer.BadParameter(f"the variable {where[4:]} is not set", param_hint=option)
        return value
    raise typer.BadParameter(
        "give @FILE or env:VARIABLE, not the value: arguments are visible to every user of the machine",
        param_hint=option,
    )
