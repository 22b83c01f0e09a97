"""What tests of the stores and of the worker share: jobs to accept, and a session's side of the scripts."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from common.ids import JobId, MachineId, SessionId, UserId, WorkerId, new_id
from common.store import keys
from common.store.jobs import Jobs, Taken, parse_take, take_call
from common.store.presence import Assertion, Served, parse_serve, serve_call
from common.store.records import Finish, NewJob, Record, fingerprint, scope_of_user
from common.store.redis import Redis
from common.store.requests import Requests

TIMING = keys.Timing(heartbeat_s=10)
WORKER = WorkerId("worker-1")
_users = itertools.count(1)


def new_user() -> UserId:
    """A user of one test alone: the database is shared by a module."""
    return UserId(f"user-{next(_users)}-{new_id()[-12:]}")


def new_job(
    user: UserId,
    key: str = "",
    *,
    name: str = "echo",
    args: str = "{}",
    hinted: bool = True,
    timeout_s: float = 120,
    deadline_s: float = 300,
    on_machine_change: str = "unknown",
    traceparent: str = "",
) -> NewJob:
    """A job as the door hands it in; a fresh key unless one is given."""
    job = JobId(new_id())
    return NewJob(
        job=job,
        user=user,
        scope=scope_of_user(user),
        key=key or f"key-{job}",
        name=name,
        args=args,
        fingerprint=fingerprint(name, args.encode()),
        timeout_s=timeout_s,
        deadline_s=deadline_s,
        hinted=hinted,
        on_machine_change=on_machine_change,
        traceparent=traceparent,
    )


async def accepted(requests: Requests, user: UserId, **members: Any) -> Record:
    """The record of a fresh job."""
    answer = await requests.accept(new_job(user, **members))
    assert answer.inserted
    return answer.record


async def queued(requests: Requests, jobs: Jobs, user: UserId, *, args: str = "{}", **members: Any) -> Record:
    """The record of a fresh job that is in the user's stream too."""
    record = await accepted(requests, user, args=args, **members)
    assert await jobs.enqueue(record, args, None)
    return record


async def finished(requests: Requests, record: Record, outcome: str = '{"result":1}') -> Record:
    """The record of a job that its machine has completed."""
    answer = await requests.finish(Finish(record.job, record.user, "completed", outcome, new_id()))
    assert answer is not None
    (stored,) = (await requests.read([record.job])).values()
    assert (stored.state, stored.outcome, stored.ended_ms) == (
        answer.record.state,
        answer.record.outcome,
        answer.record.ended_ms,
    )
    return stored


@dataclass
class Holder:
    """A session as the scripts see it: it asserts, claims and takes, with everything in values."""

    redis: Redis
    user: UserId
    epoch: int
    machine: str = "machine-1"
    worker: WorkerId = WORKER
    session: SessionId = field(default_factory=lambda: SessionId(new_id()))
    first: bool = True
    tools: dict[str, bool] | None = field(default_factory=lambda: {"echo": True, "fill_form": False})

    async def serve(
        self,
        *,
        free: int = 16,
        in_flight: tuple[JobId, ...] = (),
        busy: bool = False,
        unreadable: Sequence[str] = (),
    ) -> Served:
        """Assert, claim and take."""
        assertion = Assertion(
            user=self.user,
            machine=MachineId(self.machine),
            worker=self.worker,
            session=self.session,
            epoch=self.epoch,
            first=self.first,
            since_ms=1_000,
            seen_ms=2_000,
            busy=busy,
            free=free,
            in_flight=in_flight,
            tools=self.tools,
            unreadable=unreadable,
        )
        (answer,) = await self.redis.run_many([serve_call(assertion, TIMING)])
        if isinstance(answer, Exception):
            raise answer
        served = parse_serve(answer)
        if served.status == "ok":
            self.first, self.tools = False, None
        return served

    async def take(self, *, free: int = 16) -> list[Taken] | None:
        """Take what is new; None when refused."""
        (answer,) = await self.redis.run_many([take_call(self.user, self.epoch, self.session, free)])
        if isinstance(answer, Exception):
            raise answer
        return parse_take(answer)


def names(taken: list[Taken] | tuple[Taken, ...] | Any) -> list[JobId]:
    """Job ids of what was taken, in order."""
    return [one.entry.job for one in taken]


@dataclass(frozen=True)
class UserKeys:
    """What Redis holds of a user, read with a plain client."""

    client: redis.asyncio.Redis
    user: UserId

    async def exist(self) -> set[str]:
        """Which of the user's keys there are."""
        every = {
            "presence": keys.presence(self.user),
            "epoch": keys.epoch(self.user),
            "tools": keys.tools(self.user),
            "jobs": keys.jobs(self.user),
            "index": keys.jobs_index(self.user),
        }
        return {name for name, key in every.items() if await self.client.exists(key)}

    async def presence(self) -> dict[str, str]:
        """The hash."""
        return dict(await self.client.hgetall(keys.presence(self.user)))

    async def tools(self) -> dict[str, str]:
        """The hash, without the member that names no tool."""
        members = dict(await self.client.hgetall(keys.tools(self.user)))
        assert members.pop("", "") == ""
        return members

    async def entries(self) -> list[str]:
        """Jobs in the stream, in order."""
        return [fields["job"] for _, fields in await self.client.xrange(keys.jobs(self.user))]

    async def index(self) -> dict[str, str]:
        """The hash."""
        return dict(await self.client.hgetall(keys.jobs_index(self.user)))

    async def consumers(self) -> dict[str, int]:
        """Pending entries by consumer."""
        infos = await self.client.xinfo_consumers(keys.jobs(self.user), keys.GROUP)
        return {info["name"]: info["pending"] for info in infos}

    async def pending(self) -> int:
        """Entries that were taken and not acknowledged."""
        groups = await self.client.xinfo_groups(keys.jobs(self.user))
        return sum(group["pending"] for group in groups)
