"""The API's description is true to the code: a real gateway is asked whatever the description allows, and more."""

import json as stdlib_json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from gateway_door import Door, open_door
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core import NotSet

from gateway import problems
from harness.servers import Servers
from towline.wire import api, json, runs, threads

EXAMPLES = 10
AGENT = "agent-of-the-contract"
OPERATIONS = [
    ("POST", "/v1/users/{user}/jobs"),
    ("GET", "/v1/users/{user}/jobs"),
    ("GET", "/v1/jobs/{job}"),
    ("DELETE", "/v1/jobs/{job}"),
    ("GET", "/v1/users/{user}/presence"),
    ("GET", "/v1/users/{user}/tools"),
    ("POST", "/v1/users/{user}/machine-tokens"),
    ("GET", "/v1/users/{user}/machine-tokens"),
    ("DELETE", "/v1/users/{user}/machine-tokens/{token_id}"),
    ("PUT", "/v1/runs/{run}"),
    ("GET", "/v1/runs/{run}"),
    ("DELETE", "/v1/runs/{run}"),
    ("GET", "/v1/runs"),
    ("GET", "/v1/runs/{run}/events"),
    ("GET", "/v1/events"),
    ("POST", "/v1/stream-tokens"),
    ("PUT", "/v1/agents/{agent}"),
    ("GET", "/v1/agents/{agent}"),
    ("DELETE", "/v1/agents/{agent}"),
    ("GET", "/v1/agents"),
    ("POST", "/v1/threads"),
    ("GET", "/v1/threads"),
    ("GET", "/v1/threads/{thread}"),
    ("POST", "/v1/threads/{thread}/entries"),
    ("GET", "/v1/threads/{thread}/entries"),
    ("GET", "/v1/threads/{thread}/events"),
    ("GET", "/v1/turns/{turn}"),
    ("DELETE", "/v1/turns/{turn}"),
    ("GET", "/v1/usage"),
    ("POST", "/v1/api-keys"),
    ("GET", "/v1/api-keys"),
    ("DELETE", "/v1/api-keys/{key_id}"),
    ("GET", "/openapi.json"),
    ("GET", "/problems/{slug}"),
]


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway, which knows one agent."""
    async with open_door(servers, postgres_url, state_directory / "openapi") as opened:
        async with opened.client() as client:
            assert (await client.put(f"/v1/agents/{AGENT}", json={"kind": "echo"})).is_success
        yield opened


@pytest.fixture(scope="module")
def description(door: Door) -> dict[str, Any]:
    """The document, as served."""
    answer = httpx.get(f"{door.stack.gateways[0].url}/openapi.json")
    assert answer.status_code == 200
    document: dict[str, Any] = answer.json()
    return document


@pytest.fixture(scope="module")
def api_schema(door: Door, description: dict[str, Any]) -> Any:
    """The document, as schemathesis reads it."""
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=door.stack.gateways[0].url)
    # U+0000 is refused everywhere, which JSON Schema has no word for.
    schema.config.generation.update(allow_x00=False)
    return schema


def test_the_public_api_is_exactly_this(description: dict[str, Any]) -> None:
    """What is taken away or added here is a decision, not an accident."""
    described = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: part)
def test_answers_are_as_described(door: Door, api_schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    """Every status, content type, header and body; what the description forbids is refused, nothing is a 500."""
    operation = api_schema[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        pytest.skip("nothing to get wrong")

    cases = operation.as_strategy(generation_mode=mode)
    if mode is GenerationMode.POSITIVE:
        # JSON Schema has no word for what no peer can carry: integers beyond 64 bit somewhere inside `args`.
        cases = cases.filter(lambda case: _can_be_carried(case.body)).map(_with_what_is_there)

    @given(case=cases)
    # The same examples each time: a gate rolls no dice. (Rarely schemathesis believes that it broke what it did not.)
    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    def check(case: schemathesis.Case) -> None:
        if str(case.headers.get("Prefer", "")).startswith("wait="):
            case.headers["Prefer"] = "wait=0"  # as valid as any other, and over sooner
        case.call_and_validate(headers={"Authorization": f"Bearer {door.stack.api_key}"})

    check()


async def test_every_problem_is_described_and_documented(door: Door, description: dict[str, Any]) -> None:
    """The list in the code, the enumeration in the document and the pages are one."""
    (slug,) = description["paths"]["/problems/{slug}"]["get"]["parameters"]
    assert slug["schema"]["enum"] == sorted(problems.KINDS)
    async with door.client() as client:
        for kind in problems.KINDS.values():
            page = await client.get(f"/problems/{kind.slug}")
            assert (page.status_code, page.headers["content-type"]) == (200, "text/plain; charset=utf-8")
            assert kind.meaning in page.text


def test_headers_are_described_where_they_come(description: dict[str, Any]) -> None:
    """And nowhere else: who reads of a header looks for it."""

    def of(method: str, path: str, status: str) -> set[str]:
        return set(description["paths"][path][method]["responses"][status]["headers"]) - {"X-Request-Id"}

    assert of("post", "/v1/stream-tokens", "201") == set()
    assert of("get", "/v1/usage", "200") == set()
    assert of("post", "/v1/threads", "201") == of("put", "/v1/runs/{run}", "201") == {"Location"}
    assert of("post", "/v1/users/{user}/jobs", "202") == {"Location", "Preference-Applied", "Idempotent-Replayed"}
    assert of("get", "/v1/turns/{turn}", "200") == {"Preference-Applied"}


def test_bodies_are_those_of_the_client(description: dict[str, Any]) -> None:
    """The same structs on both sides: a member renamed in one place is renamed in both, or fails here."""
    schemas = description["components"]["schemas"]
    for struct in (api.Job, api.JobSubmit, api.Presence, api.Catalogue, api.MachineToken, api.ApiKey, api.Problem):
        assert set(schemas[struct.__name__]["properties"]) == {field.name for field in msgspec.structs.fields(struct)}
    for struct in (runs.Run, runs.RunSource, runs.RunFollow, runs.EventsPage, runs.StreamEvent, runs.StreamToken):
        assert set(schemas[struct.__name__]["properties"]) == {field.name for field in msgspec.structs.fields(struct)}
    for struct in (threads.Agent, threads.Thread, threads.Entry, threads.Turn, threads.Posted, threads.Usage):
        assert set(schemas[struct.__name__]["properties"]) == {field.name for field in msgspec.structs.fields(struct)}
    for struct in (threads.AgentPut, threads.ThreadCreate, threads.EntryPost):
        assert schemas[struct.__name__]["additionalProperties"] is False
    for struct in (api.JobSubmit, api.MachineTokenCreate, api.ApiKeyCreate, runs.RunFollow, runs.StreamTokenCreate):
        assert schemas[struct.__name__]["additionalProperties"] is False


def test_an_outcome_is_described_as_the_client_reads_it(description: dict[str, Any]) -> None:
    """It is carried as stored bytes, so its schema is written by hand."""
    described = description["components"]["schemas"]["Job"]["properties"]["outcome"]["properties"]
    assert set(described) == {field.name for field in msgspec.structs.fields(api.Outcome)}


def _with_what_is_there(case: schemathesis.Case) -> schemathesis.Case:
    """Keep to what this installation allows, which no schema can know."""
    # One credential is enough, and it is in the header.
    case.query.pop("access_token", None)
    if isinstance(case.body, dict) and "sources" in case.body:
        for i, source in enumerate(case.body["sources"]):
            source |= {"source": f"source-{i}", "url": "http://127.0.0.1:9/events"}
            source["headers"] = {f"x-{name}"[:100]: value for name, value in source.get("headers", {}).items()}
    if case.path == "/v1/stream-tokens":
        case.body.setdefault("runs", []).append("a-run")
        del case.body["runs"][runs.STREAM_RUNS_MAX :]
    elif case.path == "/v1/threads" and case.method == "POST":
        case.body["agent"] = AGENT
    elif case.path == "/v1/agents/{agent}" and case.method == "PUT":
        needed, optional = threads.AGENT_MEMBERS[case.body["kind"]]
        members = needed | optional - {"api_key", "signing_secret"} | {"kind", "turn_cap_s"}
        case.body = {name: value for name, value in case.body.items() if name in members}
        case.body |= {"url": "http://127.0.0.1:9/v1", "model": "small"} if "model" in needed else {}
        case.body |= {"url": "http://127.0.0.1:9/v1"} if "url" in needed else {}
    return case


def _can_be_carried(body: Any) -> bool:
    try:
        return isinstance(body, NotSet) or json.loads(stdlib_json.dumps(body)) is not None
    except json.JsonProblem:
        return False
