"""Client: the gateway's HTTP API, async and small.

Owns:     the calls and their types, waiting for the end of a job, going through lists; `towline.stream` has streams.
Promises: a call is repeated only where a second one changes nothing: reads, cancels, revocations, and submissions,
          which carry their idempotency key. A refusal is an `ApiProblem`, no answer is `GatewayUnreachable`.
Used by:  backends of products; the commands `towline jobs`, `machines`, `runs` and `tokens`.
"""

import asyncio
import json as stdlib_json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from towline.stream import Break, Item, RunEvent, read_events
from towline.transport import ApiProblem, GatewayUnreachable, InvalidRequest, Method, Transport
from towline.wire import json
from towline.wire.api import (
    PAGE_ITEMS_DEFAULT,
    Catalogue,
    Job,
    JobState,
    JobSubmit,
    MachineToken,
    MachineTokenCreate,
    MintedMachineToken,
    Outcome,
    Page,
    Presence,
)
from towline.wire.events import PROGRESS_TYPES, TERMINAL_TYPES
from towline.wire.ids import is_id, parse_idempotency_key
from towline.wire.runs import STREAM_RUNS_MAX, End, Gap, Run, RunFollow, RunState, SourceFollow

DEFAULT_URL = "http://127.0.0.1:8080"

# Before a wait goes on, growing from round to round: a replica that drains, or has no place for another waiter, answers
# at once, and must not be asked in a tight loop.
WAIT_PAUSE_FIRST_S = 0.1
WAIT_PAUSE_MAX_S = 2.0

__all__ = [
    "DEFAULT_URL",
    "ApiProblem",
    "Break",
    "Client",
    "End",
    "Gap",
    "GatewayUnreachable",
    "InvalidRequest",
    "RunEvent",
    "SourceFollow",
    "outcome_of",
]

T = TypeVar("T")


def outcome_of(job: Job) -> Outcome | None:
    """Read how a job ended: its `result`, or its `error`; None while it has not."""
    return None if job.outcome is UNSET else msgspec.json.decode(job.outcome, type=Outcome)


