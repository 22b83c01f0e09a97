"""Agents: who answers a turn. One module a kind; here is what they are given, and what they may do meanwhile.

Promises: an agent knows no store and no claim. What it did before its worker died comes back by `recall`, so that an
          answer that is begun again pays for nothing twice.
Used by:  `worker.steps`, which implements `Attempt`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from common.errors import Permanent, Retryable
from common.store.agents import Agent
from common.store.threads import Exchange
from common.store.turns import Turn
from towline.wire.frames import Tool

# Of one model call. What claims more is no count, and the sums of all are to fit into whatever adds them up.
TOKENS_MAX = 10**12


class AgentFailed(Permanent):
    """The turn ends as `failed` with this code; `str()` is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AgentUnavailable(Retryable):
    """The turn is tried again later.

    Attributes:
        retry_after_s: not before this has passed, if the agent said so.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Asked(NamedTuple):
    """What is to be answered.

    Attributes:
        attempt: from 1.
        exchanges: what was said so far; the last one has no reply yet, it is the question.
        time_s: what the answer may still take.
    """

    turn: Turn
    attempt: int
    agent: Agent
    exchanges: Sequence[Exchange]
    time_s: float


class Attempt(Protocol):
    """What an agent may do while it answers."""

    def say(self, text: str) -> str:
        """Relay a piece of the answer to whoever watches; returns it as it was relayed (mended).

        Raises:
            AgentFailed: the answer is too large by now.
        """
        ...

    def recall(self, step: str) -> Any:
        """What was kept under this name by an earlier attempt, or None."""
        ...

    async def keep(self, step: str, value: Mapping[str, Any]) -> None:
        """Make a step's result durable; nothing may act on it before this has returned (rule 30)."""
        ...

    async def tools(self) -> Sequence[Tool]:
        """The tools of the thread's user that the agent may call, as the machine announced them."""
        ...

    async def call_tool(self, name: str, arguments: str) -> str:
        """Run a tool once, whatever dies in between; returns what the model is told, an error in words included.

        Args:
            name: of any tool; one that is not among `tools` is not run.
            arguments: JSON text as the model wrote it; a text that is none is told to the model.
        """
        ...

    def spend(self, model: str | None, input_tokens: int, output_tokens: int) -> None:
        """Count a call of a model, a recalled one included."""
        ...


class Answering(Protocol):
    """A kind of agent."""

    async def answer(self, asked: Asked, attempt: Attempt) -> str:
        """Return the answer's text, all of which was said before.

        Raises:
            AgentFailed, AgentUnavailable: there is none.
        """
        ...
