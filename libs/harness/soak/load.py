"""The load of a run: callers who submit, submit again, cancel and read, and onlookers who ask for presence.

Promises: every request and what came of it is in the history, those that were never answered included. A broken
          connection or a 503 is taken to the next gateway, under the same key and with the same payload.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import httpx
import msgspec

from harness.drills.target import Gateway
from harness.soak.history import Answered, Asked, History, PresenceTold, now_ms
from harness.soak.plan import Plan, Request
from towline.wire import api, json

# A product's backend that cannot get its job in goes on for a while, and then tells its user.
PERSISTS_S = 20.0
ASK_AGAIN_S = 0.3
# On top of the wait. Longer than anything may take, so that a slow answer is measured and not cut off.
ANSWER_WITHIN_S = 40.0
PRESENCE_EVERY_S = 1.0


def mark_of(user: str, key: str) -> str:
    """What a job's tool notes and returns."""
    return f"{user}/{key}"


def args_of(request: Request) -> str:
    """What a submission asks its tool to do."""
    return json.dumps({"mark": mark_of(request.user, request.key), "seconds": request.seconds}).decode()


class Load:
    """See the module."""

    def __init__(self, api_key: str, gateways: Sequence[Gateway], history: History) -> None:
        self._gateways = gateways
        self._history = history
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"}, limits=httpx.Limits(max_connections=None)
        )
        self._requests = 0
        self._jobs: dict[tuple[str, str], str] = {}

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def run(self, plan: Plan) -> None:
        """Carry out all requests of a plan, each at its time; returns when the last one is through."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for request in plan.requests:
                await asyncio.sleep(began + request.at_s - time.monotonic())
                group.create_task(self.carry_out(request), name=f"{request.verb}:{request.user}:{request.key}")

    async def carry_out(self, request: Request) -> None:
        """Ask, and ask the next gateway while there is no answer. What was never accepted is not read or cancelled."""
        until = time.monotonic() + PERSISTS_S
        gateway = request.gateway
        while not await self._ask(request, self._gateways[gateway % len(self._gateways)]):
            if time.monotonic() > until:
                return
            gateway += 1
            await asyncio.sleep(ASK_AGAIN_S)

    async def watch(self, users: Sequence[str]) -> None:
        """Ask every gateway for every machine's presence, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for gateway in self._gateways:
                group.create_task(self._watch(gateway, users), name=f"presence:{gateway.name}")

    async def _watch(self, gateway: Gateway, users: Sequence[str]) -> None:
        while True:
            for user in users:
                asked_ms = now_ms()
                with contextlib.suppress(httpx.TransportError):
                    url = f"{gateway.url}/v1/users/{user}/presence"
                    response = await self._http.get(url, timeout=ANSWER_WITHIN_S)
                    if response.is_success:
                        state = msgspec.json.decode(response.content, type=api.Presence).state
                        told = PresenceTold(
                            at_ms=now_ms(), user=user, gateway=gateway.name, asked_ms=asked_ms, state=state
                        )
                        self._history.add(told)
                await asyncio.sleep(PRESENCE_EVERY_S / len(users))

    async def _ask(self, request: Request, gateway: Gateway) -> bool:
        """One request and its answer into the history; False: to be asked again."""
        user, key = request.user, request.key
        method, path, headers, content = "GET", "", {"Prefer": f"wait={request.wait_s}"}, b""
        if request.verb == "submit":
            body = {
                "name": request.tool,
                "args": msgspec.Raw(args_of(request).encode()),
                "timeout_s": request.timeout_s,
                "deadline_s": request.deadline_s,
                "if_offline": request.if_offline,
            }
            method, path, content = "POST", f"/v1/users/{user}/jobs", msgspec.json.encode(body)
            headers |= {"Idempotency-Key": f'"{key}"', "Content-Type": "application/json"}
        else:
            job = self._jobs.get((user, key))
            if job is None:
                return True
            path = f"/v1/jobs/{job}"
            if request.verb == "cancel":
                method, headers = "DELETE", {}
        self._requests += 1
        number = self._requests
        self._history.add(
            Asked(
                at_ms=now_ms(),
                request=number,
                verb=request.verb,
                user=user,
                key=key,
                gateway=gateway.name,
                wait_s=request.wait_s,
                tool=request.tool if request.verb == "submit" else "",
                args=args_of(request) if request.verb == "submit" else "",
            )
        )
        try:
            response = await self._http.request(
                method,
                gateway.url + path,
                content=content,
                headers=headers,
                timeout=ANSWER_WITHIN_S + request.wait_s,
            )
        except httpx.TransportError as error:
            self._history.add(Answered(at_ms=now_ms(), request=number, status=0, problem=type(error).__name__))
            return False
        answer = _read_answer(number, response)
        self._history.add(answer)
        if answer.job:
            self._jobs[user, key] = answer.job
        return response.status_code != httpx.codes.SERVICE_UNAVAILABLE


def _read_answer(number: int, response: httpx.Response) -> Answered:
    at_ms = now_ms()
    if not response.is_success:
        slug = msgspec.json.decode(response.content, type=api.Problem).slug
        return Answered(at_ms=at_ms, request=number, status=response.status_code, problem=slug)
    job = msgspec.json.decode(response.content, type=api.Job)
    return Answered(
        at_ms=at_ms,
        request=number,
        status=response.status_code,
        job=job.job,
        user=job.user,
        state=job.state,
        outcome="" if isinstance(job.outcome, msgspec.UnsetType) else bytes(job.outcome).decode(),
        ended_at="" if isinstance(job.ended_at, msgspec.UnsetType) else job.ended_at,
        replayed=job.replayed,
        payload_matches=job.payload_matches is not False,
        machine="" if isinstance(job.machine, msgspec.UnsetType) else job.machine,
    )
