"""`python -m harness.stand_ins`: the stand-in agent, model and endpoint in one process, until SIGTERM or SIGINT.

For Compose and kind, where one container stands for everything that Towline calls and does not own. Whoever reaches
the ports may tell the stand-ins what to do: they belong into networks of development only.
"""

import argparse
import asyncio
import contextlib

from harness.agent.server import Agent
from harness.endpoint import Endpoint
from harness.model.server import Model
from harness.stand_in import stop_signal

AGENT_PORT = 9100
MODEL_PORT = 9101
ENDPOINT_PORT = 9102


async def _serve() -> None:
    async with contextlib.AsyncExitStack() as stack:
        for server in (Agent(AGENT_PORT), Model(MODEL_PORT), Endpoint(ENDPOINT_PORT)):
            server.host = "0.0.0.0"
            await stack.enter_async_context(server)
            print(f"{type(server).__name__.lower()} on port {server.port}", flush=True)
        await stop_signal()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    asyncio.run(_serve())
