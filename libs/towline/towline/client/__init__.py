"""Client: the gateway's HTTP API, async and small.

Owns:     the one object that has all calls; each noun has its module here, `towline.stream` and `towline.transport`
          what lies below.
Promises: a call is repeated only where a second one changes nothing: reads, cancels, definitions, revocations, and
          submissions, which carry their idempotency key. A refusal is an `ApiProblem`, no answer is
          `GatewayUnreachable`.
Used by:  backends of products; the commands of `towline`.
"""

from types import TracebackType
from typing import Self

from towline.client.agents import AgentCalls
from towline.client.jobs import JobCalls, outcome_of
from towline.client.machines import MachineCalls
from towline.client.runs import RunCalls, RunEvent, RunItem
from towline.client.threads import ThreadEvent
from towline.client.turns import TurnCalls
from towline.stream import Break
from towline.transport import ApiProblem, GatewayUnreachable, InvalidRequest, Transport
from towline.wire.runs import End, Gap, SourceFollow
from towline.wire.threads import AgentPut, ThreadGap

DEFAULT_URL = "http://127.0.0.1:8080"

__all__ = [
    "DEFAULT_URL",
    "AgentPut",
    "ApiProblem",
    "Break",
    "Client",
    "End",
    "Gap",
    "GatewayUnreachable",
    "InvalidRequest",
    "RunEvent",
    "RunItem",
    "SourceFollow",
    "ThreadEvent",
    "ThreadGap",
    "outcome_of",
]


class Client(JobCalls, MachineCalls, RunCalls, AgentCalls, TurnCalls):
    """A gateway as seen with one API key; `async with Client(...) as client`, or `close` it.

    Every method raises `ApiProblem`, `GatewayUnreachable` and, before anything is sent, `InvalidRequest`.
    """

    def __init__(self, base_url: str, api_key: str, *, timeout_s: float = 30.0) -> None:
        """Connect to nothing yet.

        Args:
            base_url: `http://` or `https://`, with a path if the API is served below one.
            timeout_s: for one request, on top of what it is told to wait.

        Raises:
            InvalidRequest: no such URL, or a key that no header can carry.
        """
        super().__init__(Transport(base_url, api_key, timeout_s=timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()
