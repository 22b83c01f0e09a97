"""How a stand-in that answers behaves, by the name it is called by (PURE).

A name is one or more of these, joined by `+`, such as `tools-2+slow-5`:

    fast              answers at once
    slow-S            says its answer over S seconds, ten numbered words a second
    think-S           says nothing for S seconds before each answer, whatever that is
    tools-N           asks for N tool calls, one after another, before it answers (a model)
    parallel-N        asks for N tool calls at once
    odd               says U+0000 and half a surrogate pair before its answer
    fail-STATUS       refuses with that HTTP status
    hang              takes the request and never answers
    cut               resets the connection in the middle of its answer
    malformed         answers with what is not JSON

The last four take a count (`fail-500-2`, `hang-1`, `cut-1`, `malformed-1`): the first so many requests go wrong, those
after them are answered. Without one all do.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

Fault = Literal["fail", "hang", "cut", "malformed"]

WORDS_PER_S = 10
ODD_TEXT = "\x00 \ud800 "
_SLOW = re.compile(r"slow-(\d+(?:\.\d+)?)")
_THINK = re.compile(r"think-(\d+(?:\.\d+)?)")
_TOOLS = re.compile(r"(tools|parallel)-(\d+)")
_FAIL = re.compile(r"fail-(\d{3})(?:-(\d+))?")
_FAULT = re.compile(r"(hang|cut|malformed)(?:-(\d+))?")


class UnknownBehaviour(ValueError):
    """There is no such name."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a name means.

    Attributes:
        slow_s: over how many seconds an answer is said.
        think_s: how long nothing comes before it.
        tools: how many tool calls it asks for; at_once: all of them in one answer.
        is_odd: whether it says what JSON can carry and databases do not.
        fault: what goes wrong; status: with which HTTP status; times: for how many requests, None: for all.
    """

    slow_s: float = 0.0
    think_s: float = 0.0
    tools: int = 0
    at_once: bool = False
    is_odd: bool = False
    fault: Fault | None = None
    status: int = 0
    times: int | None = None

    def fault_of(self, number: int) -> Fault | None:
        """What goes wrong with the request of that number, from 1, among those about the same question."""
        return self.fault if self.times is None or number <= self.times else None


def parse_behaviour(name: str) -> Behaviour:
    """Read a name. Raises: UnknownBehaviour."""
    behaviour = Behaviour()
    for word in name.split("+"):
        if word == "fast":
            continue
        if word == "odd":
            behaviour = replace(behaviour, is_odd=True)
        elif found := _SLOW.fullmatch(word):
            behaviour = replace(behaviour, slow_s=float(found[1]))
        elif found := _THINK.fullmatch(word):
            behaviour = replace(behaviour, think_s=float(found[1]))
        elif found := _TOOLS.fullmatch(word):
            behaviour = replace(behaviour, tools=int(found[2]), at_once=found[1] == "parallel")
        elif found := _FAIL.fullmatch(word):
            behaviour = replace(behaviour, fault="fail", status=int(found[1]), times=_count(found[2]))
        elif found := _FAULT.fullmatch(word):
            fault = next(fault for fault in get_args(Fault) if fault == found[1])
            behaviour = replace(behaviour, fault=fault, times=_count(found[2]))
        else:
            raise UnknownBehaviour(f"the stand-in has no behaviour {word!r}")
    return behaviour


def answer_words(behaviour: Behaviour, said: str) -> list[str]:
    """What is answered, in the pieces in which it is said: `said`, and what a slow answer adds.

    What is said never changes: a second answer to the same words is the first one.
    """
    text = (ODD_TEXT if behaviour.is_odd else "") + said
    if behaviour.slow_s:
        text += "".join(f" {number}" for number in range(1, int(behaviour.slow_s * WORDS_PER_S) + 1))
    return re.findall(r"\S+\s*|\s+", text)


def _count(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
