"""HTTP bodies of agents, threads, entries, turns and usage, shared by the gateway, its description and the client.

As in `towline.wire.api`: requests (`AgentPut`, `ThreadCreate`, `EntryPost`) refuse members they do not know, answers
ignore them; times are RFC 3339 UTC with milliseconds; in answers only a member marked `UnsetType` may be absent.
`towline.wire.thread_events` has what a thread's event stream carries.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towline.wire.api import Id, Timestamp
from towline.wire.frames import TOOLS_MAX
from towline.wire.ids import TOOL_NAME_CHARACTERS_MAX
from towline.wire.runs import StreamEvent

# What a turn may take in all. `common.turn_times` has the numbers that derive from a cap; a test holds both together.
TURN_CAP_S_DEFAULT = 600.0
TURN_CAP_S_MIN = 10.0
TURN_CAP_S_MAX = 3600.0
SECRET_CHARACTERS_MAX = 4096
MODEL_CHARACTERS_MAX = 200
# A body's limit in bytes (413) is a setting; this is what no setting allows.
TEXT_CHARACTERS_MAX = 1024 * 1024
# The newest so many stand in a thread's own answer; `GET /v1/threads/{thread}/entries` pages through all.
THREAD_ENTRIES_SHOWN = 50

AgentKind = Literal["echo", "http", "openai"]
TurnState = Literal["queued", "running", "completed", "failed", "cancelled"]
TURN_TERMINAL_STATES: frozenset[str] = frozenset({"completed", "failed", "cancelled"})
Role = Literal["user", "agent"]
OnBusy = Literal["queue", "reject", "interrupt"]

Model = Annotated[str, Meta(min_length=1, max_length=MODEL_CHARACTERS_MAX)]
# Visible ASCII: both travel in headers, or sign what does.
Secret = Annotated[str, Meta(pattern=r"^[!-~]+$(?!\n)", max_length=SECRET_CHARACTERS_MAX)]
ToolName = Annotated[str, Meta(min_length=1, max_length=TOOL_NAME_CHARACTERS_MAX)]

# Which members beside `kind` and `turn_cap_s` an agent has: those that it must have, and those that it may have.
AGENT_MEMBERS: dict[AgentKind, tuple[frozenset[str], frozenset[str]]] = {
    "echo": (frozenset(), frozenset()),
    "http": (frozenset({"url"}), frozenset({"signing_secret"})),
    "openai": (frozenset({"url", "model"}), frozenset({"instructions", "tools", "api_key"})),
}


class AgentPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /v1/agents/{agent}`: who answers threads. Each PUT replaces all of it but the secrets.

    A secret that is left out stays as long as the `url` does: it goes nowhere else than where it was given for. A
    member that its kind does not use is refused; null is as good as absent.

    Attributes:
        kind: `echo` answers with the text itself; `http` is asked by one POST to `url`; `openai` is any API of chat
            completions whose base is `url`, such as `https://api.openai.com/v1`.
        model: the one it asks for, unless the thread names another.
        instructions: the system message before the thread's entries.
        tools: which tools of the user's machine it is offered, by name; null: all of them.
        api_key: sent to `url` as a bearer token. Write-only: encrypted at rest, never shown again.
        signing_secret: what requests to `url` are signed with (HMAC). Write-only, too.
        turn_cap_s: a turn that has not ended after so long ends as `failed`.
    """

    kind: AgentKind
    url: Annotated[str, Meta(min_length=1, max_length=2048)] | None = None
    model: Model | None = None
    instructions: Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)] | None = None
    tools: Annotated[list[ToolName], Meta(max_length=TOOLS_MAX)] | None = None
    api_key: Secret | None = None
    signing_secret: Secret | None = None
    turn_cap_s: Annotated[float, Meta(ge=TURN_CAP_S_MIN, le=TURN_CAP_S_MAX)] = TURN_CAP_S_DEFAULT

    def __post_init__(self) -> None:
        """Raises: ValueError, naming the member that its kind lacks or does not use."""
        needed, optional = AGENT_MEMBERS[self.kind]
        for name in ("url", "model", "instructions", "tools", "api_key", "signing_secret"):
            is_given = getattr(self, name) is not None
            if name in needed and not is_given:
                raise ValueError(f"an agent of kind {self.kind!r} needs {name!r}")
            if is_given and name not in needed | optional:
                raise ValueError(f"an agent of kind {self.kind!r} has no {name!r}")


