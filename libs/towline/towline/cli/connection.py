"""How a command reaches the gateway: from the environment to a client, and from its errors to exit codes."""

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from towline.cli.terminal import Exit, fail, progress
from towline.client import DEFAULT_URL, ApiProblem, Client, GatewayUnreachable, InvalidRequest

API_KEY_VARIABLE = "TOWLINE_API_KEY"

T = TypeVar("T")

UrlOption = Annotated[
    str, typer.Option("--url", envvar="TOWLINE_URL", help="The gateway. The API key is read from TOWLINE_API_KEY.")
]
UserArgument = Annotated[str, typer.Argument(help="The user's id, as your product knows it.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Show at most so many.")]

__all__ = ["DEFAULT_URL", "LimitOption", "UrlOption", "UserArgument", "call", "collect", "key_to_use"]


def call(url: str, operation: Callable[[Client], Awaitable[T]], *, doing: str | None = "asking the gateway") -> T:
    """Run an operation with a client; ends the program with one line and the right code if it is refused or fails.

    Args:
        doing: shown on a terminal meanwhile; None if the operation writes there itself.
    """
    # Never an option: arguments are visible to every user of the machine.
    api_key = os.environ.get(API_KEY_VARIABLE, "")
    if not api_key:
        fail(Exit.USAGE, f"{API_KEY_VARIABLE} is not set; `towline keys bootstrap` makes the first API key")

    async def run() -> T:
        async with Client(url, api_key) as client:
            return await operation(client)

    try:
        with progress(f"{doing} ...") if doing else contextlib.nullcontext():
            return asyncio.run(run())
    except InvalidRequest as error:
        fail(Exit.USAGE, str(error))
    except ApiProblem as problem:
        later = "" if problem.retry_after_s is None else f" (try again in {problem.retry_after_s:g} s)"
        is_refusal = problem.status < 500
        fail(Exit.REFUSED if is_refusal else Exit.UNAVAILABLE, f"{problem}{later}")
    except GatewayUnreachable as error:
        fail(Exit.UNAVAILABLE, str(error))


def key_to_use(given: str | None) -> str:
    """Take the idempotency key that was given, or make a fresh one if none was.

    Raises:
        typer.BadParameter: it is empty, as from a shell's variable that is not set: a fresh key in its place would do
            the work again.
    """
    if given is None:
        return str(uuid.uuid4())
    if not given.strip():
        raise typer.BadParameter("the key is empty; leave the option out for a fresh one", param_hint="--key")
    return given


async def collect(items: AsyncIterator[T]) -> list[T]:
    """Read a list to its end."""
    return [item async for item in items]
