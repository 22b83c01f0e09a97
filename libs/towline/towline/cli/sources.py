"""A run's sources as options of a command name them: `--source`, `--resume` and `--header`.

Promises: the value of a header comes from a file or a variable, never from the command line.
Used by:  `towline runs start`.
"""

from typing import get_args

import typer

from towline.cli.secrets import read_secret
from towline.client import SourceFollow
from towline.wire.runs import Resume


def parse_sources(
    sources: list[str], resumes: list[str], headers: list[str], *, idle_timeout_s: float
) -> list[SourceFollow]:
    """Put sources together from the values of `--source`, `--resume` and `--header`.

    Raises:
        typer.BadParameter: says which one cannot be read, or names no source, and why.
    """
    urls = dict(map(_name_and_url, sources))
    if len(urls) != len(sources):
        raise typer.BadParameter("two sources have the same name", param_hint="--source")
    how = dict(map(_for_source, resumes))
    for value in how.values():
        if value not in get_args(Resume):
            raise typer.BadParameter(f"{value!r} is none of {', '.join(get_args(Resume))}", param_hint="--resume")
    sent: dict[str, dict[str, str]] = {}
    for text in headers:
        place, equals, where = text.partition("=")
        if not (place and equals):
            # Without repeating it: it may be the secret.
            raise typer.BadParameter("not NAME=@FILE or NAME=env:VARIABLE", param_hint="--header")
        name, _, header = place.rpartition("/")
        sent.setdefault(name, {})[header] = read_secret(where, "--header")
    for name in (how.keys() | sent.keys()) - urls.keys() - {""}:
        raise typer.BadParameter(f"there is no source {name!r}", param_hint="--resume and --header")
    found = []
    for name, source_url in urls.items():
        resume = how.get(name) or how.get("")
        if resume is None:
            raise typer.BadParameter(f"nothing is said for source {name!r}", param_hint="--resume")
        given = {**sent.get("", {}), **sent.get(name, {})}
        found.append(SourceFollow(name, source_url, resume, given, idle_timeout_s))  # type: ignore[arg-type]
    return found


def _name_and_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not (name and url):
        raise typer.BadParameter(f"{text!r} is not NAME=URL", param_hint="--source")
    return name, url


def _for_source(text: str) -> tuple[str, str]:
    """Split `[SOURCE=]HOW`; the source is empty when it is for all."""
    name, _, value = text.rpartition("=")
    return name, value