class Agent(msgspec.Struct, frozen=True):
    """An agent, without the values of its secrets; see `AgentPut`. What its kind does not use is null.

    Attributes:
        has_api_key, has_signing_secret: whether one is stored.
    """

    agent: str
    kind: AgentKind
    url: str | None
    model: str | None
    instructions: str | None
    tools: list[str] | None
    has_api_key: bool
    has_signing_secret: bool
    turn_cap_s: float
    created_at: Timestamp


class ThreadCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/threads`.

    Attributes:
        user: whose machine the agent's tools run on; null: no tools.
        model: asked for in place of the agent's own.
    """

    agent: Id
    user: Id | None = None
    model: Model | None = None


class Thread(msgspec.Struct, frozen=True):
    """A thread; `used_at` is when its newest entry came, or its newest turn ended."""

    thread: str
    agent: str
    user: str | None
    model: str | None
    created_at: Timestamp
    used_at: Timestamp


class EntryPost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/threads/{thread}/entries`.

    Attributes:
        on_busy: while a turn of the thread is open: wait for it (`queue`), refuse this entry (`reject`, 409
            `thread-busy`), or cancel that turn first (`interrupt`).
    """

    text: Annotated[str, Meta(min_length=1, max_length=TEXT_CHARACTERS_MAX)]
    on_busy: OnBusy = "queue"


class Entry(msgspec.Struct, frozen=True):
    """One entry of a thread.

    Attributes:
        position: counts from 1 in the order of the thread.
        role: `user` for what was posted, `agent` for what a turn answered.
        turn: the one that answers this entry, or that wrote it.
    """

    entry: str
    thread: str
    position: int
    role: Role
    text: str
    turn: str
    created_at: Timestamp


class TurnError(msgspec.Struct, frozen=True):
    """Why a turn has no answer: `code` for programs, `message` for people."""

    code: str
    message: str = ""


class TurnOutcome(msgspec.Struct, frozen=True):
    """How a turn ended: `entry` and `text` of the answer if completed, else `error`; cancelled ones have one, too."""

    entry: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    error: TurnError | UnsetType = UNSET


class Turn(msgspec.Struct, frozen=True):
    """A turn as its record says: the durable unit of answering one entry.

    Attributes:
        entry: the user's entry that it answers.
        attempts: how often it was begun; more than one after a worker died or an agent failed for a while.
        replays: how often its key was submitted again.
        cancel_requested: it was told to end as `cancelled` and has yet to; false once it has ended.
        started_at: when it was first begun; null before.
        outcome: there once the state is terminal, and the same in every answer about this turn.
        replayed: this answers a submission whose key had been accepted before.
        payload_matches: false when such a submission had another text; else absent.
    """

    turn: str
    thread: str
    entry: str
    agent: str
    state: TurnState
    attempts: int
    replays: int
    cancel_requested: bool
    replayed: bool
    accepted_at: Timestamp
    started_at: Timestamp | None
    ended_at: Timestamp | None
    outcome: TurnOutcome | UnsetType = UNSET
    payload_matches: bool | UnsetType = UNSET

    @property
    def terminal(self) -> bool:
        """Whether the turn has ended."""
        return self.state in TURN_TERMINAL_STATES


class ThreadView(Thread, frozen=True, kw_only=True):
    """Answer of `GET /v1/threads/{thread}`: the newest `THREAD_ENTRIES_SHOWN` entries in order, and their turns."""

    entries: list[Entry]
    turns: list[Turn]


class Posted(msgspec.Struct, frozen=True):
    """Answer of `POST /v1/threads/{thread}/entries`: 201, or 200 once the turn of a repeated key has ended."""

    entry: Entry
    turn: Turn


class Usage(msgspec.Struct, frozen=True):
    """What one turn used at one seam; exactly one row for each, written with the turn's end.

    Attributes:
        seam: where it was used: `reply` is the answering itself.
        input_tokens, output_tokens: as the model's API counted them, over all calls of the turn.
        seconds: of the agent's work, waiting for tools included.
        ended_at: of the turn; its day in UTC is the one that `?day=` names.
    """

    turn: str
    thread: str
    agent: str
    user: str | None
    seam: str
    model: str | None
    input_tokens: int
    output_tokens: int
    model_calls: int
    tool_calls: int
    seconds: float
    ended_at: Timestamp


class ThreadGap(msgspec.Struct, frozen=True):
    """Data of the frame `towline.gap` of a thread, and of a `ThreadEventsPage`; as `towline.wire.runs.Gap`."""

    thread: str
    after: str | None
    first_available: str | None


class ThreadEventsPage(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/threads/{thread}/events` with `Accept: application/json`; as `towline.wire.runs.EventsPage`.

    A thread's stream has no end.
    """

    items: list[StreamEvent]
    last_event_id: str | None
    gap: ThreadGap | UnsetType = UNSET
