"""Jobs: tool calls on users' machines.

Promises: a submission is repeated under its key only, and so is never a second job.
"""

import json as stdlib_json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from towline.client.calls import Calls, idempotency, in_path, wait_for
from towline.transport import InvalidRequest
from towline.wire import json
from towline.wire.api import Job, JobState, JobSubmit, Outcome, Page


def outcome_of(job: Job) -> Outcome | None:
    """Read how a job ended: its `result`, or its `error`; None while it has not."""
    return None if job.outcome is UNSET else msgspec.json.decode(job.outcome, type=Outcome)


class JobCalls(Calls):
    """The calls about jobs; see `towline.client.Client`."""

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
            f"/v1/users/{in_path(user, 'user')}/jobs",
            body=body,
            headers=idempotency(idempotency_key),
            wait_until=until,
        )
        ended = await self._wait_for_job(job, until)
        # Only the answer to the submission knows what became of it.
        return msgspec.structs.replace(ended, replayed=job.replayed, payload_matches=job.payload_matches)

    async def read_job(self, job_id: str, *, wait_s: float = 0.0) -> Job:
        """Read a job, waiting for its end up to `wait_s`, as `submit` does."""
        until = time.monotonic() + wait_s
        return await self._wait_for_job(await self._get_job_once(job_id, until), until)

    async def cancel_job(self, job_id: str) -> Job:
        """Cancel a job. One that was begun ends as its machine says: look at `terminal`, or wait with `read_job`."""
        return await self._call(Job, "DELETE", f"/v1/jobs/{in_path(job_id, 'job')}")

    async def list_jobs(
        self, user: str, *, state: JobState | None = None, idempotency_key: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Job]:
        """Go through a user's jobs, newest first; at most `limit` of them."""
        params = {"state": state, "idempotency_key": idempotency_key}
        async for job in self._list(Page[Job], f"/v1/users/{in_path(user, 'user')}/jobs", params, limit):
            yield job

    async def _get_job_once(self, job_id: str, until: float) -> Job:
        return await self._call(Job, "GET", f"/v1/jobs/{in_path(job_id, 'job')}", wait_until=until)

    async def _wait_for_job(self, job: Job, until: float) -> Job:
        return await wait_for(job, _is_over, lambda: self._get_job_once(job.job, until), until=until)


def _is_over(job: Job) -> bool:
    return job.terminal or job.machine is not UNSET


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    try:
        # The standard encoder, because ours writes NaN as null; read back, the text is held against all rules.
        plain: dict[str, Any] = json.loads(stdlib_json.dumps(dict(args), allow_nan=False))
    except json.JsonProblem as error:
        raise InvalidRequest(f"args: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"args cannot be written as JSON: {error}") from error
    return plain
