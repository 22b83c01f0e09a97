"""`towline sidecar`: make this machine's tools available to the user's agents."""

import asyncio
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import typer

from towline.cli.terminal import Exit, fail
from towline.sidecar import ConfigurationError, Sidecar, StateUnusable, ToolError
from towline.sidecar.builtin import builtin_tools
from towline.sidecar.tools import load

app = typer.Typer(no_args_is_help=True, help="Run this machine's sidecar.")


class LogLevel(StrEnum):
    """What is logged: this and what is graver."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    """How log lines look."""

    text = "text"
    json = "json"


@app.callback()
def sidecar() -> None:
    """Run this machine's sidecar."""


@app.command()
def run(
    *,
    url: Annotated[str, typer.Option(envvar="TOWLINE_BRIDGE_URL", help="Where to dial: wss://host[:port].")],
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TOWLINE_TOKEN_FILE",
            help="File with the machine token, readable by you alone (0600). Without it: TOWLINE_TOKEN.",
        ),
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(envvar="TOWLINE_STATE_DIR", help="Journal and identity of this sidecar; one sidecar each.")
    ] = Path("~/.local/state/towline"),
    name: Annotated[str, typer.Option(help="Name to show to people.", show_default="the host name")] = "",
    tools: Annotated[
        list[str] | None, typer.Option(help="Module name or .py file with functions marked @tool. Repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TOWLINE_HTTP_GET_HOSTS",
            help="Host or host:port that the built-in tool http_get may open. Repeatable; none by default.",
        ),
    ] = None,
    allow_folder: Annotated[
        list[Path] | None,
        typer.Option(
            envvar="TOWLINE_FILES_FOLDERS",
            help="Folder that the built-in tools files_list and files_read may look into. Repeatable, in the"
            " environment separated by colons; none by default.",
        ),
    ] = None,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Send the token over plain ws:// to hosts other than this one.")
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Log lines on standard error.")] = LogFormat.text,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="TOWLINE_LOG_LEVEL", help="At info a job is one line, its end.")
    ] = LogLevel.info,
) -> None:
    """Dial the worker and run jobs until Ctrl-C.

    Ends with 0 when stopped, 2 when the settings are wrong, 4 when another sidecar has the state directory.
    """
    _configure_logs(log_format, log_level)
    # Out of the environment at once: tools and what they start have no business with it.
    token = os.environ.pop("TOWLINE_TOKEN", None)
    hosts = [host for entry in allow_host or [] for host in entry.replace(",", " ").split()]
    folders = [folder.expanduser().absolute() for folder in allow_folder or []]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        fail(Exit.USAGE, f"--allow-folder: no such folder: {', '.join(missing)}")
    if token_file is None and not token:
        fail(Exit.USAGE, "no token: give --token-file, or TOWLINE_TOKEN in the environment")
    try:
        sidecar = Sidecar(
            url=url,
            token=None if token_file else token,
            token_file=token_file.expanduser() if token_file else None,
            state_dir=state_dir.expanduser(),
            name=name,
            tools=[*builtin_tools(hosts, folders), *(found for source in tools or [] for found in load(source))],
            allow_insecure=allow_insecure,
        )
    except (ConfigurationError, ToolError) as error:
        fail(Exit.USAGE, str(error))
    try:
        asyncio.run(_run_until_signal(sidecar))
    except StateUnusable as error:
        fail(Exit.UNAVAILABLE, str(error))


async def _run_until_signal(sidecar: Sidecar) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sidecar.stop)
    await sidecar.run()


def _configure_logs(log_format: LogFormat, log_level: LogLevel) -> None:
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    factory: structlog.PrintLoggerFactory | structlog.BytesLoggerFactory
    if log_format is LogFormat.json:
        processors += [structlog.processors.format_exc_info, _to_json]
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    else:
        processors += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        factory = structlog.PrintLoggerFactory(sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(log_level.value),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )


def _to_json(_logger: object, _method: str, event: structlog.typing.EventDict) -> bytes:
    return msgspec.json.encode(event, enc_hook=repr)
