"""The part of the route table (`routes`) that is about agents, threads, turns and usage."""

from gateway import paging, problems
from gateway.agents import AgentRoutes
from gateway.http import Parameter, Route
from gateway.threads import ThreadRoutes
from gateway.turns import TurnRoutes
from gateway.usage import UsageRoutes
from towline.wire import api
from towline.wire import threads as wire
from towline.wire.ids import ID_PATTERN

_ID = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_OF_AGENT = Parameter("agent", _ID, "only of this agent")


def routes_of_threads(threads: ThreadRoutes, key: Parameter, traceparent: Parameter) -> list[Route]:
    """Threads and entries."""
    bound = "A key that is bound to users reaches the threads of these users only."
    return [
        Route(
            "POST",
            "/v1/threads/{thread}/entries",
            threads.post_entry,
            "Say something in a thread, and have it answered",
            scope="threads",
            description="Answers once the entry and the turn that answers it are durable, together: from then on the"
            " turn ends exactly once, at the latest at its agent's cap. A thread's turns run one after the other. A key"
            f" that was accepted before is answered with its entry and turn, marked `replayed`. {bound}",
            parameters=(key, traceparent),
            body=wire.EntryPost,
            answers={
                201: (wire.Posted, "The entry is there, and its turn is under way."),
                200: (wire.Posted, "The key was accepted before, and its turn has ended."),
            },
            problems=(problems.INVALID_KEY, problems.THREAD_BUSY, problems.UNKNOWN_AGENT, problems.KEY_REUSED),
            locates=True,
        ),
        Route(
            "GET",
            "/v1/threads/{thread}/entries",
            threads.list_entries,
            "List a thread's entries in their order",
            scope="threads",
            description=bound,
            parameters=paging.PARAMETERS_OF_ENTRIES,
            answers={200: (api.Page[wire.Entry], "One page, oldest first.")},
        ),
        Route(
            "POST",
            "/v1/threads",
            threads.create_thread,
            "Begin a thread",
            scope="threads",
            description=f"A second call begins a second thread. {bound}",
            body=wire.ThreadCreate,
            answers={201: (wire.Thread, "The thread, without an entry yet.")},
            locates=True,
            problems=(problems.UNKNOWN_AGENT, problems.NOT_FOUND),
        ),
        Route(
            "GET",
            "/v1/threads",
            threads.list_threads,
            "List threads, newest first",
            scope="threads",
            description=bound,
            parameters=(_OF_AGENT, Parameter("user", _ID, "only of this user"), *paging.PARAMETERS),
            answers={200: (api.Page[wire.Thread], "One page.")},
            problems=(problems.NOT_FOUND,),
        ),
        Route(
            "GET",
            "/v1/threads/{thread}",
            threads.read_thread,
            "Read a thread with its newest entries and their turns",
            scope="threads",
            description=bound,
            answers={200: (wire.ThreadView, "Entries and turns, in their order.")},
        ),
    ]


def routes_of_turns(turns: TurnRoutes, usage: UsageRoutes, prefer: Parameter) -> list[Route]:
    """Turns, and what they used."""
    return [
        Route(
            "GET",
            "/v1/turns/{turn}",
            turns.read_turn,
            "Read a turn, or wait for its end",
            scope="threads",
            parameters=(prefer,),
            answers={
                200: (wire.Turn, "The turn has ended, however it did."),
                202: (wire.Turn, "The turn has not ended yet."),
            },
        ),
        Route(
            "DELETE",
            "/v1/turns/{turn}",
            turns.cancel_turn,
            "Cancel a turn",
            scope="threads",
            description="A turn that nobody runs is cancelled at once. A running one is told to stop, and its tool,"
            " too; it ends within moments. Cancelling twice is no error.",
            answers={
                200: (wire.Turn, "The turn has ended; as `cancelled`, unless it had ended before."),
                202: (wire.Turn, "It runs, and has been told to stop."),
            },
        ),
        Route(
            "GET",
            "/v1/usage",
            usage.list_usage,
            "List what ended turns have used, newest first",
            scope="threads",
            description="A key that is bound to users sees what was used for these users only.",
            parameters=(
                Parameter("thread", {"type": "string", "format": "uuid"}, "only of this thread"),
                _OF_AGENT,
                Parameter("day", {"type": "string", "format": "date"}, "only of turns that ended on this day, UTC"),
                *paging.PARAMETERS_OF_USAGE,
            ),
            answers={200: (api.Page[wire.Usage], "One page.")},
        ),
    ]


def routes_of_agents(agents: AgentRoutes) -> list[Route]:
    """Who answers threads."""
    unbound = "The key must not be bound to users: agents belong to none."
    return [
        Route(
            "PUT",
            "/v1/agents/{agent}",
            agents.put_agent,
            "Define an agent, or define it anew",
            scope="threads",
            description="All of it is replaced but the secrets, which stay where they are left out and the URL is the"
            f" same. Turns that are at work go on as they were. {unbound}",
            body=wire.AgentPut,
            answers={
                201: (wire.Agent, "The agent, which is new."),
                200: (wire.Agent, "The agent, as it is defined now."),
            },
            problems=(problems.EGRESS_REFUSED, problems.NOT_CONFIGURED),
        ),
        Route(
            "GET",
            "/v1/agents/{agent}",
            agents.read_agent,
            "Read an agent",
            scope="threads",
            description=f"Without its secrets. {unbound}",
            answers={200: (wire.Agent, "The agent.")},
        ),
        Route(
            "DELETE",
            "/v1/agents/{agent}",
            agents.delete_agent,
            "Forget an agent",
            scope="threads",
            description=f"Its threads can still be read, and nothing more is answered there. {unbound}",
            answers={204: (None, "It is forgotten.")},
        ),
        Route(
            "GET",
            "/v1/agents",
            agents.list_agents,
            "List agents by name",
            scope="threads",
            description=unbound,
            parameters=paging.PARAMETERS_OF_AGENTS,
            answers={200: (api.Page[wire.Agent], "One page.")},
        ),
    ]
