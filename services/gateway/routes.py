"""The route table: every operation of the public API, what serves it and what is said about it."""

from typing import NamedTuple

from gateway import openapi, paging, problems
from gateway.agents import AgentRoutes
from gateway.api_keys import ApiKeyRoutes
from gateway.http import Answer, Parameter, Route
from gateway.jobs import JobRoutes
from gateway.machines import MachineRoutes
from gateway.request import Request
from gateway.run_table import routes_of_runs, routes_of_streams
from gateway.runs import RunRoutes
from gateway.stream import StreamRoutes
from gateway.stream_token_routes import StreamTokenRoutes
from gateway.thread_table import routes_of_agents, routes_of_threads, routes_of_turns
from gateway.threads import ThreadRoutes
from gateway.turns import TurnRoutes
from gateway.usage import UsageRoutes
from towline.wire import api
from towline.wire.api import JOB_STATES, WAIT_S_MAX

_KEY = Parameter(
    "Idempotency-Key",
    {"type": "string", "pattern": "^[!#-~]([ -~]{0,253}[!-~])?$"},
    "names this piece of work, for this user or thread; repeat a request with the same key and it is not done twice",
    place="header",
    required=True,
)
_PREFER = Parameter(
    "Prefer",
    {"type": "string", "examples": ["wait=30"]},
    f"`wait=N`: answer when it has ended or after N seconds, at most {WAIT_S_MAX}; the default is not to wait",
    place="header",
)
_TRACEPARENT = Parameter(
    "traceparent",
    {"type": "string"},
    "W3C Trace Context, carried to the machine or agent; dropped if broken",
    place="header",
)
_ENDED = (api.Job, "The job has ended, whatever its outcome.")
_NOT_ENDED = (api.Job, "The job is recorded and has not ended yet.")


class Handlers(NamedTuple):
    """All handlers of the API."""

    jobs: JobRoutes
    machines: MachineRoutes
    runs: RunRoutes
    streams: StreamRoutes
    stream_tokens: StreamTokenRoutes
    threads: ThreadRoutes
    turns: TurnRoutes
    usage: UsageRoutes
    agents: AgentRoutes
    keys: ApiKeyRoutes


def routes(handlers: Handlers) -> list[Route]:
    """The table, the most used operations first."""
    documents = Documents()
    table = [
        *_of_jobs(handlers.jobs),
        *routes_of_threads(handlers.threads, _KEY, _TRACEPARENT),
        *routes_of_turns(handlers.turns, handlers.usage, _PREFER),
        *routes_of_streams(handlers.streams, handlers.stream_tokens),
        *routes_of_runs(handlers.runs),
        *routes_of_agents(handlers.agents),
        *_of_machines(handlers.machines),
        *_of_keys(handlers.keys),
        *_of_documents(documents),
    ]
    documents.description = openapi.document(table)
    return table


class Documents:
    """What anyone may read: the API's description, and what its problems mean."""

    description: bytes

    async def openapi(self, _request: Request) -> Answer:
        """`GET /openapi.json`."""
        return Answer(200, self.description)

    async def problem(self, request: Request) -> Answer:
        """`GET /problems/{slug}`."""
        kind = problems.KINDS.get(request.params["slug"])
        if kind is None:
            raise problems.not_found("problem")
        return Answer(200, problems.page(kind).encode(), content_type=b"text/plain; charset=utf-8")


