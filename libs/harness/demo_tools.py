"""Tools of the demonstration's laptop."""

import asyncio
import os
from pathlib import Path

from towline.sidecar import tool

# Where every execution leaves a line, so that they can be counted.
EXECUTIONS_VARIABLE = "DEMO_EXECUTIONS"


@tool(destructive=True)
async def fill_form(order: str, seconds: float = 2.0) -> str:
    """Send an order form, which takes a while and must not be sent twice."""
    with Path(os.environ[EXECUTIONS_VARIABLE]).open("a") as executions:
        executions.write(f"{order}\n")
    await asyncio.sleep(seconds)
    return f"{order} sent"
