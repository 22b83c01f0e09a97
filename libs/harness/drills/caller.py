"""A product's backend as the drills play it: it submits with a key, and asks again under that key until it is answered.

Promises: a broken connection is taken to another gateway, with the same key and nothing else; every refusal on the way
          is kept, so that a drill can say "none".
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from harness.drills.target import DrillFailed, Gateway
from towline.wire import api, json
from towline.wire.runs import Resume, Run

# Sooner than any Retry-After: a drill wants to see when the door opens again.
ASK_AGAIN_S = 0.1
WAIT_ROUND_S = 60
ANSWERS_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a caller was told in the end.

    Attributes:
        job: None when it was refused.
        refusals: statuses and slugs of all refusals, such as `503 store-unavailable`; the last one counts.
        broken: requests that ended without an answer.
        at: when it came, monotonic seconds.
    """

    job: api.Job | None
    refusals: tuple[str, ...]
    broken: int
    at: float

    @property
    def outcome(self) -> str:
        """The outcome's own bytes; empty while there is none."""
        return (
            ""
            if self.job is None or isinstance(self.job.outcome, msgspec.UnsetType)
            else str(self.job.outcome, "utf-8")
        )


class Caller:
    """All callers of a drill; as many at once as are needed."""

    def __init__(self, api_key: str, gateways: Sequence[Gateway]) -> None:
        """`gateways`: read at each request, so it may change meanwhile."""
        self._gateways = gateways
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"}, limits=httpx.Limits(max_connections=None)
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def submit(
        self,
        user: str,
        body: Mapping[str, Any],
        key: str,
        *,
        wait: bool = True,
        first: int = 0,
        heeds_offline: bool = False,
        within_s: float = 60.0,
    ) -> Answer:
        """Submit, and go on with the same key until the job has ended (or, without `wait`, is accepted).

        Args:
            first: index of the gateway that is asked first.
            heeds_offline: also return, without an outcome, when the machine is said to be offline.

        Returns:
            Also when it was refused with anything but 503.

        Raises:
            DrillFailed: nothing of that within `within_s`.
        """
        deadline = time.monotonic() + within_s
        refusals: list[str] = []
        broken = 0
        for turn in range(first, 1_000_000):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DrillFailed(f"{user}: {key} was not answered within {within_s:g} s")
            wait_s = min(math.ceil(left_s), WAIT_ROUND_S) if wait else 0
            try:
                response = await self._post(turn, user, body, key, wait_s)
            except httpx.TransportError:
                broken += 1
            else:
                if response.is_success:
                    job = msgspec.json.decode(response.content, type=api.Job)
                    if job.terminal or not wait or (heeds_offline and job.machine == "offline"):
                        return Answer(job, tuple(refusals), broken, time.monotonic())
                else:
                    refusals.append(refusal(response))
                    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                        return Answer(None, tuple(refusals), broken, time.monotonic())
            await asyncio.sleep(ASK_AGAIN_S)
        raise AssertionError("unreachable")

    async def ask_once(
        self, user: str, body: Mapping[str, Any], key: str, *, at: int = 0, within_s: float = ANSWERS_WITHIN_S
    ) -> Answer:
        """Submit once, without waiting, to the gateway of that index. Raises: DrillFailed: no answer in time."""
        try:
            response = await self._post(at, user, body, key, 0, within_s=within_s)
        except httpx.TransportError as error:
            raise DrillFailed(f"{self._gateways[at].name} does not answer: {type(error).__name__}") from error
        if response.is_success:
            return Answer(msgspec.json.decode(response.content, type=api.Job), (), 0, time.monotonic())
        return Answer(None, (refusal(response),), 0, time.monotonic())

    async def presence(self, user: str, *, at: int = 0) -> api.Presence | None:
        """What the gateway of that index says of a machine; None if it does not answer."""
        url = f"{self._gateways[at % len(self._gateways)].url}/v1/users/{user}/presence"
        try:
            response = await self._http.get(url, timeout=ANSWERS_WITHIN_S)
        except httpx.TransportError:
            return None
        return msgspec.json.decode(response.content, type=api.Presence) if response.is_success else None

    async def ask_any(
        self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] = {}, first: int = 0
    ) -> httpx.Response:
        """Ask one gateway after another until one answers, with anything but 503.

        Args:
            first: index of the gateway that is asked first.

        Raises:
            DrillFailed: none did in time.
        """
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        for turn in range(first, 1_000_000):
            gateway = self._gateways[turn % len(self._gateways)]
            kind = {"Content-Type": "application/json"} if body else {}
            try:
                response = await self._http.request(
                    method, gateway.url + path, content=body, headers={**kind, **headers}, timeout=ANSWERS_WITHIN_S
                )
            except httpx.TransportError:
                pass
            else:
                if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return response
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(ASK_AGAIN_S)
        raise DrillFailed(f"no gateway answers {method} {path}")

    async def follow(self, run: str, urls: Mapping[str, str], *, resume: Mapping[str, Resume]) -> None:
        """Have a run followed, its sources' URLs and ways to resume by name. Raises: DrillFailed: refused."""
        sources = [{"source": source, "url": url, "resume": resume[source]} for source, url in urls.items()]
        response = await self.ask_any("PUT", f"/v1/runs/{run}", json.dumps({"sources": sources}))
        if not response.is_success:
            raise DrillFailed(f"{run} is not followed: {refusal(response)}")

    async def run(self, run: str) -> Run | None:
        """The run as any gateway shows it; None if there is none. Raises: DrillFailed: no gateway answers."""
        response = await self.ask_any("GET", f"/v1/runs/{run}")
        return msgspec.json.decode(response.content, type=Run) if response.is_success else None

    async def stop_run(self, run: str) -> None:
        """Have a run followed no longer. Raises: DrillFailed: no gateway answers."""
        await self.ask_any("DELETE", f"/v1/runs/{run}")

    async def _post(
        self,
        turn: int,
        user: str,
        body: Mapping[str, Any],
        key: str,
        wait_s: int,
        *,
        within_s: float = ANSWERS_WITHIN_S,
    ) -> httpx.Response:
        gateway = self._gateways[turn % len(self._gateways)]
        return await self._http.post(
            f"{gateway.url}/v1/users/{user}/jobs",
            content=json.dumps(body),
            headers={"Idempotency-Key": f'"{key}"', "Content-Type": "application/json", "Prefer": f"wait={wait_s}"},
            timeout=within_s + wait_s,
        )


def refusal(response: httpx.Response) -> str:
    """Status and slug of a problem, such as `503 store-unavailable`."""
    try:
        kind = json.loads(response.content)["type"].rpartition("/")[2]
    except (json.JsonProblem, KeyError, TypeError, AttributeError):
        kind = "no problem document"
    return f"{response.status_code} {kind}"