def _of_jobs(jobs: JobRoutes) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/users/{user}/jobs",
            jobs.submit,
            "Run one tool on the user's machine",
            scope="jobs",
            description="Answers once the job is durable: from then on it ends exactly once, at the latest at its"
            " deadline. A key that was accepted before is answered with its job, marked `replayed`; while that runs,"
            " the caller joins it. Before anything is refused for the state of the machine or of a store, the key's"
            " job is looked for.",
            parameters=(_KEY, _PREFER, _TRACEPARENT),
            body=api.JobSubmit,
            answers={200: _ENDED, 202: _NOT_ENDED},
            problems=(
                problems.INVALID_KEY,
                problems.MACHINE_OFFLINE,
                problems.UNKNOWN_TOOL,
                problems.KEY_REUSED,
                problems.QUEUE_FULL,
                problems.PRESENCE_UNKNOWN,
                problems.TOO_MANY_WAITERS,
            ),
        ),
        Route(
            "GET",
            "/v1/jobs/{job}",
            jobs.read,
            "Read a job, or wait for it",
            scope="jobs",
            parameters=(_PREFER,),
            answers={200: _ENDED, 202: _NOT_ENDED},
        ),
        Route(
            "DELETE",
            "/v1/jobs/{job}",
            jobs.cancel,
            "Cancel a job",
            scope="jobs",
            description="A job that is still queued is cancelled and did not run. For one that was begun the machine is"
            " asked to stop it; it ends as the machine says.",
            answers={200: _ENDED, 202: (api.Job, "The job was begun; the machine has been asked to stop it.")},
        ),
        Route(
            "GET",
            "/v1/users/{user}/jobs",
            jobs.list_jobs,
            "List a user's jobs, newest first",
            scope="jobs",
            parameters=(
                Parameter("state", {"type": "string", "enum": list(JOB_STATES)}, "only jobs in this state"),
                Parameter("idempotency_key", {"type": "string", "minLength": 1}, "only the job of this key"),
                *paging.PARAMETERS,
            ),
            answers={200: (api.Page[api.Job], "One page.")},
        ),
    ]


def _of_machines(machines: MachineRoutes) -> list[Route]:
    return [
        Route(
            "GET",
            "/v1/users/{user}/presence",
            machines.presence,
            "Say whether the user's machine is connected",
            scope="jobs",
            description="`offline` is said only by a Redis, and over a connection to it, that are old enough to know;"
            " until then, and while Redis does not answer, it is `unknown`.",
            parameters=(
                Parameter(
                    "probe", {"type": "boolean", "default": False}, "corroborate it with a round trip, at most 3 s"
                ),
            ),
            answers={200: (api.Presence, "What is known.")},
        ),
        Route(
            "GET",
            "/v1/users/{user}/tools",
            machines.tools,
            "List the tools that the user's machine announced",
            scope="jobs",
            description="The machine need not be connected now.",
            answers={200: (api.Catalogue, "The catalogue; without a machine if none ever connected.")},
        ),
        Route(
            "POST",
            "/v1/users/{user}/machine-tokens",
            machines.mint_token,
            "Mint a token for the user's sidecar",
            scope="jobs",
            description="A product's backend mints tokens for the users that its key reaches. The value is shown once.",
            body=api.MachineTokenCreate,
            answers={201: (api.MintedMachineToken, "The token.")},
        ),
        Route(
            "GET",
            "/v1/users/{user}/machine-tokens",
            machines.list_tokens,
            "List the user's machine tokens, newest first",
            scope="jobs",
            parameters=paging.PARAMETERS,
            answers={200: (api.Page[api.MachineToken], "One page; revoked and expired tokens included.")},
        ),
        Route(
            "DELETE",
            "/v1/users/{user}/machine-tokens/{token_id}",
            machines.revoke_token,
            "Revoke a machine token",
            scope="jobs",
            description="A sidecar connected with it is cut off within a heartbeat. Revoking twice is no error.",
            answers={204: (None, "It is revoked.")},
        ),
    ]


def _of_keys(keys: ApiKeyRoutes) -> list[Route]:
    unbound = "The key must not be bound to users: it could mint one that reaches more."
    return [
        Route(
            "POST",
            "/v1/api-keys",
            keys.mint,
            "Mint an API key",
            scope="admin",
            description=f"The value is shown once. {unbound}",
            body=api.ApiKeyCreate,
            answers={201: (api.MintedApiKey, "The key.")},
        ),
        Route(
            "GET",
            "/v1/api-keys",
            keys.list_keys,
            "List API keys, newest first",
            scope="admin",
            description=unbound,
            parameters=paging.PARAMETERS,
            answers={200: (api.Page[api.ApiKey], "One page; revoked keys included.")},
        ),
        Route(
            "DELETE",
            "/v1/api-keys/{key_id}",
            keys.revoke,
            "Revoke an API key",
            scope="admin",
            description=f"It is heeded everywhere within 10 seconds. Revoking twice is no error. {unbound}",
            answers={204: (None, "It is revoked.")},
        ),
    ]


def _of_documents(documents: Documents) -> list[Route]:
    return [
        Route(
            "GET",
            "/openapi.json",
            documents.openapi,
            "Describe this API",
            answers={200: (dict, "This document.")},
        ),
        Route(
            "GET",
            "/problems/{slug}",
            documents.problem,
            "Explain a problem type",
            answers={200: (str, "What it means and what to do.")},
        ),
    ]
