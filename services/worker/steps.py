"""Steps: what an agent does in one attempt of a turn, made durable where that matters.

Promises: a step that is done is not done again by a later attempt, and nothing acts on it before it is durable (rule
          30). All that is heard of an attempt is heard again from the next one, from the beginning.
Used by:  `handling` (makes one for each attempt), the agents (as `agents.Attempt`).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.store.claims import Claims
from common.store.records import error_outcome
from common.store.tokens import Catalogue, Tokens
from common.store.turns import Claim, Turn
from common.store.usage import Used
from towline.wire import events, json
from towline.wire.frames import ARGS_BYTES_MAX, Tool
from towline.wire.ids import TOOL_NAME_CHARACTERS_MAX
from towline.wire.thread_events import ToolCall, ToolResult
from towline.wire.threads import MODEL_CHARACTERS_MAX
from worker.agents import TOKENS_MAX, AgentFailed
from worker.insist import insist
from worker.talk import Talk
from worker.tool_calls import Outcome, ToolCalls, refused, words_of

# Where usage is counted: the answering itself.
SEAM = "reply"
# Larger arguments and outcomes are left out of the thread's events; the job's record has them.
SHOWN_BYTES_MAX = 64 * 1024
# As much as a tool may answer.
ANSWER_CHARACTERS_MAX = 1024 * 1024

_tools_decoder = msgspec.json.Decoder(list[Tool])


class Steps:
    """One attempt; see `agents.Attempt`. `until`: monotonic time at which the agent's time is over."""

    def __init__(
        self,
        claim: Claim,
        turn: Turn,
        *,
        until: float,
        talk: Talk,
        claims: Claims,
        tokens: Tokens,
        tool_calls: ToolCalls,
    ) -> None:
        self._claim = claim
        self._turn = turn
        self._done: Mapping[str, Any] = {}
        self._names: Sequence[str] | None = None
        self._until = until
        self._talk = talk
        self._claims = claims
        self._tokens = tokens
        self._tool_calls = tool_calls
        self._tools: Sequence[Tool] | None = None
        self._said = 0  # characters
        self._calls = 0
        self._model: str | None = None
        self._model_calls = 0
        self._input_tokens = 0
        self._output_tokens = 0

    def resume(self, done: Mapping[str, Any], names: Sequence[str] | None) -> None:
        """Begin where earlier attempts have stopped.

        Args:
            done: results of the steps that were kept, by name.
            names: of the tools that the agent may call; None: all that there are.
        """
        self._done = done
        self._names = names

    def used(self, seconds: float) -> Used:
        """What the turn has used so far."""
        return Used(SEAM, self._model, self._input_tokens, self._output_tokens, self._model_calls, self._calls, seconds)

    # ---- what agents call

    def say(self, text: str) -> str:
        """Relay a piece of the answer. Raises: AgentFailed, where it does not stop."""
        self._said += len(text)
        if self._said > ANSWER_CHARACTERS_MAX:
            raise AgentFailed("answer-too-large", f"the answer has more than {ANSWER_CHARACTERS_MAX} characters")
        mended = json.mend_text(text)
        self._talk.say(mended)
        return mended

    def recall(self, step: str) -> Any:
        """What an earlier attempt has kept under this name, or None."""
        return self._done.get(step)

    async def keep(self, step: str, value: Mapping[str, Any]) -> None:
        """Make a step's result durable. Raises: ClaimLost."""
        state = json.dumps(value).decode()
        await insist("checkpoint", lambda: self._claims.checkpoint(self._claim, step, state))

    async def tools(self) -> Sequence[Tool]:
        """The tools that the agent may call."""
        if self._tools is None:
            catalogue: Catalogue | None = None
            if (user := self._turn.user) is not None:
                catalogue = await insist("catalogue", lambda: self._tokens.catalogue(user))
            tools = _tools_decoder.decode(catalogue.tools) if catalogue is not None else []
            self._tools = [tool for tool in tools if self._names is None or tool.name in self._names]
        return self._tools

    def spend(self, model: str | None, input_tokens: int, output_tokens: int) -> None:
        """Count a model's call."""
        self._model = model[:MODEL_CHARACTERS_MAX] if model else self._model
        self._model_calls += 1
        self._input_tokens += max(0, min(input_tokens, TOKENS_MAX))
        self._output_tokens += max(0, min(output_tokens, TOKENS_MAX))

    async def call_tool(self, name: str, arguments: str) -> str:
        """Have a tool run once, and tell of it; returns what the model is told. Raises: ClaimLost, AgentFailed."""
        self._calls += 1
        step = f"tool-{self._calls}"
        name = json.mend_text(name)
        args, problem = _read_arguments(arguments)
        shown = _shown(arguments, json.mend_text(arguments) if problem else args)
        self._talk.tell(events.TOOL_CALL, ToolCall(self._turn.turn, step, name[:TOOL_NAME_CHARACTERS_MAX], shown))
        kept = self.recall(step)
        if kept is not None:
            outcome = Outcome(kept["state"], kept["outcome"])
        else:
            outcome = refused(problem) if problem else await self._run_tool(step, name, json.canonical(args))
            await self.keep(step, {"state": outcome.state, "outcome": outcome.text})
        shown = _shown(outcome.text, msgspec.Raw(outcome.text.encode()))
        self._talk.tell(events.TOOL_RESULT, ToolResult(self._turn.turn, step, outcome.state, shown))
        return words_of(outcome)

    async def _run_tool(self, step: str, name: str, args: bytes) -> Outcome:
        user = self._turn.user
        if user is None:
            return _unknown(name)
        if name not in {tool.name for tool in await self.tools()}:
            # It may have been there when an earlier attempt called it.
            return await self._tool_calls.find(self._turn, user, step, name, args) or _unknown(name)
        if len(args) > ARGS_BYTES_MAX:
            message = (
                f"the arguments have {len(args)} bytes, at most {ARGS_BYTES_MAX} are allowed; the tool did not run"
            )
            return refused(error_outcome("arguments-too-large", message))
        return await self._tool_calls.run(self._turn, user, step, name, args, time_s=self._until - time.monotonic())


def _read_arguments(text: str) -> tuple[Any, str | None]:
    """Arguments as a model wrote them, mended; or the outcome that says why they are none."""
    try:
        args, _ = json.mend(text.strip() or "{}")
    except json.JsonProblem as problem:
        return None, error_outcome("bad-arguments", f"the arguments are not JSON: {problem}; the tool did not run")
    if not isinstance(args, dict):
        return None, error_outcome("bad-arguments", "the arguments are not a JSON object; the tool did not run")
    return args, None


def _unknown(name: str) -> Outcome:
    return refused(error_outcome("unknown-tool", f"there is no tool {name[:200]!r} here; nothing was run"))


def _shown(text: str, value: Any) -> Any:
    """What events have of a JSON text, and of its value."""
    if len(text) > SHOWN_BYTES_MAX:
        return {"omitted_bytes": len(text.encode(errors="surrogatepass"))}
    return value
