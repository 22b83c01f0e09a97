"""One request as a handler sees it: path, query, headers, and the body, read within limits.

Promises: a body over the limit is counted by us and refused readably, with or without Content-Length; what is wrong in
          it is named with its place.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from gateway import problems
from gateway.problems import Refusal
from towline.wire import ids, json

# A body of the largest permitted size over a slow line; longer, and a trickle holds a connection for ever.
BODY_TIMEOUT_S = 30.0

Header = tuple[bytes, bytes]
Body = TypeVar("Body")


class Request:
    """One request, as a handler sees it."""

    __slots__ = ("_headers", "_query", "_receive", "body_bytes_max", "params")

    def __init__(
        self,
        headers: Sequence[Header],
        receive: Receive,
        *,
        params: Mapping[str, str],
        query: Mapping[str, str],
        body_bytes_max: int,
    ) -> None:
        self._headers: dict[bytes, list[str]] = {}
        for name, value in headers:
            self._headers.setdefault(name, []).append(value.decode("latin-1"))
        self.params = params
        self.body_bytes_max = body_bytes_max
        self._receive = receive
        self._query = query

    def values(self, name: bytes) -> list[str]:
        """All values of a header, named in lower case."""
        return self._headers.get(name, [])

    def query(self, name: str) -> str | None:
        """One query parameter."""
        return self._query.get(name)

    def id(self, name: str) -> str:
        """The path's id of a user or run, as its caller chose it. Raises: Refusal, if it is none."""
        value = self.params[name]
        if not ids.is_id(value):
            raise Refusal(
                problems.INVALID_REQUEST,
                f"the {name} id in the path is not 1 to 200 of A-Z a-z 0-9 . _ : @ - beginning with a letter or digit",
            )
        return value

    async def read(self, body: type[Body]) -> Body:
        """Read and check the JSON body. Raises: Refusal, naming the place of what is wrong."""
        self._check_media_type()
        data = await self._read_bytes()
        try:
            return msgspec.convert(json.loads(data), body)
        except json.JsonProblem as problem:
            raise Refusal(problems.INVALID_REQUEST, f"the body: {problem}", place=problem.place) from None
        except msgspec.ValidationError as error:
            detail, _, place = str(error).partition(" - at ")
            place = place.strip("`") or "$"
            if "unknown field" in detail and (known := _members_at(body, place)):
                detail = f"{detail} (known: {', '.join(known)})"
            raise Refusal(problems.INVALID_REQUEST, f"the body: {detail} at {place}", place=place) from None

    async def disconnected(self) -> None:
        """Return when the client has gone; for handlers that wait, after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_media_type(self) -> None:
        given = self.values(b"content-type")
        media_type, _, parameters = (given[0] if len(given) == 1 else "").lower().partition(";")
        charset = parameters.strip().removeprefix("charset=").strip('"') if "charset=" in parameters else "utf-8"
        if media_type.strip() != "application/json" or charset != "utf-8":
            raise Refusal(problems.UNSUPPORTED_MEDIA_TYPE, "the header Content-Type must be application/json, in UTF-8")
        if any(value.strip().lower() not in ("", "identity") for value in self.values(b"content-encoding")):
            raise Refusal(problems.UNSUPPORTED_MEDIA_TYPE, "the header Content-Encoding must not be set")

    async def _read_bytes(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while size <= self.body_bytes_max:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Refusal(problems.BODY_TIMEOUT, f"the body was not complete within {BODY_TIMEOUT_S:g} s") from None
        if size > self.body_bytes_max:
            raise Refusal(problems.BODY_TOO_LARGE, f"the body is larger than {self.body_bytes_max} bytes")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _members_at(body: type, place: str) -> list[str]:
    """The members of the object that stands at a place of a body, as msgspec names it; none where that is no struct."""
    found: Any = msgspec.inspect.type_info(body)
    for name in re.findall(r"\.(\w+)|\[", place):
        match found:
            case msgspec.inspect.StructType():
                found = next((field.type for field in found.fields if field.encode_name == name), None)
            case msgspec.inspect.ListType():
                found = found.item_type
            case _:
                return []
    return [field.encode_name for field in found.fields] if isinstance(found, msgspec.inspect.StructType) else []


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""