class Client:
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
        self._transport = Transport(base_url, api_key, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()

    async def submit(
        self,
        user: str,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str,
        wait_s: float = 0.0,
        timeout_s: float = 120.0,
        deadline_s: float = 300.0,
        if_offline: Literal["fail", "queue"] = "fail",
        on_machine_change: Literal["unknown", "wait"] = "unknown",
    ) -> Job:
        """Run a tool on the user's machine, once per key: a second call with the same key gets the first one's job.

        Args:
            idempotency_key: 1-255 characters of visible ASCII; make it from what the work is for, and keep it until
                the answer is there.
            wait_s: how long to wait for the end, over as many requests as it takes.
            timeout_s: for the tool, from its start on the machine (at most 600).
            deadline_s: for the job, from its acceptance (at most 86 400).

        Returns:
            The job, ended or not: look at `terminal`. The wait also ends when the machine goes offline
            (`machine == "offline"`); the job goes on then, until its deadline.
        """
        body = JobSubmit(name, _plain(args or {}), timeout_s, deadline_s, if_offline, on_machine_change)
        until = time.monotonic() + wait_s
        job = await self._call(
            Job,
            "POST",
            f"/v1/users/{_id(user, 'user')}/jobs",
            body=body,
            headers={"Idempotency-Key": _quoted_key(idempotency_key)},
            wait_until=until,
        )
        ended = await self._wait(job, until)
        # Only the answer to the submission knows what became of it.
        return msgspec.structs.replace(ended, replayed=job.replayed, payload_matches=job.payload_matches)

    async def get_job(self, job_id: str, *, wait_s: float = 0.0) -> Job:
        """Read a job, waiting for its end up to `wait_s`, as `submit` does."""
        until = time.monotonic() + wait_s
        return await self._wait(await self._get_job_once(job_id, until), until)

    async def cancel_job(self, job_id: str) -> Job:
        """Cancel a job. One that was begun ends as its machine says: look at `terminal`, or wait with `get_job`."""
        return await self._call(Job, "DELETE", f"/v1/jobs/{_id(job_id, 'job')}")

    async def list_jobs(
        self, user: str, *, state: JobState | None = None, idempotency_key: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Job]:
        """Go through a user's jobs, newest first; at most `limit` of them."""
        params = {"state": state, "idempotency_key": idempotency_key}
        async for job in self._list(Page[Job], f"/v1/users/{_id(user, 'user')}/jobs", params, limit):
            yield job

    async def presence(self, user: str, *, probe: bool = False) -> Presence:
        """Say whether the user's machine is connected; `probe` asks the machine itself (`probed`, `rtt_ms`)."""
        params = {"probe": "true"} if probe else {}
        return await self._call(Presence, "GET", f"/v1/users/{_id(user, 'user')}/presence", params=params)

    async def tools(self, user: str) -> Catalogue:
        """Read the catalogue that the user's machine announced."""
        return await self._call(Catalogue, "GET", f"/v1/users/{_id(user, 'user')}/tools")

    async def mint_machine_token(self, user: str, *, name: str = "", ttl_s: float | None = None) -> MintedMachineToken:
        """Make a token for the user's sidecar; its value is in this answer only. Never repeated by itself."""
        path = f"/v1/users/{_id(user, 'user')}/machine-tokens"
        return await self._call(MintedMachineToken, "POST", path, body=MachineTokenCreate(name, ttl_s))

    async def list_machine_tokens(self, user: str, *, limit: int | None = None) -> AsyncIterator[MachineToken]:
        """Go through a user's machine tokens, newest first, revoked ones included; at most `limit` of them."""
        path = f"/v1/users/{_id(user, 'user')}/machine-tokens"
        async for token in self._list(Page[MachineToken], path, {}, limit):
            yield token

    async def revoke_machine_token(self, user: str, token_id: str) -> None:
        """End a token; the socket that it opened is closed within a heartbeat."""
        await self._transport.request(
            "DELETE", f"/v1/users/{_id(user, 'user')}/machine-tokens/{_id(token_id, 'token')}"
        )

    async def follow_run(
        self,
        run: str,
        sources: Sequence[SourceFollow],
        *,
        progress_types: Sequence[str] = PROGRESS_TYPES,
        terminal_types: Sequence[str] = TERMINAL_TYPES,
        stall_after_s: float = 900.0,
        max_duration_s: float = 86_400.0,
    ) -> Run:
        """Have the product follow a run's sources into one stream; a second call with the same body changes nothing.

        `RunFollow` says what the arguments mean. Another body is refused (`run-differs`), and so is the id of a run
        that has ended (`run-ended`).
        """
        body = RunFollow(list(sources), list(progress_types), list(terminal_types), stall_after_s, max_duration_s)
        return await self._call(Run, "PUT", f"/v1/runs/{_id(run, 'run')}", body=body)

    async def read_run(self, run: str) -> Run:
        """Read how a run and each of its sources are."""
        return await self._call(Run, "GET", f"/v1/runs/{_id(run, 'run')}")

    async def stop_run(self, run: str) -> Run:
        """Stop following a run; it is `stopping` until its relay has written the end into the stream."""
        return await self._call(Run, "DELETE", f"/v1/runs/{_id(run, 'run')}")

    async def list_runs(self, *, state: RunState | None = None, limit: int | None = None) -> AsyncIterator[Run]:
        """Go through all runs, newest first; at most `limit` of them."""
        async for run in self._list(Page[Run], "/v1/runs", {"state": state}, limit):
            yield run

    def events(
        self,
        run: str | Sequence[str],
        *,
        last_event_id: str | None = None,
        from_: Literal["start", "live"] = "start",
        on_break: Callable[[Break], None] | None = None,
    ) -> AsyncGenerator[Item, None]:
        """Follow the events of one run, or of up to 20 over one connection, until the runs have ended.

        Lost, silent and closed connections are replaced, each going on after the last event, for as long as it takes;
        only a first connection that never comes about is given up. If you leave before the end, close the iterator
        (`contextlib.aclosing`), and with it the connection.

        Args:
            run: an id, or a list of ids. The ids of a list's events are good for the same list only.
            last_event_id: `RunEvent.id` after which to go on; it wins over `from_`.
            from_: `start` brings what the buffer still has before what comes next, `live` does not.
            on_break: told of each break, before the pause.

        Yields:
            RunEvent: in each run's order, none twice.
            Gap: events are missing here; those that follow may repeat earlier ones, with their `uid`.
            End: the run has ended, and this was all of it.

        Raises:
            ApiProblem: refused for good: 400 (no such cursor), 401, 404.
        """
        runs = [run] if isinstance(run, str) else list(run)
        ids = [_id(each, "run") for each in runs]
        if not 1 <= len(set(runs)) == len(runs) <= STREAM_RUNS_MAX:
            raise InvalidRequest(f"1 to {STREAM_RUNS_MAX} different runs can be followed at once")
        if last_event_id is not None and not (last_event_id.isascii() and last_event_id.isprintable()):
            raise InvalidRequest(f"{last_event_id[:40]!r} is no event's id")
        return read_events(
            self._transport,
            f"/v1/runs/{ids[0]}/events" if isinstance(run, str) else "/v1/events",
            runs,
            params={} if isinstance(run, str) else {"runs": ",".join(runs)},
            last_event_id=last_event_id or "",
            live=from_ == "live",
            on_break=on_break,
        )

    async def _get_job_once(self, job_id: str, until: float) -> Job:
        return await self._call(Job, "GET", f"/v1/jobs/{_id(job_id, 'job')}", wait_until=until)

    async def _wait(self, job: Job, until: float) -> Job:
        pause_max_s = WAIT_PAUSE_FIRST_S
        while not job.terminal and job.machine is UNSET and (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(random.uniform(0, min(pause_max_s, left_s)))  # noqa: S311 (spread, no secret)
            pause_max_s = min(2 * pause_max_s, WAIT_PAUSE_MAX_S)
            job = await self._get_job_once(job.job, until)
        return job

    async def _list(
        self, page_type: type[Page[T]], path: str, params: Mapping[str, str | None], limit: int | None
    ) -> AsyncIterator[T]:
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE_ITEMS_DEFAULT if left is None else min(left, PAGE_ITEMS_DEFAULT)
            given = {name: value for name, value in {**params, "cursor": cursor}.items() if value is not None}
            page = await self._call(page_type, "GET", path, params={"limit": str(size), **given})
            for item in page.items:
                yield item
            left = None if left is None else left - len(page.items)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _call(
        self,
        answer: type[T],
        method: Method,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
        wait_until: float = 0.0,
    ) -> T:
        response = await self._transport.request(
            method, path, params=params, body=body, headers=headers or {}, wait_until=wait_until
        )
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.DecodeError as error:
            raise GatewayUnreachable(f"{self._transport.url} gave an answer that is not this API's: {error}") from error


def _id(text: str, what: str) -> str:
    # Also keeps `..` and `/` out of the path.
    if not is_id(text):
        raise InvalidRequest(
            f"{text!r} is no {what} id: 1-200 characters of A-Z a-z 0-9 . _ : @ -, the first a letter or digit"
        )
    return quote(text, safe=":@")


def _quoted_key(key: str) -> str:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    try:
        parse_idempotency_key([f'"{escaped}"'])
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return f'"{escaped}"'


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    try:
        # The standard encoder, because ours writes NaN as null; read back, the text is held against all rules.
        plain: dict[str, Any] = json.loads(stdlib_json.dumps(dict(args), allow_nan=False))
    except json.JsonProblem as error:
        raise InvalidRequest(f"args: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"args cannot be written as JSON: {error}") from error
    return plain
