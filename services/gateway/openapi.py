"""OpenAPI 3.1 of the public API, built from the route table that serves it and the structs that check its bodies."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from common.problems import ProblemType
from common.process.metrics import package_version
from gateway import problems
from gateway.http import Route
from towline.wire import json
from towline.wire.api import Problem
from towline.wire.ids import ID_PATTERN

_REF = "#/components/schemas/{name}"
_ID = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "user": _ID,
    "run": _ID,
    "agent": _ID,
    "slug": {"type": "string", "enum": sorted(problems.KINDS)},
}
_UUID = {"type": "string", "format": "uuid"}
_TEXT = {"schema": {"type": "string"}}
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {**_TEXT, "description": "the request's own, if it was fit for logs, else a fresh one"},
}
_LOCATION = {"Location": {**_TEXT, "description": "where to read on"}}
# What a header of the request brings into the answer.
_ANSWERED_HEADERS: dict[str, dict[str, Any]] = {
    "Prefer": {"Preference-Applied": {**_TEXT, "description": "`wait=N`, as it was applied"}},
    "Idempotency-Key": {
        "Idempotent-Replayed": {"schema": {"const": "true"}, "description": "the key had been accepted before"}
    },
}


def document(routes: Sequence[Route]) -> bytes:
    """The whole description, as JSON."""
    bodies = {route.body for route in routes if route.body}
    bodies |= {body for route in routes for body, _ in route.answers.values() if body not in (None, str, dict)}
    types = sorted([*bodies, Problem], key=str)
    refs, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schemas)
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Towline gateway",
                "version": package_version(),
                "description": "Jobs for users' own machines, threads that agents answer, and events for watchers."
                " Refusals are problems (RFC 9457), each documented at the address in its `type`."
                " Repeat a request whose fate you do not know with the same Idempotency-Key.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "apiKey": {"type": "http", "scheme": "bearer", "bearerFormat": "tlk_..."},
                    "streamToken": {"type": "http", "scheme": "bearer", "bearerFormat": "tls_..."},
                },
            },
        }
    )


def _operation(route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": getattr(route.handler, "__name__", route.summary),
        "summary": route.summary,
        "description": route.description,
        "parameters": _parameters(route),
        "responses": _responses(route, schemas),
        "security": [],
    }
    if route.scope:
        scopes = (route.scope,) if isinstance(route.scope, str) else route.scope
        needed = " or ".join(f"`{scope}`" for scope in scopes)
        operation["description"] += f"\n\nNeeds an API key with the scope {needed}."
        operation["security"] = [{"apiKey": []}]
    if route.streams:
        operation["description"] += " A stream token that names all of it will do, too."
        operation["security"] += [{"streamToken": []}]
    if route.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[route.body]}}}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS.get(name, _UUID)}
        for name in re.findall(r"\{(\w+)\}", route.template)
    ]
    declared = [
        {"name": p.name, "in": p.place, "required": p.required, "schema": p.schema, "description": p.description}
        for p in route.parameters
    ]
    return in_path + declared


def _responses(route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, (body, description) in route.answers.items():
        response: dict[str, Any] = {
            "description": description,
            "headers": _answer_headers(route, status),
        }
        if body is str:
            response["content"] = {"text/plain": {"schema": {"type": "string"}}}
        elif body is not None:
            schema = {"type": "object"} if body is dict else schemas[body]
            response["content"] = {"application/json": {"schema": schema}}
        if route.streams and status == 200:
            response.setdefault("content", {})["text/event-stream"] = {"schema": {"type": "string"}}
        responses[str(status)] = response
    by_status: dict[int, list[ProblemType]] = {}
    for kind in _problems(route):
        by_status.setdefault(kind.status, []).append(kind)
    for status, kinds in sorted(by_status.items()):
        responses[str(status)] = {
            "description": "; ".join(f"`{kind.slug}`: {kind.title.lower()}" for kind in kinds),
            "headers": _HEADERS,
            "content": {"application/problem+json": {"schema": schemas[Problem]}},
        }
    return responses


def _answer_headers(route: Route, status: int) -> dict[str, Any]:
    headers = dict(_HEADERS)
    if status == 202 or (status == 201 and route.locates):
        headers |= _LOCATION
    for parameter in route.parameters:
        headers |= _ANSWERED_HEADERS.get(parameter.name, {})
    return headers


def _problems(route: Route) -> list[ProblemType]:
    kinds = list(route.problems)
    if route.scope:
        kinds += [problems.UNAUTHENTICATED, problems.INSUFFICIENT_SCOPE, problems.STORE_UNAVAILABLE]
    if "{" in route.template:
        kinds.append(problems.NOT_FOUND)
    if route.body:
        kinds += [problems.BODY_TIMEOUT, problems.BODY_TOO_LARGE, problems.UNSUPPORTED_MEDIA_TYPE]
    return [*kinds, problems.INVALID_REQUEST, problems.INTERNAL_ERROR]
